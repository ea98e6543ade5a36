"""Gradient averaging in flat buckets, for models that are changed between training stages."""
import torch
import torch.distributed as dist


class GradSync:
    def __init__(self, model, bucket_numel=1 << 13):
        self.buckets, size = [[]], 0
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
            if size and size + p.numel() > bucket_numel:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.numel()

    @torch.no_grad()
    def average(self):
        world = dist.get_world_size()
        for bucket in self.buckets:
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat)
            flat.div_(world)
            for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
                g.copy_(piece.view_as(g))
