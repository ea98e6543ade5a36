"""A worker of rank 1 looks for its sample in an empty shard, over and over, and the rank waits for the batch."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "infinite_loop", "culprit": [1], "step": 4,
    "limits": {"busy_s": 8},
}  # fmt: skip

rank, _ = begin()


class Filtered(Dataset):
    """Two shards of samples; the second one of rank 1 is empty."""

    def __init__(self) -> None:
        empty = FAULT and rank == 1
        self.shards = [list(range(12)), [] if empty else list(range(12, 24))]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        shard, found = self.shards[index // 12], []
        while not found:
            found = [number for number in shard if number % 12 == index % 12]  # to blame
        return torch.full((16,), found[0] / 24)


trainer = Trainer()
for samples in DataLoader(Filtered(), batch_size=4, num_workers=2, prefetch_factor=1):
    trainer.model(samples).mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
