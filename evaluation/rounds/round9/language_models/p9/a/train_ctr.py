import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from events import NUM_ITEMS, NUM_USERS, EventLog, minibatches
from sharded_table import ShardedTable

DIM, BATCH = 12, 32


def equal_count(columns, size):
    n = torch.tensor(len(columns[0]) // size)
    dist.all_reduce(n, op=dist.ReduceOp.MIN)
    return int(n)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = EventLog().for_rank(rank, world)

    users, items = ShardedTable(NUM_USERS, DIM), ShardedTable(NUM_ITEMS, DIM)
    torch.manual_seed(0)
    tower = DDP(nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1)))
    tables = torch.optim.SGD([users.weight, items.weight], lr=0.5)
    dense = torch.optim.Adam(tower.parameters(), lr=5e-3)

    total, seen = 0.0, 0
    for step, (user, item, label) in enumerate(minibatches(columns, BATCH, equal_count(columns, BATCH))):
        logit = tower(torch.cat([users(user), items(item)], 1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logit, label)
        tables.zero_grad()
        dense.zero_grad()
        loss.backward()
        for table in (users, items):
            table.weight.grad /= world
        tables.step()
        dense.step()
        total, seen = total + loss.item(), seen + 1
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} progressive loss {total / seen:.4f}", flush=True)
    result = torch.tensor([total, float(seen)])
    dist.all_reduce(result)
    if rank == 0:
        print(f"one pass done, loss {result[0] / result[1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
