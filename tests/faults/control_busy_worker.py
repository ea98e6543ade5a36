"""A worker of a data loader computes for long in one function before it has a sample, and the ranks wait for it."""

import time

import torch
from _job import Trainer, begin, end
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "PASS", "limits": {"busy_s": 8}}


class Tokenized(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        until_s, counts = time.monotonic() + (14 if index == 13 else 0), [0] * 16
        while time.monotonic() < until_s:
            text = f"{counts} {until_s:.3f}"
            words = text.split()
            for number, word in enumerate(words[:16]):
                counts[number] += len(word)
            pairs = [word + word[::-1] for word in words]
            counts[0] = sum(len(pair) for pair in pairs)
            counts[1] = hash(tuple(pairs)) % 1000
        return torch.tensor(counts).float() / (1 + max(counts))


if __name__ == "__main__":
    begin()
    trainer = Trainer()
    for samples in DataLoader(Tokenized(), batch_size=4, num_workers=2, prefetch_factor=1):
        trainer.model(samples).square().mean().backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    end()
