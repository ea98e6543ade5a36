import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from collocation import Collocation
from physics import boundary_loss, residual


@dataclass
class Weights:
    physics: float = 1.0
    boundary: float = 5.0


class Field(nn.Module):
    def __init__(self, width=20, depth=3):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, xt):
        return self.net(xt)


def step(net, opt, cloud, weights, gen):
    physics = residual(net, cloud.points).square().mean()
    boundary = boundary_loss(net, 32, gen)
    opt.zero_grad()
    (weights.physics * physics + weights.boundary * boundary).backward()
    handles = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
    for h in handles:
        h.wait()
    for p in net.parameters():
        p.grad /= dist.get_world_size()
    opt.step()
    return physics.item(), boundary.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--refine-every", type=int, default=10)
    ap.add_argument("--base", type=int, default=120)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = Field()
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    cloud = Collocation(rank, world, args.base, seed=70)
    gen = torch.Generator().manual_seed(rank)
    weights = Weights()

    for n in range(args.steps):
        physics, boundary = step(net, opt, cloud, weights, gen)
        if (n + 1) % args.refine_every == 0:
            fresh = cloud.refine(net)
            if rank == 0:
                print(f"step {n + 1}: physics {physics:.4f} boundary {boundary:.4f}, {fresh} points added", flush=True)

    counts = torch.tensor([len(cloud.points)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"{int(counts)} collocation points at the end, {cloud.added} from refinement")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
