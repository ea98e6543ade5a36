import os

import torch


class RestartStore:
    """One file per rank, replaced atomically."""

    def __init__(self, folder, rank, every):
        self.path = folder / f"slab_{rank:03d}.pt"
        self.rank, self.every = rank, every

    def due(self, step):
        # spread the writes, the file system dislikes bursts
        return (step + self.rank) % self.every == 0

    def save(self, state):
        tmp = self.path.with_suffix(".tmp")
        torch.save(state, tmp)
        os.replace(tmp, self.path)

    def load(self):
        return torch.load(self.path) if self.path.exists() else None
