import torch
import torch.distributed as dist


class FlatBuckets:
    """Averages gradients in buckets of one fixed size."""

    def __init__(self, params, group, size=1024):
        self.params, self.group, self.size = list(params), group, size
        total = sum(p.numel() for p in self.params)
        self.count = -(-total // size)
        self.buffer = torch.zeros(self.count * size)

    @torch.no_grad()
    def average(self):
        offset = 0
        for p in self.params:
            self.buffer[offset:offset + p.numel()].copy_(p.grad.flatten())
            offset += p.numel()
        for bucket in self.buffer.split(self.size):
            dist.all_reduce(bucket, group=self.group)
        self.buffer /= dist.get_world_size(self.group)
        offset = 0
        for p in self.params:
            p.grad.copy_(self.buffer[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
