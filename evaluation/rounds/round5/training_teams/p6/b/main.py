import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from confload import host_config
from evaluation import evaluate


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    base = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(99))
    return base[y] + torch.randn(n, 3, 6, 6, generator=g), y


def augment(x):
    if torch.rand(()) < 0.5:
        x = x.flip(-1)
    return x + 0.05 * torch.randn_like(x)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 6)
    )


class Ema:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = host_config(rank)
    torch.set_num_threads(cfg.io.threads)
    os.makedirs(cfg.io.cache_dir, exist_ok=True)

    torch.manual_seed(1)
    model = DDP(net())
    ema = Ema(model.module, cfg.train.ema_decay)
    opt = torch.optim.SGD(model.parameters(), **vars(cfg.optim))
    train = TensorDataset(*images(cfg.data.n, seed=3))
    sampler = DistributedSampler(train, world, rank, seed=1, drop_last=True)
    loader = DataLoader(train, cfg.data.batch_size, sampler=sampler, drop_last=True)
    val = images(200, seed=4)

    torch.manual_seed(100 + rank)
    step = 0
    for epoch in range(cfg.train.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            if cfg.data.augment:
                x = augment(x)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            ema.update(model.module)
            step += 1
            if step % cfg.train.log_interval == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % cfg.train.eval_interval == 0:
                vloss, acc = evaluate(ema.model, val, rank, world)
                if rank == 0:
                    print(f"step {step} ema val loss {vloss:.4f} acc {acc:.3f}", flush=True)

    if rank == 0:
        torch.save(ema.model.state_dict(), f"{cfg.io.cache_dir}/ema.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
