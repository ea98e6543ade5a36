import os
import pathlib
import time

import torch


class Publisher:
    """Hands weights to all processes through the shared file system.

    The first process writes, the others read the file of the same number.
    """

    def __init__(self, root, rank):
        self.root = pathlib.Path(root)
        self.rank = rank
        self.serial = 0

    def _next(self):
        self.serial += 1
        return self.root / f"weights_{self.serial:04d}.pt"

    def _write(self, path, state):
        tmp = path.with_suffix(".tmp")
        torch.save(state, tmp)
        os.replace(tmp, path)

    def publish(self, state):
        path = self._next()
        if self.rank == 0:
            self._write(path, state)
            return state
        while not path.exists():
            time.sleep(0.05)
        return torch.load(path)

    def keep(self, state, tag):
        """An extra copy for later use, written by the calling process alone."""
        self._write(self.root / f"keep_{tag}.pt", state)
