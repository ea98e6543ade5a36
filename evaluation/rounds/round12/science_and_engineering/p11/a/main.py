import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from crystal.elements import ElementTable
from crystal.graphs import CrystalBatches
from crystal.net import CrystalNet
from crystal.structures import read_shard, write_shards


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", default="oxides")
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards(args.folder, world)
    dist.barrier()

    structures = read_shard(args.folder, rank)
    table = ElementTable.from_structures(structures)
    batches = CrystalBatches(structures, table, args.batch, seed=rank)
    torch.manual_seed(6)
    model = DDP(CrystalNet(len(table)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    if rank == 0:
        print(f"{len(structures)} structures per rank, {len(table)} elements")

    for epoch in range(args.epochs):
        total = torch.zeros(1)
        for inputs, energy in batches:
            loss = torch.nn.functional.l1_loss(model(*inputs), energy)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: MAE {total.item() / (world * len(batches)):.4f} eV/atom", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
