import torch.nn as nn


class Caser(nn.Module):
    def __init__(self, size, dim, window):
        super().__init__()
        self.emb = nn.Embedding(size, dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.out = nn.Linear(dim * window, size)

    def forward(self, x):
        h = self.conv(self.emb(x).transpose(1, 2)).relu()
        return self.out(h.flatten(1))
