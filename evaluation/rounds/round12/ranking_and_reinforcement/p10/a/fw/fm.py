import torch
import torch.nn as nn


class FactorizationMachine(nn.Module):
    def __init__(self, fields, rank):
        super().__init__()
        offsets = torch.tensor([0] + fields[:-1]).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.linear = nn.Embedding(sum(fields), 1)
        self.factors = nn.Embedding(sum(fields), rank)
        nn.init.normal_(self.factors.weight, std=0.05)

    def forward(self, x):
        ids = x + self.offsets
        v = self.factors(ids)
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        return self.linear(ids).sum((1, 2)) + pair
