import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import Spiral, coverage
from diffusion import Denoiser
from ema import EMA


def train_step(ddp, opt, x0, gen, accumulate):
    opt.zero_grad()
    total = 0.0
    for part in x0.chunk(accumulate):
        t = torch.randint(ddp.module.steps, (len(part),), generator=gen)
        noise = torch.randn(part.shape, generator=gen)
        loss = ddp.module.p_losses(part, t, noise) / accumulate
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    opt.step()
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--accumulate", type=int, default=1)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--ema", type=float, default=0.98)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--out", default="work/denoiser.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Spiral(3000, rank, world, args.seed)
    torch.manual_seed(args.seed)
    model = Denoiser()
    ddp = DDP(model)
    ema = EMA(model, args.ema)
    opt = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    gen = torch.Generator().manual_seed(args.seed + 31 * rank)
    for step in range(args.steps):
        loss = train_step(ddp, opt, data.batch(args.batch), gen, args.accumulate)
        sched.step()
        ema.update(model)
        if (step + 1) % 80 == 0:
            mean = torch.tensor([loss])
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.4f}", flush=True)
    if rank == 0:
        os.makedirs(os.path.dirname(args.out), exist_ok=True)
        torch.save(ema.model.state_dict(), args.out)
        whole = Spiral(900, 0, 1, args.seed + 1)
        samples = ema.model.sample(600, torch.Generator().manual_seed(0))
        print(f"coverage of the data {coverage(samples, whole.x):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
