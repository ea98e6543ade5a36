import torch


class Pool:
    """An unlabelled pool whose labels an oracle reveals; each rank owns a slice of it."""

    def __init__(self, n, dim, classes, seed):
        gen = torch.Generator().manual_seed(seed)
        w = torch.randn(dim, classes, generator=gen)
        scale = torch.linspace(0.3, 2.0, n)[:, None]
        self.x = torch.randn(n, dim, generator=gen) * scale
        self.y = (self.x @ w + 0.5 * torch.randn(n, classes, generator=gen)).argmax(1)
        self.test_x = torch.randn(300, dim, generator=gen)
        self.test_y = (self.test_x @ w).argmax(1)

    def slice(self, rank, world):
        per = len(self.x) // world
        return torch.arange(rank * per, (rank + 1) * per)
