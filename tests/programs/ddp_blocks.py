"""A plain DDP program with numbered blocks, as a stranger would write it: the subject of the probe's tests."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def average_loss(loss: torch.Tensor) -> torch.Tensor:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def train(steps: int, layers: int) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model(layers, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(steps * 8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for (x,) in DataLoader(TensorDataset(data), batch_size=8):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(average_loss(loss).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    print(f"rank {dist.get_rank()} losses {[x.hex() for x in losses]} weights {hashlib.sha256(weights).hexdigest()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(options.steps, options.layers)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
