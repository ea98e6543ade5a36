import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Correction(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.Conv2d(1, hidden, 3)
        self.outer = nn.Conv2d(hidden, 1, 1)

    def forward(self, padded):
        x = F.pad(padded.unsqueeze(0), (1, 1, 0, 0), mode="circular")
        return self.outer(torch.tanh(self.inner(x))).squeeze(0)


def sync_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
