"""What the programs of the corpus share: whether the fault is in, a process group, a small model, a step."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1:2] == ["fault"]
STEPS = 6


def begin() -> tuple[int, int]:
    """Join the default process group on gloo; this rank, and how many there are."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def blocks(depth: int = 3, width: int = 16) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def batch(width: int = 16) -> Tensor:
    return torch.randn(4, width)


class Trainer:
    """A model under DDP, and its optimizer."""

    def __init__(self, model: nn.Module | None = None, **options: object) -> None:
        self.model = DistributedDataParallel(model if model is not None else blocks(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> float:
        loss = self.model(batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()
