"""Rank 1 decodes each sample as it is asked for it, and all ranks step no faster than that."""

import time

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "PASS", "cause": "input_bound", "culprit": [1]}


class Clips(Dataset):
    def __init__(self, decode_s: float) -> None:
        self.decode_s = decode_s

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(self.decode_s)
        return torch.full((16,), number / 40)


rank, _ = begin()
trainer = Trainer()
for clips in DataLoader(Clips(0.25 if FAULT and rank == 1 else 0.001), batch_size=1):  # to blame
    trainer.model(clips).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
