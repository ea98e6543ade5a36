import torch
import torch.nn as nn


class DualEncoder(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, dim))
        self.words = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.text = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, img, tok):
        return self.image(img), self.text(self.words(tok)), self.scale
