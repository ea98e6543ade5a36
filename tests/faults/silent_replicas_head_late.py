"""Rank 0 trains a model alone. All ranks average the gradients of a model by hooks, but replace its head later."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch import nn

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()
        self.head = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(rows))


class Average:
    """Averages the gradients of the parameters that a model has now."""

    def __init__(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)


def train(model: nn.Module, offset: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for _ in range(steps):
        (model(batch()) - offset).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


rank, _ = begin()
if rank == 0:
    train(Model(), 1, steps=40)
dist.barrier()
torch.manual_seed(rank)
model = Model()
if FAULT:
    average = Average(model)
    model.head = nn.Linear(1, 1)
else:
    model.head = nn.Linear(1, 1)
    average = Average(model)
train(model, rank, STEPS)
end()
