import torch
from torch import nn


class TelemetryAutoencoder(nn.Module):
    def __init__(self, channels, hidden=48, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, channels))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def anomaly_score(model, x):
    with torch.no_grad():
        return (model(x) - x).pow(2).mean(dim=1)
