from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class LMConfig:
    vocab: int = 128
    width: int = 64
    layers: int = 2
    heads: int = 4
    block: int = 32


class RMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.n1, self.n2 = RMSNorm(c.width), RMSNorm(c.width)
        self.wqkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.wo = nn.Linear(c.width, c.width, bias=False)
        self.up = nn.Linear(c.width, 8 * c.width // 3, bias=False)
        self.gate = nn.Linear(c.width, 8 * c.width // 3, bias=False)
        self.down = nn.Linear(8 * c.width // 3, c.width, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.c.heads, -1).transpose(1, 2) for z in self.wqkv(self.n1(x)).chunk(3, -1))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class DecoderLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.width)
        self.pos = nn.Parameter(0.02 * torch.randn(c.block, c.width))
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.layers)])
        self.norm = RMSNorm(c.width)
        self.out = nn.Linear(c.width, c.vocab, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, idx, targets):
        x = self.emb(idx) + self.pos[: idx.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())
