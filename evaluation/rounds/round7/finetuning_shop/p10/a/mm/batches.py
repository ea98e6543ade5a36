import os

import numpy as np
import torch

from .files import read_picture


class CaptionBatches:
    def __init__(self, folder, n, batch_size, rank, world, vocab=40, length=6):
        self.folder, self.batch_size = folder, batch_size
        self.vocab, self.length = vocab, length
        self.mine = list(range(n))[rank::world]

    def __len__(self):
        return len(self.mine) // self.batch_size

    def index(self, k):
        return self.mine[k * self.batch_size:(k + 1) * self.batch_size]

    def captions(self, idx):
        base = torch.tensor(idx).unsqueeze(1) % 20
        return (base + torch.arange(self.length)) % self.vocab

    def load(self, k):
        idx = self.index(k)
        pics = np.stack([read_picture(os.path.join(self.folder, f"{i:04d}.pic")) for i in idx])
        return torch.from_numpy(pics).float().div(255).flatten(1), self.captions(idx)

    def text_only(self, k):
        idx = self.index(k)
        return torch.zeros(len(idx), 64), self.captions(idx)
