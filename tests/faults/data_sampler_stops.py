"""A sampler of its own making gives up early on rank 0: it skips what it holds for damaged, and is one batch short."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin
from torch.utils.data import DataLoader, Sampler, TensorDataset

LABEL = {"verdict": "FAIL", "cause": "uneven_inputs", "culprit": [0], "step": 4, "ranks": 3}

rank, world_size = begin()
data = TensorDataset(torch.arange(48.0).reshape(48, 1).expand(48, 16) / 48)
damaged = {0, 3, 6, 9} if FAULT else set()


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return (index for index in range(rank, len(data), world_size) if index not in damaged)

    def __len__(self) -> int:
        return len(data) // world_size


trainer = Trainer()
seen = 0
for (samples,) in DataLoader(data, batch_size=4, sampler=Own()):
    trainer.model(samples).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    seen += len(samples)
total = torch.tensor([seen])
dist.all_reduce(total)
dist.destroy_process_group()
