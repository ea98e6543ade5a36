import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class DynamicLossScaler:
    """Loss scaling for half precision gradients of a sharded model."""

    def __init__(self, init=2.0**10, growth=2.0, backoff=0.5, interval=6):
        self.scale_value = init
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.good_steps = 0
        self.skipped = 0

    def scale(self, loss):
        return loss * self.scale_value

    def _overflow(self, params):
        found = torch.zeros(())
        for p in params:
            if p.grad is not None:
                half = local(p.grad).to(torch.float16)
                found = torch.maximum(found, (~torch.isfinite(half)).any().float())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def unscale(self, params):
        """False if this step has to be skipped."""
        if self._overflow(params):
            self.scale_value *= self.backoff
            self.good_steps = 0
            self.skipped += 1
            return False
        for p in params:
            if p.grad is not None:
                local(p.grad).div_(self.scale_value)
        self.good_steps += 1
        if self.good_steps % self.interval == 0:
            self.scale_value *= self.growth
        return True
