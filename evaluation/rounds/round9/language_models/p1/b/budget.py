import torch
import torch.distributed as dist


class TokenBudget:
    """Stops pre-training once the job has consumed `limit` real (non padding) tokens."""

    def __init__(self, limit, group=None):
        self.limit = limit
        self.group = group
        self.seen = 0
        self.world = dist.get_world_size()

    def consume(self, batch, pad):
        used = int((batch != pad).sum())
        self.seen += used * self.world

    @property
    def exhausted(self):
        return self.seen >= self.limit

    def progress(self):
        return min(1.0, self.seen / self.limit)

    def state_dict(self):
        return {"seen": self.seen, "limit": self.limit}
