import torch
import torch.distributed as dist


class RunningMean:
    """Sum and count of a scalar, combined over all processes on demand."""

    def __init__(self, device="cpu"):
        self.buf = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, value, n):
        self.buf[0] += float(value) * n
        self.buf[1] += n

    def synced(self):
        out = self.buf.clone()
        if dist.is_initialized():
            dist.reduce(out, dst=0)
        return (out[0] / out[1].clamp(min=1)).item()


def accuracy(logits, target):
    return (logits.argmax(-1) == target).float().mean().item()
