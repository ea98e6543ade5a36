"""Streaming ROC-AUC from score histograms; cheap enough to run on every validation pass."""
import torch
import torch.distributed as dist


class StreamingAUC:
    def __init__(self, bins=512, sync_on_compute=False):
        self.bins = bins
        self.sync_on_compute = sync_on_compute
        self.reset()

    def reset(self):
        self.pos = torch.zeros(self.bins, dtype=torch.float64)
        self.neg = torch.zeros(self.bins, dtype=torch.float64)

    def update(self, scores, labels):
        idx = (scores * self.bins).long().clamp(0, self.bins - 1)
        self.pos += torch.bincount(idx[labels > 0.5], minlength=self.bins)
        self.neg += torch.bincount(idx[labels <= 0.5], minlength=self.bins)

    def compute(self):
        pos, neg = self.pos.clone(), self.neg.clone()
        if self.sync_on_compute:
            dist.all_reduce(pos)
            dist.all_reduce(neg)
        below = torch.cumsum(neg, 0) - neg
        wins = (pos * (below + 0.5 * neg)).sum()
        return (wins / (pos.sum() * neg.sum()).clamp(min=1)).item()
