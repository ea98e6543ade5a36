import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def gather_ragged(x):
    """Rows of all ranks; ranks may hold different numbers of rows.  Own rows keep their gradient."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    sizes = [int(s) for s in sizes]
    top = max(sizes)
    padded = F.pad(x.detach(), (0, 0, 0, top - len(x)))
    bufs = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(bufs, padded)
    rows = [b[:n] for b, n in zip(bufs, sizes)]
    rows[rank] = x
    return torch.cat(rows), sum(sizes[:rank])


class GatheredNCE(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.t = temperature

    def forward(self, za, zb):
        keys, offset = gather_ragged(zb)
        logits = za @ keys.t() / self.t
        return F.cross_entropy(logits, torch.arange(len(za)) + offset)
