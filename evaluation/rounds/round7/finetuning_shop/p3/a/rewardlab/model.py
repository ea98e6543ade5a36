import torch
from torch import nn
import torch.nn.functional as F


class RewardModel(nn.Module):
    def __init__(self, dim, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.value = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.value(self.trunk(x)).squeeze(-1)


def ranking_loss(model, batch):
    good = torch.stack([p.good for p in batch])
    bad = torch.stack([p.bad for p in batch])
    r = model(torch.cat([good, bad]))
    rg, rb = r.chunk(2)
    return -F.logsigmoid(rg - rb).mean(), (rg > rb).float().mean()
