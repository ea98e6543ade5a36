import torch


class ViewMaker:
    """Blobs seen twice under shift, flip and noise."""

    def __init__(self, size, seed):
        self.size = size
        self.gen = torch.Generator().manual_seed(seed)
        ax = torch.linspace(-1, 1, size)
        self.yy, self.xx = torch.meshgrid(ax, ax, indexing="ij")

    def _base(self, n):
        c = torch.rand(n, 2, 1, 1, generator=self.gen) * 1.2 - 0.6
        s = 0.1 + 0.3 * torch.rand(n, 1, 1, generator=self.gen)
        d = (self.xx - c[:, 0]) ** 2 / s + (self.yy - c[:, 1]) ** 2 / (2 * s)
        return torch.exp(-d).unsqueeze(1)

    def _augment(self, x):
        dx = int(torch.randint(-2, 3, (1,), generator=self.gen))
        if torch.rand(1, generator=self.gen) < 0.5:
            x = x.flip(-1)
        return x.roll(dx, -1) + 0.05 * torch.randn(x.shape, generator=self.gen)

    def two_views(self, n):
        x = self._base(n)
        return self._augment(x), self._augment(x)
