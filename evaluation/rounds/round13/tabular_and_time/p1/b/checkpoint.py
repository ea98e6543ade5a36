"""Model and optimizer are written once; the position in the data is written by each rank."""
import os

import torch
import torch.distributed as dist


class CheckpointDir:
    def __init__(self, root):
        self.root = root
        os.makedirs(root, exist_ok=True)

    def _path(self, name):
        return os.path.join(self.root, name)

    def save(self, model, optimizer, batches, step):
        rank = dist.get_rank()
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "step": step}, self._path("main.pt"))
        torch.save(batches.state_dict(), self._path(f"data_{rank}.pt"))
        dist.barrier()

    def load(self, model, optimizer, batches):
        if not os.path.exists(self._path("main.pt")):
            return 0
        main = torch.load(self._path("main.pt"))
        model.load_state_dict(main["model"])
        optimizer.load_state_dict(main["opt"])
        batches.load_state_dict(torch.load(self._path(f"data_{dist.get_rank()}.pt")))
        return main["step"]
