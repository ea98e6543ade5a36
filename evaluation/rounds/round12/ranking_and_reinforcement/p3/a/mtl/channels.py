import torch
import torch.distributed as dist


class GradChannels:
    """One communicator for each task, so that the traffic of a task can be
    accounted for by itself."""

    def __init__(self, names):
        self.groups = {n: dist.new_group() for n in sorted(names)}
        self.bytes = dict.fromkeys(self.groups, 0)

    def reduce(self, name, params):
        grads = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=self.groups[name])
        flat /= dist.get_world_size()
        self.bytes[name] += flat.numel() * flat.element_size()
        offset = 0
        for g in grads:
            g.copy_(flat[offset:offset + g.numel()].view_as(g))
            offset += g.numel()
