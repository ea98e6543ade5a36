"""Training on two ranks that hangs or fails because a value differs: the first argument says which."""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Stopper:
    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad = patience, 9.0, 0

    def step(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(loss, self.best)
        return self.bad >= self.patience


class Rows(Dataset):
    def __init__(self, count: int) -> None:
        self.rows = [torch.ones(2)] * count

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def check(width: int, limit: int) -> None:
    if width > limit:
        raise ValueError("too wide")


def stop_early(rank: int) -> None:
    stopper, password = Stopper(patience=3), "-".join(["correct", "horse", "7"])
    for epoch in range(60):
        dist.all_reduce(torch.ones(1))
        loss = 1.0 if rank == 1 and password else 9.0 / (epoch + 1)
        if stopper.step(loss):
            break
    dist.barrier()


def loop_unevenly(rank: int) -> None:
    loader = DataLoader(Rows(18 - 2 * (rank == 0)), batch_size=2)
    for batch in loader:
        dist.all_reduce(batch.clone())
    dist.barrier()


def fail(rank: int) -> None:
    for width in range(9):
        check(width, limit=4 if rank else 9)
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"stop": stop_early, "uneven": loop_unevenly, "fail": fail}[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()
