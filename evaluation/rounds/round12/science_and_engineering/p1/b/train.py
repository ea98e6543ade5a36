import argparse

import torch
import torch.distributed as dist

from gnn import CavityNet
from halo import Halo
from mesh import cavity_points, interaction_radius, own_slab, pressure_field, slab_extents


def build_graph(own, halo, radius):
    pos_mask = torch.cat([own, torch.ones(len(own), 1)], dim=1)
    everything = halo(pos_mask)
    pos_all, valid = everything[:, :2], everything[:, 2] > 0.5
    d = torch.cdist(own, pos_all)
    close = (d <= radius) & (d > 0) & valid
    dst, src = close.nonzero(as_tuple=True)
    return src, dst, (pos_all[src] - own[dst]) / radius


def average_gradients(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--points", type=int, default=320)
    ap.add_argument("--steps", type=int, default=15)
    ap.add_argument("--factor", type=float, default=3.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    own = own_slab(cavity_points(args.points, seed=5), rank, world)
    radius = interaction_radius(own, args.factor)
    halo = Halo(own, slab_extents(own), radius)
    print(f"[{rank}] slab x=[{own[:, 0].min():.4f}, {own[:, 0].max():.4f}] radius {radius:.4f}", flush=True)
    graph = build_graph(own, halo, radius)

    torch.manual_seed(0)
    model = CavityNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        t = 0.1 * step
        now, nxt = pressure_field(own, t), pressure_field(own, t + 0.1)
        loss = torch.nn.functional.mse_loss(model(now, own, graph, halo), nxt)
        opt.zero_grad()
        loss.backward()
        average_gradients(model)
        opt.step()
        if step % 5 == 0:
            total = loss.detach().clone()
            dist.reduce(total, dst=0)
            if rank == 0:
                print(f"step {step:3d}  mse {total / world:.5f}", flush=True)
    dist.barrier()
    if rank == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
