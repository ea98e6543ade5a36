"""Multiple-choice tasks: the model must prefer the right continuation of a few-shot prompt."""
import os
import time

import numpy as np


def _answer(task, stem, vocab):
    if task == "copy":
        return list(stem)
    if task == "shift":
        return [(t + 1) % vocab for t in stem]
    return list(stem)[::-1]


def build_requests(task, cfg):
    rng = np.random.default_rng([cfg.seed, sum(map(ord, task))])
    rows, gold = [], []
    for _ in range(cfg.docs_per_task):
        prefix = []
        for _ in range(cfg.num_fewshot):
            shot = rng.integers(2, cfg.vocab, 3).tolist()
            prefix += shot + _answer(task, shot, cfg.vocab)
        stem = rng.integers(2, cfg.vocab, 3).tolist()
        right = _answer(task, stem, cfg.vocab)
        wrong = rng.permutation(cfg.vocab)[:3].tolist()
        label = int(rng.integers(2))
        choices = [wrong, right] if label else [right, wrong]
        rows.append([prefix + stem + c for c in choices])
        gold.append(label)
    return np.array(rows), np.array(gold)


class RequestCache:
    """Requests are built by the first rank only and shared through the cache folder."""

    def __init__(self, folder, cfg, rank):
        self.folder, self.cfg, self.rank = folder, cfg, rank
        os.makedirs(folder, exist_ok=True)

    def path(self, task):
        return os.path.join(self.folder, f"requests-{task}-{self.cfg.fingerprint()}.npz")

    def get(self, task):
        path = self.path(task)
        if self.rank == 0 and not os.path.exists(path):
            rows, gold = build_requests(task, self.cfg)
            np.savez(path + ".tmp.npz", rows=rows, gold=gold)
            os.replace(path + ".tmp.npz", path)
        while not os.path.exists(path):
            time.sleep(0.1)
        with np.load(path) as data:
            return data["rows"], data["gold"]
