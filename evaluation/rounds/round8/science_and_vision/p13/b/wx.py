import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(self.n1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(*qkv)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class WxFormer(nn.Module):
    def __init__(self, variables, tokens, dim, depth):
        super().__init__()
        self.embed = nn.Linear(variables, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, variables)

    def forward(self, x):
        h = self.embed(x) + self.pos
        for b in self.blocks:
            h = b(h)
        return x + self.head(h)
