import torch
import torch.nn as nn


class InterestNet(nn.Module):
    """Attention of the candidate item over the history of the user."""

    def __init__(self, items=61, dim=12):
        super().__init__()
        self.emb = nn.Embedding(items, dim)
        self.att = nn.Linear(dim, dim)
        self.top = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, hist, item):
        h, c = self.emb(hist), self.emb(item)
        score = (self.att(h) * c.unsqueeze(1)).sum(-1).masked_fill(hist == 60, -1e4)
        user = (score.softmax(1).unsqueeze(-1) * h).sum(1)
        return self.top(torch.cat([user, c], 1)).squeeze(-1)
