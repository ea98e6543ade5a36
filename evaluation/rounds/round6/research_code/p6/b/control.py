import datetime

import torch
import torch.distributed as dist


class ControlPlane:
    """A group of its own for status traffic, so that it never meets training traffic."""

    def __init__(self, timeout_minutes=20):
        self.group = dist.new_group(timeout=datetime.timedelta(minutes=timeout_minutes))

    def all_finished(self, ok):
        flag = torch.tensor([1 if ok else 0])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())
