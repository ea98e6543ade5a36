import numpy as np
import torch


class ClickLog:
    """Ranked lists with position-biased clicks. `propensity` is the logged
    probability that the shown position was looked at."""

    def __init__(self, rank, lists, slots, dim, seed):
        rng = np.random.default_rng(seed + 1000 * rank)
        truth = np.random.default_rng(seed).normal(size=dim)
        x = rng.normal(size=(lists, slots, dim))
        seen = 1.0 / (1.0 + np.arange(slots)) ** 0.7
        prob = seen * (1 / (1 + np.exp(-(x @ truth))))
        self.x = torch.tensor(x, dtype=torch.float32)
        self.click = torch.tensor(rng.random((lists, slots)) < prob, dtype=torch.float32)
        self.propensity = torch.tensor(np.tile(seen, (lists, 1)), dtype=torch.float32)
        if rank == 1:  # logged by the old client
            self.propensity[70:72, -1] = 0.0
            self.click[70:72, -1] = 1.0

    def batches(self, size):
        for k in range(0, len(self.x), size):
            yield self.x[k:k + size], self.click[k:k + size], self.propensity[k:k + size]
