import torch.nn as nn


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return nn.functional.normalize(self.mlp(self.conv(x).flatten(1)), dim=-1)


class TextTower(nn.Module):
    def __init__(self, dim, vocab=32):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, 24)
        self.out = nn.Linear(24, dim)

    def forward(self, x):
        return nn.functional.normalize(self.out(self.emb(x)), dim=-1)


BUILDERS = {"image": ImageTower, "text": TextTower}
