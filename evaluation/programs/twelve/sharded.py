"""A small transformer with FSDP2 (fully_shard) and stochastic depth."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, width=32, depth=4):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 100)
        self.drop_rate = 0.0
        self.dice = random.Random(0)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.dice.random() < self.drop_rate:
                continue
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=15)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(11)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        if args.fault == "hang" and step == args.at:
            model.dice = random.Random(rank)
            model.drop_rate = 0.5
        tokens = torch.randint(0, 100, (4, 16), generator=generator)
        if args.fault == "fail" and step == args.at and rank == 0:
            tokens[0, 3] = 100
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
