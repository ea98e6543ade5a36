import torch
from torch import nn


class AdaptedEncoder(nn.Module):
    def __init__(self, dim, classes, hidden=32, bottleneck=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh())
        self.down = nn.Linear(hidden, bottleneck)
        self.up = nn.Linear(bottleneck, hidden)
        self.head = nn.Linear(hidden, classes)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        h = self.encoder(x)
        return self.head(h + self.up(torch.relu(self.down(h))))

    def shared(self):
        return list(self.encoder.parameters())
