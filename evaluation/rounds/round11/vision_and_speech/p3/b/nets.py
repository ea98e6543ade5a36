import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, z=8, size=12):
        super().__init__()
        self.size = size
        self.net = nn.Sequential(nn.Linear(z, 48), nn.ReLU(), nn.Linear(48, 64), nn.ReLU(),
                                 nn.Linear(64, size * size), nn.Tanh())

    def forward(self, z):
        return self.net(z).view(-1, 1, self.size, self.size)


class Critic(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2),
                                 nn.Conv2d(8, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
                                 nn.Linear(16 * (size // 4) ** 2, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)
