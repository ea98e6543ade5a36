import torch
import torch.nn as nn


class SharedBottom(nn.Module):
    def __init__(self, users, items, dim=16):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bottom = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU())
        self.ctr = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
        self.cvr = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        h = self.bottom(torch.cat([self.user(user), self.item(item)], 1))
        return self.ctr(h).squeeze(1), self.cvr(h).squeeze(1)
