"""Two ranks by torch.multiprocessing, without RANK from a launcher; each has loader workers of both kinds."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader


def square(number: int) -> int:
    return number * number


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return square(index)


def work(rank: int, store: str) -> None:
    # As programs under srun do: the rank goes into the environment late, and every child inherits it.
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    total = torch.zeros(1)
    for method in ("fork", "spawn"):
        for batch in DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method):
            total += batch.sum()
    dist.all_reduce(total)
    assert total.item() == 56
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
