import torch
from torch import nn

from mixture import PATCH_DIM, PATCHES


class Connector(nn.Module):
    """Maps patches of the frozen vision tower into the language model's space."""

    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(PATCH_DIM, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, patches):
        return self.net(patches).mean(1)


class SmallVLM(nn.Module):
    def __init__(self, vocab, dim=40):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.connector = Connector(dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, patches, has_image):
        h = self.tok(ids)
        if has_image.any():
            vis = torch.zeros(ids.shape[0], h.shape[-1])
            vis = vis.index_copy(0, has_image.nonzero().flatten(), self.connector(patches[has_image]))
            h = h + vis.unsqueeze(1)
        else:
            idle = patches.new_zeros(1, PATCHES, PATCH_DIM)
            h = h + 0.0 * self.connector(idle).sum()
        h, _ = self.rnn(h)
        return self.head(h)
