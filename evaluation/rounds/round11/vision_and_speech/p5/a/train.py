import argparse
import gc
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpm import Cosine, Denoiser

CLASSES = 4


def toy_points(gen, n):
    y = torch.randint(0, CLASSES, (n,), generator=gen)
    ang = y * (3.14159 / 2)
    centre = torch.stack([ang.cos(), ang.sin()], dim=1)
    return centre + 0.1 * torch.randn(n, 2, generator=gen), y


class EMA:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


@torch.no_grad()
def evaluate(model, sched, rank, world):
    gen = torch.Generator().manual_seed(777 + rank)
    x0, y = toy_points(gen, 256)
    t = torch.randint(1, sched.steps + 1, (256,), generator=gen)
    eps = torch.randn(256, 2, generator=gen)
    err = F.mse_loss(model(sched.noisy(x0, t, eps), t, y), eps)
    dist.all_reduce(err)
    return err.item() / world


def train(args, rank, world):
    torch.manual_seed(args.seed)
    sched = Cosine()
    net = Denoiser(CLASSES)
    model = DDP(net)
    ema = EMA(net)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(args.seed * 97 + rank)
    for step in range(args.steps):
        x0, y = toy_points(gen, args.batch_size)
        t = torch.randint(1, sched.steps + 1, (args.batch_size,), generator=gen)
        eps = torch.randn(x0.shape, generator=gen)
        drop = torch.rand(args.batch_size, generator=gen) < args.uncond
        cond = y.masked_fill(drop, CLASSES)
        pred = model(sched.noisy(x0, t, eps), t, cond)
        loss = F.mse_loss(pred, eps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        if (step + 1) % 20 == 0:
            err = evaluate(ema.model, sched, rank, world)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f} ema eval {err:.4f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch-size", type=int, default=4)
    p.add_argument("--uncond", type=float, default=0.4)
    p.add_argument("--seed", type=int, default=2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    train(args, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
