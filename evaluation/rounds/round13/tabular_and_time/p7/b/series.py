import numpy as np
import torch


class LoadCurves:
    """Hourly load of the meters of one district: daily and weekly cycles, own level, noise."""

    def __init__(self, district, meters=12, hours=24 * 35, history=48, seed=9):
        rng = np.random.default_rng([seed, district])
        t = np.arange(hours)
        daily = np.sin(2 * np.pi * (t / 24 + rng.uniform(0, 0.2, (meters, 1))))
        weekly = 0.4 * np.cos(2 * np.pi * t / 168) * (1 + 0.3 * district)
        self.values = (daily + weekly + 0.15 * rng.standard_normal((meters, hours))).astype(np.float32)
        self.history = history

    def draw(self, n, horizon, rng, lo=0.0, hi=0.8):
        start = rng.integers(int(lo * self.values.shape[1]), int(hi * self.values.shape[1]) - self.history - horizon, n)
        rows = rng.integers(0, len(self.values), n)
        cut = np.stack([self.values[r, s:s + self.history + horizon] for r, s in zip(rows, start)])
        return torch.from_numpy(cut[:, :self.history].copy()), torch.from_numpy(cut[:, self.history:].copy())
