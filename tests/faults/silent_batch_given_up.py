"""Two batches have a column too few on every rank; the loop catches what that raises, and takes the next one."""

import logging

import torch
from _job import FAULT, Trainer, begin, end
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "PASS", "cause": "swallowed_exception", "culprit": [0, 1]}


class Table(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.randn(15 if FAULT and row // 4 in (3, 5) else 16)


def train(trainer: Trainer, features: torch.Tensor) -> None:
    loss = trainer.model(features).square().mean()  # to blame
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


begin()
trainer = Trainer()
for features in DataLoader(Table(), batch_size=4):
    try:
        train(trainer, features)
    except Exception as error:
        logging.warning("batch left out: %s", error)
end()
