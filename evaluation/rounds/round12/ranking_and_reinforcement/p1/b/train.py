import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from recsys.config import TrainConfig
from recsys.data import UserShard, read_events, write_events
from recsys.hooks import HookList, LossLogger
from recsys.model import TwoTower, bpr


def train_epoch(epoch, step, model, opt, shard, hooks, cfg, rank):
    gen = torch.Generator().manual_seed(cfg.seed + 1000 * epoch + rank)
    for user, pos in shard.epoch(cfg.seed + epoch):
        neg = torch.randint(cfg.items, (cfg.negatives,), generator=gen)
        p, n = model(torch.tensor(user), pos, neg)
        loss = bpr(p, n)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        hooks.fire("on_step", step, loss.item())
    hooks.fire("on_epoch", epoch)
    return step


def save(model, path, rank):
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = TrainConfig()
    path = os.path.join(cfg.root, "events.jsonl")
    if rank == 0:
        write_events(path, cfg)
    dist.barrier()

    torch.manual_seed(cfg.seed)
    shard = UserShard(read_events(path), rank, world)
    model = DDP(TwoTower(cfg.users, cfg.items, cfg.dim))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    hooks = HookList([LossLogger(rank, cfg.log_every)])

    step = train_epoch(0, 0, model, opt, shard, hooks, cfg, rank)
    save(model, os.path.join(cfg.root, "two_tower.pt"), rank)
    if rank == 0:
        print(f"done after {step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
