import torch
import torch.nn.functional as F
from torch import nn


class Blur(nn.Module):
    """Anti-aliased downsampling with a fixed binomial filter."""

    def __init__(self, channels):
        super().__init__()
        k = torch.tensor([1.0, 2.0, 1.0])
        k = torch.outer(k, k) / 16
        self.register_buffer("kernel", k.expand(channels, 1, 3, 3).clone())

    def forward(self, x):
        return F.conv2d(x, self.kernel, stride=2, padding=1, groups=x.shape[1])


class Generator(nn.Module):
    def __init__(self, z, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(z, 2 * width, 4), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.net(z[:, :, None, None])


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.LeakyReLU(0.2), Blur(width),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.LeakyReLU(0.2), Blur(2 * width),
            nn.Conv2d(2 * width, 1, 4))

    def forward(self, x):
        return self.net(x).flatten()
