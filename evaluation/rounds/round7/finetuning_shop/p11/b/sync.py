"""Gradient averaging for small adapters: one flat all-reduce per step."""
import torch
import torch.distributed as dist


class FlatGradSync:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world = dist.get_world_size()

    def broadcast(self):
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def average(self):
        grads = [p.grad for p in self.params if p.grad is not None]
        sizes = [g.numel() for g in grads]
        flat = torch.cat([g.flatten() for g in grads] + [torch.ones(1)])
        dist.all_reduce(flat)
        for g, piece in zip(grads, flat[:-1].split(sizes) if sizes else []):
            g.copy_(piece.view_as(g) / self.world)
        return int(flat[-1])
