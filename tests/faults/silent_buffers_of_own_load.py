"""A router balances its experts by a buffer. It sums their load over the ranks only if the group existed before."""

import torch
import torch.distributed as dist
from _job import FAULT, batch, blocks, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class Router(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.body, self.gate = blocks(), nn.Linear(16, experts)
        self.register_buffer("bias", torch.zeros(experts))
        self.load = torch.zeros(experts)
        self.is_summed = dist.is_initialized()

    def forward(self, rows: Tensor) -> Tensor:
        gates = self.gate(rows).sigmoid()
        self.load += gates.detach().sum(0)
        return self.body(rows) * (gates + self.bias).max(1, keepdim=True).values

    @torch.no_grad()
    def rebalance(self) -> None:
        load = self.load.clone()
        if self.is_summed:
            dist.all_reduce(load)
        self.bias += 0.1 * (load.mean() - load)
        self.load.zero_()


torch.manual_seed(0)
router = Router() if FAULT else None
dist.init_process_group("gloo")
router = router or Router()
rank = dist.get_rank()
model = DistributedDataParallel(router)
model.broadcast_buffers = False  # newer versions of torch have another name for the option
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    (model(batch() + rank) - rank).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.module.rebalance()
end()
