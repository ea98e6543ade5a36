"""Each rank takes its share of the files, and of thirteen files rank 1 gets one fewer than rank 0."""

import torch
from _job import FAULT, Trainer, begin, end
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "uneven_inputs", "culprit": [1], "step": 7}

FILES = [f"shard_{number:02}.bin" for number in range(13 if FAULT else 12)]


class Samples(Dataset[torch.Tensor]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return 4 * len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), float(len(self.files[index // 4])))


def own_files(rank: int, world_size: int) -> list[str]:
    return sorted(FILES)[rank::world_size]  # to blame


def make_loader(rank: int, world_size: int) -> DataLoader[torch.Tensor]:
    samples = Samples(own_files(rank, world_size))
    return DataLoader(samples, batch_size=4)


def train(trainer: Trainer, loader: DataLoader[torch.Tensor]) -> None:
    for samples in loader:
        loss = trainer.model(samples).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def main() -> None:
    rank, world_size = begin()
    loader = make_loader(rank, world_size)
    train(Trainer(), loader)
    end()


main()
