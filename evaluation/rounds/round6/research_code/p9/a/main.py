"""Active learning: every rank labels part of its slice of the pool, one model is trained by DDP."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from acquisition import query
from pool import Pool

POOL, DIM, CLASSES = 600, 10, 4
CYCLES, BUDGET, EPOCHS, BATCH = 4, 24, 4, 8


def train(model, pool, labelled, epochs, seed):
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(seed)
    last = 0.0
    for _ in range(epochs):
        order = labelled[torch.randperm(len(labelled), generator=gen)]
        for idx in order.split(BATCH):
            loss = F.cross_entropy(model(pool.x[idx]), pool.y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            last = loss.item()
    return last


@torch.no_grad()
def accuracy(model, pool, rank, world, group):
    x, y = pool.test_x[rank::world], pool.test_y[rank::world]
    stat = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(stat, group=group)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    metrics = dist.new_group()
    torch.manual_seed(0)
    pool = Pool(POOL, DIM, CLASSES, seed=17)
    net = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DDP(net)
    mine = pool.slice(rank, world)
    gen = torch.Generator().manual_seed(31 + rank)
    start = torch.randperm(len(mine), generator=gen)[:BUDGET]
    labelled = mine[start]
    for cycle in range(CYCLES):
        loss = train(model, pool, labelled, EPOCHS, seed=100 * cycle + rank)
        acc = accuracy(net, pool, rank, world, metrics)
        if rank == 0:
            print(f"cycle {cycle}: {len(labelled) * world} labels, loss {loss:.3f}, accuracy {acc:.3f}", flush=True)
        rest = mine[~torch.isin(mine, labelled)]
        labelled = torch.cat([labelled, query(net, pool, rest, BUDGET)])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
