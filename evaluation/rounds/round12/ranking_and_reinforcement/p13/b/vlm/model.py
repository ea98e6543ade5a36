import torch
import torch.nn as nn
import torch.nn.functional as F

from .registry import MODELS


@MODELS.add("dual")
class DualEncoder(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.photo = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, dim))
        self.title = nn.EmbeddingBag(tokens, dim)
        self.temperature = nn.Parameter(torch.tensor(1.6))

    def encode_photo(self, x):
        return F.normalize(self.photo(x), dim=-1)

    def encode_title(self, x):
        return F.normalize(self.title(x), dim=-1)

    def forward(self, photo, title):
        return self.encode_photo(photo), self.encode_title(title), self.temperature.exp()
