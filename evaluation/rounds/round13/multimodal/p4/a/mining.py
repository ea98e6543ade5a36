"""Teacher index with hard negatives, built once per setting and shared through the file system."""
import logging
import os
import time
from pathlib import Path

import numpy as np

log = logging.getLogger("mining")


class Corpus:
    def __init__(self, s):
        rng = np.random.default_rng(s.seed)
        topics = rng.normal(size=(60, s.teacher_dim))
        self.doc = topics[rng.integers(60, size=s.corpus)] + 0.6 * rng.normal(size=(s.corpus, s.teacher_dim))
        self.positive = rng.integers(s.corpus, size=s.queries)
        self.query = self.doc[self.positive] + 0.5 * rng.normal(size=(s.queries, s.teacher_dim))
        self.doc, self.query = self.doc.astype(np.float32), self.query.astype(np.float32)


def mine(corpus, k):
    score = corpus.query @ corpus.doc.T
    score[np.arange(len(score)), corpus.positive] = -np.inf
    return np.argpartition(-score, k, axis=1)[:, :k]


def build_index(corpus, settings, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    with open(partial, "wb") as f:
        np.savez(f, negatives=mine(corpus, settings.negatives))
    os.replace(partial, target)
    log.info("index written to %s", target)


def load_index(corpus, settings, poll=0.25, patience=3600.0):
    """Rank 0 builds a missing index; the other ranks pick it up when it is there."""
    target = Path(settings.cache_dir) / f"negatives-{settings.fingerprint()}.npz"
    if settings.rank == 0 and not target.exists():
        build_index(corpus, settings, target)
    deadline = time.monotonic() + patience
    while not target.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{target} did not appear")
        time.sleep(poll)
    with np.load(target) as z:
        return z["negatives"]
