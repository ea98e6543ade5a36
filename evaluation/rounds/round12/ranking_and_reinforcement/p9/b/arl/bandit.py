import numpy as np
import torch


class Bandit:
    """Contextual bandit: which banner for which visitor."""

    def __init__(self, cfg, actor):
        self.theta = np.random.default_rng(cfg.seed).normal(size=(cfg.arms, cfg.context))
        self.rng = np.random.default_rng(cfg.seed + actor)
        self.cfg = cfg

    def visitors(self, n):
        return torch.tensor(self.rng.normal(size=(n, self.cfg.context)), dtype=torch.float32)

    def reward(self, x, arm):
        p = 1 / (1 + np.exp(-(self.theta[arm.numpy()] * x.numpy()).sum(1)))
        return torch.tensor(self.rng.random(len(p)) < p, dtype=torch.float32)
