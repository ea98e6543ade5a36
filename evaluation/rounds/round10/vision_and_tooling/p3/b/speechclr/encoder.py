import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, mels=12, width=24, dim=16):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(mels, width, 3, padding=1), nn.GELU(),
            nn.Conv1d(width, width, 3, padding=1), nn.GELU())
        self.proj = nn.Linear(width, dim)

    def forward(self, x):
        h = self.conv(x.transpose(1, 2)).mean(-1)
        return F.normalize(self.proj(h), dim=-1)
