import torch
import torch.distributed as dist


class GradientAverager:
    """Mean gradients in flat buckets of bounded size."""

    def __init__(self, model, world, bucket_numel=2000):
        self.params = list(model.parameters())
        self.world, self.bucket_numel = world, bucket_numel

    def _buckets(self):
        bucket, size = [], 0
        for p in self.params:
            if p.grad is None:
                continue
            if bucket and size + p.numel() > self.bucket_numel:
                yield bucket
                bucket, size = [], 0
            bucket.append(p)
            size += p.numel()
        if bucket:
            yield bucket

    def average(self):
        for bucket in self._buckets():
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
            dist.all_reduce(flat)
            flat /= self.world
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(g.view_as(p))
