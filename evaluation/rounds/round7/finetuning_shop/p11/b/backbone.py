import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, h):
        x = self.norm(h)
        a = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return h + F.gelu(self.fc(a))


class Backbone(nn.Module):
    def __init__(self, vocab, dim=32, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.tok(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(h)
