import torch


class PairedClips:
    """Audio and image views of the same event; both ranks walk through them in the same order."""

    def __init__(self, n=640, classes=8, seed=2):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(classes, (n,), generator=g)
        self.image = torch.randn(classes, 64, generator=g)[self.label] + torch.randn(n, 64, generator=g)
        self.audio = torch.randn(classes, 32, generator=g)[self.label] + 1.4 * torch.randn(n, 32, generator=g)

    def epoch(self, number, batch):
        order = torch.randperm(len(self.label), generator=torch.Generator().manual_seed(number))
        for idx in order.split(batch):
            yield self.audio[idx], self.image[idx], self.label[idx]
