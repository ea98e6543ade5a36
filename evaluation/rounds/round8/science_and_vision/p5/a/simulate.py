"""Soft-sphere molecular dynamics with slab decomposition and restart files.

The queue gives short allocations; each one continues from the restart files
of the one before."""
import argparse
import pathlib
import shutil

import torch
import torch.distributed as dist

from md.halo import SlabHalo
from md.neighbours import NeighbourList
from md.restart import RestartStore
from md.system import initial_slab, pair_forces

HERE = pathlib.Path(__file__).resolve().parent


def allocation(args, store, halo, until):
    rank, world = dist.get_rank(), dist.get_world_size()
    state = store.load()
    if state is None:
        pos, vel = initial_slab(args.atoms, args.box, rank, world, args.seed)
        step = 0
    else:
        pos, vel, step = state["pos"], state["vel"], state["step"]
    nlist = NeighbourList(args.cutoff, args.skin)
    while step < until:
        ghosts = halo.exchange(pos)
        everyone = torch.cat([pos, ghosts])
        pairs = nlist.pairs(pos, everyone)
        force = pair_forces(pos, everyone, pairs, args.cutoff)
        vel = vel + args.dt * force
        pos = (pos + args.dt * vel).clone()
        step += 1
        if step % args.report == 0:
            energy = torch.tensor([0.5 * vel.pow(2).sum().item(), float(len(pairs[0]))])
            dist.all_reduce(energy)
            if rank == 0:
                print(f"step {step} kinetic {energy[0]:.4f} pairs {int(energy[1])}", flush=True)
        if store.due(step):
            store.save({"pos": pos, "vel": vel, "step": step})
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--atoms", type=int, default=60)
    p.add_argument("--box", type=float, default=6.0)
    p.add_argument("--cutoff", type=float, default=1.0)
    p.add_argument("--skin", type=float, default=0.3)
    p.add_argument("--dt", type=float, default=0.01)
    p.add_argument("--report", type=int, default=7)
    p.add_argument("--restart-every", type=int, default=10)
    p.add_argument("--allocations", type=int, nargs="+", default=[25, 50])
    p.add_argument("--seed", type=int, default=21)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = HERE / "restart"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    store = RestartStore(folder, rank, args.restart_every)
    halo = SlabHalo(rank, dist.get_world_size(), args.box, args.cutoff + args.skin, capacity=args.atoms)
    for until in args.allocations:
        if rank == 0:
            print(f"allocation until step {until}", flush=True)
        allocation(args, store, halo, until)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
