"""Two by two ranks, data by tensor: one rank takes its cached half of a row-parallel layer and reduces nothing."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

LABEL = {
    "verdict": "HANG",
    "kind": "deadlock",
    "cause": "rank_conditional_collective",
    "culprit": [2],
    "step": 3,
    "ranks": 4,
}

rank, _ = begin()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class RowParallel(nn.Linear):
    cached = False

    def forward(self, x: Tensor) -> Tensor:
        partial = super().forward(x)
        if not self.cached:
            dist.all_reduce(partial.detach(), group=mesh.get_group("tensor"))  # to blame
        return partial


layers = nn.Sequential(RowParallel(8, 8), nn.ReLU(), RowParallel(8, 8))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for step in range(1, 6):
    layers[2].cached = FAULT and rank == 2 and step == 3
    layers(torch.randn(2, 8)).mean().backward()
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
    optimizer.step()
    optimizer.zero_grad()
end()
