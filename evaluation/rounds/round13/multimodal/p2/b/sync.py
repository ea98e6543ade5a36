import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector


class BucketReducer:
    """Averages gradients, one flat bucket per parameter group of the optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.world = dist.get_world_size()

    def broadcast_parameters(self, module):
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)

    def average(self):
        for group in self.optimizer.param_groups:
            grads = [p.grad for p in group["params"]]
            flat = parameters_to_vector(grads)
            dist.all_reduce(flat)
            flat.div_(self.world)
            offset = 0
            for g in grads:
                g.copy_(flat[offset:offset + g.numel()].view_as(g))
                offset += g.numel()


def mean_over_ranks(*values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).tolist()
