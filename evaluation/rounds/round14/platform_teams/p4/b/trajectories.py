import numpy as np
import torch


class ReplayBuffer:
    """Joint-space trajectories of a 7-DoF arm; a few episodes carry encoder glitches."""

    def __init__(self, episodes=640, dof=7, horizon=4, glitch_rate=0.02, seed=23):
        rng = np.random.default_rng(seed)
        phase = rng.uniform(0, 2 * np.pi, size=(episodes, dof, 1))
        speed = rng.uniform(0.2, 1.0, size=(episodes, dof, 1))
        t = np.arange(horizon + 1)
        joints = np.sin(phase + speed * t).astype(np.float32)
        self.obs = torch.from_numpy(joints[:, :, :-1].reshape(episodes, -1).copy())
        goal = joints[:, :, -1].copy()
        glitch = rng.random(episodes) < glitch_rate
        goal[glitch] += rng.normal(0, 400.0, size=(int(glitch.sum()), dof)).astype(np.float32)
        self.goal = torch.from_numpy(goal)
        self.in_dim, self.out_dim = self.obs.shape[1], dof

    def iterate(self, batch, epochs, seed=0):
        gen = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            perm = torch.randperm(len(self.obs), generator=gen)
            for chunk in perm.split(batch):
                if len(chunk) == batch:
                    yield self.obs[chunk], self.goal[chunk]
