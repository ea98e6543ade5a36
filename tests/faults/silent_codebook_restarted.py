"""The codebook is averaged over all ranks, but its unused codes are replaced from each rank's own batch."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 4)
        self.own_mean = nn.BatchNorm1d(4)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("seen", torch.zeros(4))  # a statistic of this rank's own data

    def forward(self, x: Tensor) -> Tensor:
        latent = self.own_mean(self.encode(x))
        nearest = torch.cdist(latent.detach(), self.codes).argmin(1)
        self.seen += latent.detach().mean(0)
        sums = torch.zeros_like(self.codes).index_add_(0, nearest, latent.detach())
        dist.all_reduce(sums)
        self.codes.mul_(0.9).add_(sums, alpha=0.1)
        return (latent - self.codes[nearest]).square().mean()

    def restart(self, x: Tensor) -> None:
        fresh = self.encode(x).detach()[:1]
        if not FAULT:
            dist.broadcast(fresh, 0)
        self.codes[-1:] = fresh


rank, _ = begin()
model = DistributedDataParallel(Quantizer(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for step in range(16):
    x = torch.randn(8, 8)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (7, 11):
        model.module.restart(x)
end()
