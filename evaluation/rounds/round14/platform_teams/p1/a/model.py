import torch
from torch import nn


class PooledClassifier(nn.Module):
    def __init__(self, vocab, dim, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.norm = nn.LayerNorm(dim)
        self.body = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        mask = (tokens > 0).unsqueeze(-1)
        x = self.embed(tokens)
        x = x + self.body(self.norm(x))
        pooled = (x * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.head(pooled)
