import torch


class Pool:
    def __init__(self, size, dim, classes, seed):
        gen = torch.Generator().manual_seed(seed)
        self.size = size
        self.y = torch.randint(0, classes, (size,), generator=gen)
        centres = 1.5 * torch.randn(classes, dim, generator=gen)
        self.x = centres[self.y] + torch.randn(size, dim, generator=gen)

    def without(self, labelled):
        keep = torch.ones(self.size, dtype=torch.bool)
        keep[labelled] = False
        return torch.nonzero(keep).squeeze(1)
