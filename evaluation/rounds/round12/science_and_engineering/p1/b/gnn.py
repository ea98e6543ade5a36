import torch
from torch import nn


class MessageLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width + 2, width), nn.SiLU(), nn.Linear(width, width))
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h, h_all, src, dst, offset):
        m = self.edge(torch.cat([h[dst], h_all[src], offset], dim=1))
        agg = torch.zeros_like(h).index_add_(0, dst, m)
        return h + self.node(torch.cat([h, agg / 8.0], dim=1))


class CavityNet(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.enc = nn.Linear(3, width)
        self.layers = nn.ModuleList(MessageLayer(width) for _ in range(depth))
        self.dec = nn.Linear(width, 1)

    def forward(self, field, pos, graph, halo):
        h = self.enc(torch.cat([field, pos], dim=1))
        for layer in self.layers:
            h = layer(h, halo(h), *graph)
        return field + self.dec(h)
