"""Preference pairs with an annotated difficulty in [0, 1]."""
import numpy as np
import torch


class Pair:
    __slots__ = ("good", "bad", "difficulty")

    def __init__(self, good, bad, difficulty):
        self.good = good
        self.bad = bad
        self.difficulty = difficulty


def build_pairs(n, dim, seed=5):
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=dim)
    direction /= np.linalg.norm(direction)
    pairs = []
    for i in range(n):
        difficulty = (i + 0.5) / n
        base = rng.normal(size=dim)
        gap = 2.0 * (1.0 - difficulty) + 0.1
        pairs.append(Pair(
            torch.tensor(base + gap * direction, dtype=torch.float32),
            torch.tensor(base - gap * direction, dtype=torch.float32),
            difficulty,
        ))
    return pairs


def local_pairs(pairs, rank, world):
    per_rank = len(pairs) // world
    return pairs[rank * per_rank:(rank + 1) * per_rank]
