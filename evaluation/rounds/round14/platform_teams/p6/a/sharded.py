import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ShardedCheckpoint:
    """Weights are split over the ranks; small state lives next to each shard."""

    def __init__(self, folder):
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def path(self, rank):
        return self.folder / f"shard_{rank:02d}.pt"

    def save(self, trainer):
        flat = parameters_to_vector(trainer.model.parameters()).detach()
        payload = {
            "step": trainer.step,
            "weights": flat.tensor_split(self.world)[self.rank].clone(),
            "optimizer": trainer.opt.state_dict(),
            "generator": trainer.source.gen.get_state(),
            "callbacks": {cb.key: cb.state() for cb in trainer.callbacks},
        }
        tmp = self.path(self.rank).with_suffix(".tmp")
        torch.save(payload, tmp)
        tmp.rename(self.path(self.rank))
        size = torch.tensor([self.path(self.rank).stat().st_size])
        dist.all_reduce(size)
        dist.barrier()
        return int(size)

    def load(self, trainer):
        parts = [torch.load(self.path(r), weights_only=True) for r in range(self.world)]
        flat = torch.cat([p["weights"] for p in parts])
        vector_to_parameters(flat, trainer.model.parameters())
        mine = parts[self.rank]
        trainer.step = mine["step"]
        trainer.opt.load_state_dict(mine["optimizer"])
        trainer.source.gen.set_state(mine["generator"])
        for cb in trainer.callbacks:
            cb.restore(mine["callbacks"].get(cb.key, {}))
        dist.barrier()
