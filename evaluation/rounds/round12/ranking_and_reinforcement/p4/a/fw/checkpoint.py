import os

import torch
import torch.distributed as dist


class Checkpointer:
    """Keeps `last.pt`; only the first rank touches the disk."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "last.pt")
        self.rank = dist.get_rank()
        if self.rank == 0:
            os.makedirs(folder, exist_ok=True)

    def save(self, trainer):
        if self.rank == 0:
            tmp = self.path + ".tmp"
            torch.save(trainer.state_dict(), tmp)
            os.replace(tmp, self.path)
        dist.barrier()

    def resume(self, trainer):
        state = [None]
        if self.rank == 0 and os.path.exists(self.path):
            state[0] = torch.load(self.path, map_location="cpu", weights_only=False)
        dist.broadcast_object_list(state, src=0)
        if state[0] is not None:
            trainer.load_state_dict(state[0])
