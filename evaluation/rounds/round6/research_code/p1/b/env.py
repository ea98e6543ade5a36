import numpy as np


class Corridor:
    """A corridor of cells; the agent has to reach a goal at one of its ends."""

    def __init__(self, size, seed):
        self.size = size
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.pos = self.size // 2
        self.goal = 0 if self.rng.random() < 0.5 else self.size - 1
        self.t = 0
        return self.observe()

    def observe(self):
        obs = np.zeros(self.size + 1, dtype=np.float32)
        obs[self.pos] = 1.0
        obs[-1] = 1.0 if self.goal else -1.0
        return obs

    def step(self, action):
        self.t += 1
        self.pos = int(np.clip(self.pos + (1 if action == 1 else -1), 0, self.size - 1))
        reached = self.pos == self.goal
        done = reached or self.t >= 4 * self.size
        reward = 1.0 if reached else -0.02
        obs = self.reset() if done else self.observe()
        return obs, reward, done
