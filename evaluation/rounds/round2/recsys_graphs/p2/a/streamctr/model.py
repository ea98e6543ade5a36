import torch
import torch.nn as nn


class HashedFM(nn.Module):
    """Factorisation machine over hashed categorical fields plus the price."""

    def __init__(self, buckets, dim):
        super().__init__()
        self.linear = nn.Embedding(buckets, 1)
        self.factors = nn.Embedding(buckets, dim)
        self.price = nn.Linear(1, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.factors.weight, std=0.05)

    def forward(self, ids, price):
        v = self.factors(ids)
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        return self.linear(ids).sum((1, 2)) + pair + self.price(price.unsqueeze(1)).squeeze(1)
