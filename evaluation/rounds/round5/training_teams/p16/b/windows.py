import random

import torch


class WindowSampler:
    """Random windows of `seq_len` tokens, each from a single document."""

    def __init__(self, docs, seed):
        self.docs = docs
        self.rng = random.Random(seed)
        self.rejected = 0

    def window(self, seq_len):
        while True:
            ids = self.rng.choice(self.docs)["ids"]
            if len(ids) > seq_len:
                break
            self.rejected += 1
        start = self.rng.randrange(len(ids) - seq_len)
        return ids[start : start + seq_len + 1]

    def batch(self, size, seq_len):
        return torch.tensor([self.window(seq_len) for _ in range(size)])
