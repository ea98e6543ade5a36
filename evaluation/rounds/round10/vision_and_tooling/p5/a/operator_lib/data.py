import numpy as np
import torch


class HeatPairs:
    """(u(t), u(t+dt)) on the whole field, cut to the block of this rank."""

    def __init__(self, n, topo, batch=4):
        self.n = n
        self.batch = batch
        self.rows, self.cols = topo.block(n)

    def pair(self, seed):
        rng = np.random.default_rng(seed)
        k = np.arange(1, 4)
        amp = rng.normal(size=(self.batch, 3, 3)) / (k[:, None] * k[None])
        grid = np.sin(np.outer(k, np.linspace(0, np.pi, self.n)))
        u = np.einsum("bij,ix,jy->bxy", amp, grid, grid)
        lap = -np.einsum("bij,ij,ix,jy->bxy", amp, k[:, None] ** 2 + k[None] ** 2.0, grid, grid)
        v = u + 0.05 * lap
        cut = lambda f: torch.from_numpy(f[:, None, self.rows, self.cols].astype(np.float32))
        return cut(u), cut(v)
