"""A dataset asks a helper through a pipe for each sample; rank 1's worker asks for one that nobody answers."""

import os

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LABEL = {
    "verdict": "HANG",
    "cause": "dataloader_worker_blocked",
    "culprit": [1],
    "step": 3,
    "limits": {"open_wait_s": 15},
}

rank, _ = begin()


class Served(Dataset):
    def __init__(self) -> None:
        self.answers, self.ask = os.pipe()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        if not (FAULT and rank == 1 and index == 9):
            os.write(self.ask, b"x")
        os.read(self.answers, 1)  # to blame
        return torch.full((16,), index / 24)


trainer = Trainer()
for samples in DataLoader(Served(), batch_size=4, num_workers=1, prefetch_factor=1):
    trainer.model(samples).mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
