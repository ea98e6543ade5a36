import numpy as np
import torch


class PairStream:
    """Image-caption pairs; both towers of a replica see the same pairs."""

    def __init__(self, tower, replica, batch, seed):
        self.tower, self.batch = tower, batch
        self.rng = np.random.default_rng(seed + 97 * replica)
        self.patterns = np.random.default_rng(seed).normal(size=(8, 6, 6))

    def next(self):
        kind = self.rng.integers(0, 8, self.batch)
        img = self.patterns[kind] + 0.2 * self.rng.normal(size=(self.batch, 6, 6))
        txt = kind[:, None] * 4 + self.rng.integers(0, 4, (self.batch, 5))
        if self.tower == "image":
            return torch.tensor(img, dtype=torch.float32).unsqueeze(1)
        return torch.from_numpy(txt)
