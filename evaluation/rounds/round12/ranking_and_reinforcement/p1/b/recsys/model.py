import torch
import torch.nn as nn


class TwoTower(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.user_mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.item_mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, user, pos, neg):
        u = self.user_mlp(self.user(user))
        p = self.item_mlp(self.item(pos))
        n = self.item_mlp(self.item(neg))
        return p @ u, n @ u


def bpr(pos, neg):
    return -torch.nn.functional.logsigmoid(pos.unsqueeze(1) - neg.unsqueeze(0)).mean()
