"""Denoising diffusion on small synthetic textures with self-conditioning."""
import argparse
import os
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpm.data import TextureSet
from ddpm.model import Denoiser
from ddpm.resample import LossAwareSampler
from ddpm.schedule import CosineSchedule
from ddpm.seeding import seed_everything


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--timesteps", type=int, default=40)
    p.add_argument("--p-selfcond", type=float, default=0.5)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--ema", type=float, default=0.98)
    p.add_argument("--seed", type=int, default=1234)
    return p.parse_args()


class Trainer:
    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        self.schedule = CosineSchedule(args.timesteps)
        self.resampler = LossAwareSampler(args.timesteps, world)
        self.net = DDP(Denoiser(channels=1, width=12, timesteps=args.timesteps))
        self.ema = {k: v.detach().clone() for k, v in self.net.module.state_dict().items()}
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.data = TextureSet(size=12, seed=args.seed + 77 * rank)

    def estimate_x0(self, x_t, t):
        """First pass of self-conditioning: a detached guess of the clean image."""
        empty = torch.zeros_like(x_t)
        with torch.no_grad():
            eps = self.net.module(x_t, empty, t)
        return self.schedule.predict_x0(x_t, t, eps).clamp(-1.5, 1.5)

    def step(self):
        x = self.data.batch(self.args.batch)
        t, weight = self.resampler.sample(x.shape[0])
        noise = torch.randn_like(x)
        x_t = self.schedule.diffuse(x, t, noise)
        cond = torch.zeros_like(x)
        if random.random() < self.args.p_selfcond:
            cond = self.estimate_x0(x_t, t)
            per_sample = (cond - x).pow(2).mean(dim=(1, 2, 3))
            self.resampler.update(t, per_sample)
        eps = self.net(x_t, cond, t)
        loss = (weight * (eps - noise).pow(2).mean(dim=(1, 2, 3))).mean()
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.update_ema()
        return loss.detach()

    @torch.no_grad()
    def update_ema(self):
        d = self.args.ema
        for k, v in self.net.module.state_dict().items():
            self.ema[k].mul_(d).add_(v, alpha=1 - d)

    def fit(self):
        for i in range(self.args.steps):
            loss = self.step()
            if (i + 1) % 8 == 0:
                dist.all_reduce(loss)
                if self.rank == 0:
                    print(f"step {i + 1} loss {loss.item() / self.world:.4f}", flush=True)


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed, rank)
    Trainer(args, rank, world).fit()
    dist.barrier()
    if rank == 0:
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
