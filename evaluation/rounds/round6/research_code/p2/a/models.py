import torch
import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, z, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2))
        self.head = nn.Linear(hidden, 1)

    def forward(self, x, features=False):
        h = self.trunk(x)
        score = self.head(h).squeeze(1)
        return (score, h) if features else score
