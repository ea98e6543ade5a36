"""Two workers of a data loader are slow now and then, and the ranks wait for them."""

import time

import torch
from _job import begin, blocks, end
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "PASS"}


class Shards(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            time.sleep(7)
        return torch.randn(16)


if __name__ == "__main__":
    begin()
    model = DistributedDataParallel(blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in DataLoader(Shards(), batch_size=4, num_workers=2):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    end()
