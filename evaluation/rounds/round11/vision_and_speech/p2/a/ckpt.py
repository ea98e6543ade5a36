import os

import torch
from torch.distributed.tensor import DTensor


class Checkpointer:
    """Keeps the best model so far as one plain state dict."""

    def __init__(self, folder, rank):
        self.folder = folder
        self.rank = rank
        self.best = -1.0

    def path(self, step):
        return os.path.join(self.folder, f"seg_{step:05d}.pt")

    def maybe_save(self, model, step, score):
        if score <= self.best:
            return False
        self.best = score
        sharded = model.state_dict()
        state = {}
        for name, value in sharded.items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            state[name] = value.detach().clone().cpu()
        if self.rank != 0:
            return True
        tmp = self.path(step) + ".tmp"
        torch.save({"model": state, "step": step, "score": score}, tmp)
        os.replace(tmp, self.path(step))
        return True
