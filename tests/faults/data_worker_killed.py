"""The machine kills a worker of rank 1's DataLoader in the second batch."""

import os
import signal

import torch
from _job import FAULT, Trainer, begin, end
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "FAIL", "cause": "dataloader_worker_died", "culprit": [1]}

rank, _ = begin()


class Images(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if FAULT and rank == 1 and index == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((16,), index / 16)


def train(trainer, loader):
    for images in loader:
        trainer.model(images).mean().backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


train(Trainer(), DataLoader(Images(), batch_size=4, num_workers=1, prefetch_factor=1))
end()
