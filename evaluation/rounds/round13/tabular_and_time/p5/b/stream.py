import numpy as np
import torch


class ImpressionStream:
    """Impressions of one region; some features move slowly during the day."""

    def __init__(self, region, features=24, batch_size=256, seed=17):
        self.rng = np.random.default_rng([seed, region])
        self.w = np.random.default_rng(seed).normal(0, 0.5, features)
        self.features, self.batch_size = features, batch_size

    def sample(self, clock):
        x = self.rng.normal(0, 1, (self.batch_size, self.features))
        x[:, :3] += 0.8 * np.sin(2 * np.pi * clock)
        y = self.rng.random(self.batch_size) < 1 / (1 + np.exp(-(x @ self.w - 1.5)))
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))

    def day(self, batches):
        for i in range(batches):
            yield self.sample(i / batches)
