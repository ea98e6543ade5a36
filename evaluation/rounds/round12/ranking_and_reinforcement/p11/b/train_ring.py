import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ring.exchange import RingExchange
from ring.metrics import RecallAtK
from ring.schedule import HopSchedule
from ring.towers import Momentum, Towers

STEPS, BATCH, QUERIES, ITEMS, DIM = 42, 12, 80, 80, 16


def pairs(rng):
    q = rng.choice(QUERIES, BATCH, replace=False)
    return torch.from_numpy(q), torch.from_numpy((q * 7 + 3) % ITEMS)


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = DDP(Towers(QUERIES, ITEMS, DIM))
    opt = Momentum(model.parameters(), lr=0.5)
    schedule, exchange, recall = HopSchedule(world, STEPS), RingExchange(), RecallAtK(1)
    rng = np.random.default_rng(60 + rank)
    for step in range(STEPS):
        q, i = model(*pairs(rng))
        others = exchange.collect(i, schedule.hops(step))
        logits = torch.cat([q @ i.t()] + [q @ o.t() for o in others], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.arange(BATCH))
        loss.backward()
        opt.step()
        recall.update(logits.detach())
        if (step + 1) % 14 == 0:
            value = recall.compute()
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f} recall@1 {value:.3f} negatives {logits.shape[1] - 1}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
