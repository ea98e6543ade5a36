import torch.nn as nn


class SessionGRU(nn.Module):
    def __init__(self, items, dim):
        super().__init__()
        self.emb = nn.Embedding(items, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, items)

    def forward(self, seq):
        h, _ = self.gru(self.emb(seq))
        return self.out(h[:, -1])
