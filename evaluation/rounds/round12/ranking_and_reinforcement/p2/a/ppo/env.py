import numpy as np
import torch


class SlateEnv:
    """A user with a drifting interest vector; the agent shows one of
    `actions` items and is paid for the match."""

    def __init__(self, envs, seed, dim=6, actions=5):
        self.rng = np.random.default_rng(seed)
        self.envs, self.dim, self.actions = envs, dim, actions
        self.items = np.random.default_rng(77).normal(size=(actions, dim))
        self.difficulty = 0.1
        self.reset()

    def reset(self):
        self.state = self.rng.normal(size=(self.envs, self.dim))
        return torch.tensor(self.state, dtype=torch.float32)

    def step(self, action):
        a = action.numpy()
        match = (self.items[a] * self.state).sum(1)
        reward = np.tanh(match) + self.difficulty * self.rng.normal(size=self.envs)
        self.state = 0.9 * self.state + 0.4 * self.rng.normal(size=self.state.shape)
        return torch.tensor(self.state, dtype=torch.float32), torch.tensor(reward, dtype=torch.float32)
