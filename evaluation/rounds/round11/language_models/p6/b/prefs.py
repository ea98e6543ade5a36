"""Preference pairs and the on-disk cache of reference log-probabilities."""
import json
import os
import random
import zlib

import torch

PAD, BOS = 0, 1


def make_pairs(n, vocab, seed, longest):
    rng = random.Random(seed)
    pairs = []
    for _ in range(n):
        base = rng.randrange(4, vocab - 6)
        prompt = [base + rng.randrange(6) for _ in range(rng.randint(4, longest))]
        good = sorted(prompt)[:4]
        bad = [base + rng.randrange(6) for _ in range(4)]
        pairs.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return pairs


def fingerprint(pair):
    blob = json.dumps([pair["prompt"], pair["chosen"], pair["rejected"]])
    return f"{zlib.crc32(blob.encode()):08x}"


def truncate(pairs, max_prompt):
    """Keeps the end of long prompts, as in the trainer."""
    return [dict(p, prompt=p["prompt"][-max_prompt:]) for p in pairs]


def collate(pairs, max_prompt, answer=4):
    rows = []
    for side in ("chosen", "rejected"):
        for p in pairs:
            gap = max_prompt - len(p["prompt"])
            rows.append([PAD] * gap + [BOS] + p["prompt"] + p[side][:answer])
    return torch.tensor(rows)


class ReferenceCache:
    """Log-probabilities of the frozen reference, keyed by the content of the pair."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "reference.json")
        self.table = {}
        if os.path.exists(self.path):
            with open(self.path) as f:
                self.table = json.load(f)

    def missing(self, pairs):
        return [p for p in pairs if fingerprint(p) not in self.table]

    def put(self, pair, chosen, rejected):
        self.table[fingerprint(pair)] = [chosen, rejected]

    def get(self, pairs):
        values = torch.tensor([self.table[fingerprint(p)] for p in pairs])
        return values[:, 0], values[:, 1]

    def merge(self, tables):
        for t in tables:
            self.table.update(t)

    def write(self):
        with open(self.path, "w") as f:
            json.dump(self.table, f)


def load_shard(rank, vocab, max_prompt):
    """The preference pairs of this rank, cut to the length the trainer uses."""
    longest = 8 + 2 * rank
    pairs = make_pairs(48, vocab, seed=70 + rank, longest=longest)
    return pairs
