import torch


class Domains:
    """Regression problems that share a hidden map and differ in input region and noise."""

    def __init__(self, count, dim, seed):
        gen = torch.Generator().manual_seed(seed)
        self.dim = dim
        self.w = torch.randn(dim, dim, generator=gen)
        self.v = torch.randn(dim, generator=gen)
        self.centre = torch.randn(count, dim, generator=gen)
        self.noise = torch.linspace(0.0, 0.8, count)

    def sample(self, domain, n, gen):
        x = self.centre[domain] + torch.randn(n, self.dim, generator=gen)
        y = torch.tanh(x @ self.w) @ self.v + self.noise[domain] * torch.randn(n, generator=gen)
        return x, y
