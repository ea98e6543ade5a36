import torch
import torch.nn.functional as F


class PatchLoader:
    """The same stream on each stage: the first uses the inputs, the last the targets.
    Detector gaps are filled with zeros."""

    def __init__(self, count, batch, size, seed):
        gen = torch.Generator().manual_seed(seed)
        coarse = torch.randn(count, 1, size // 2, size // 2, generator=gen)
        coarse[count * 3 // 4] = 0.0
        self.high = F.interpolate(coarse, scale_factor=2, mode="bilinear")
        self.low = F.interpolate(F.avg_pool2d(self.high, 2), scale_factor=2)
        self.batch, self.seed = batch, seed

    def epoch(self, epoch):
        gen = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.high), generator=gen)
        for idx in order.split(self.batch):
            yield self.low[idx], self.high[idx]
