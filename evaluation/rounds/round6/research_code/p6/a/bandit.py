import math

import numpy as np


class Exp3:
    """Which data domain to train on next; the reward is the measured drop of the loss."""

    def __init__(self, arms, gamma, seed):
        self.arms = arms
        self.gamma = gamma
        self.weights = np.ones(arms)
        self.rng = np.random.default_rng(seed)

    def probabilities(self):
        w = self.weights / self.weights.sum()
        return (1 - self.gamma) * w + self.gamma / self.arms

    def choose(self):
        return int(self.rng.choice(self.arms, p=self.probabilities()))

    def update(self, arm, reward):
        reward = min(max(reward, 0.0), 1.0)
        estimate = reward / self.probabilities()[arm]
        self.weights[arm] *= math.exp(self.gamma * estimate / self.arms)
        self.weights /= self.weights.max()
