import argparse
import copy
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def exists(x):
    return x is not None


def default(v, d):
    return v if exists(v) else d


def cycle(dl, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for data in dl:
            yield data
        epoch += 1


def cosine_alphas(timesteps, s=0.008):
    t = torch.linspace(0, timesteps, timesteps + 1) / timesteps
    a = torch.cos((t + s) / (1 + s) * math.pi * 0.5) ** 2
    return (a / a[0]).clamp(1e-4, 0.9999)


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        half = dim // 2
        self.register_buffer("freqs", torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1))))
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 2), nn.SiLU(), nn.Linear(dim * 2, dim))

    def forward(self, t):
        ang = t[:, None].float() * self.freqs[None]
        return self.mlp(torch.cat((ang.sin(), ang.cos()), dim=-1))


class Block(nn.Module):
    def __init__(self, dim_in, dim_out, dim_t):
        super().__init__()
        self.conv = nn.Conv2d(dim_in, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, dim_out)
        self.to_scale_shift = nn.Linear(dim_t, dim_out * 2)

    def forward(self, x, t):
        scale, shift = self.to_scale_shift(t)[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(self.conv(x)) * (scale + 1) + shift)


class Unet(nn.Module):
    def __init__(self, dim=16, channels=1):
        super().__init__()
        self.channels = channels
        self.time = TimeEmbedding(dim)
        self.inp = nn.Conv2d(channels, dim, 3, padding=1)
        self.down = Block(dim, dim * 2, dim)
        self.mid = Block(dim * 2, dim * 2, dim)
        self.up = Block(dim * 3, dim, dim)
        self.out = nn.Conv2d(dim, channels, 1)

    def forward(self, x, t):
        t = self.time(t)
        h = self.inp(x)
        d = self.mid(self.down(F.avg_pool2d(h, 2), t), t)
        return self.out(self.up(torch.cat((h, F.interpolate(d, scale_factor=2)), dim=1), t))


class Shapes(Dataset):
    def __init__(self, n=512, size=16, seed=0):
        rng = np.random.default_rng(seed)
        x = np.zeros((n, 1, size, size), np.float32)
        for i in range(n):
            a, b = rng.integers(1, size - 6, 2)
            w, h = rng.integers(3, 6, 2)
            x[i, 0, a:a + w, b:b + h] = 1.0
        self.x = torch.from_numpy(x * 2 - 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class EMA:
    def __init__(self, model, beta=0.99, update_after_step=50, update_every=2):
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.online = model
        self.beta, self.update_after_step, self.update_every = beta, update_after_step, update_every
        self.step = 0

    @property
    def warm(self):
        return self.step > self.update_after_step

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.update_every != 0:
            return
        decay = self.beta if self.warm else 0.0
        for pe, p in zip(self.ema_model.parameters(), self.online.parameters()):
            pe.lerp_(p, 1 - decay)


class Trainer:
    def __init__(self, unet, dataset, val, *, timesteps=40, batch_size=16, lr=1e-3, num_steps=120,
                 save_and_sample_every=40, grad_accum=2, results_folder=None, seed=0):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timesteps, self.num_steps, self.grad_accum = timesteps, num_steps, grad_accum
        self.save_and_sample_every = save_and_sample_every
        self.alphas = cosine_alphas(timesteps)
        self.unet = unet
        self.batch_size = batch_size
        self.val = val
        self.model = DDP(unet)
        self.ema = EMA(unet)
        sampler = DistributedSampler(dataset, shuffle=True, seed=seed)
        self.dl = cycle(DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True), sampler)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.results_folder = Path(default(results_folder, "results"))
        self.shape = tuple(dataset[0].shape)
        self.step = 0

    @property
    def is_main(self):
        return self.rank == 0

    def q_sample(self, x, t, noise):
        a = self.alphas[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def p_losses(self, x, net=None):
        net = default(net, self.model)
        t = torch.randint(1, self.timesteps + 1, (len(x),))
        noise = torch.randn_like(x)
        return F.mse_loss(net(self.q_sample(x, t, noise), t), noise)

    @torch.no_grad()
    def ddim(self, net, n, steps=10):
        net.eval()
        x = torch.randn(n, *self.shape)
        times = torch.linspace(self.timesteps, 0, steps + 1).long().tolist()
        for now, nxt in zip(times[:-1], times[1:]):
            eps = net(x, torch.full((n,), now))
            a, b = self.alphas[now], self.alphas[nxt]
            x0 = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
            x = b.sqrt() * x0 + (1 - b).sqrt() * eps
        return x

    def validate(self):
        self.unet.eval()
        losses = [self.p_losses(x).item() for x in self.val.split(self.batch_size)]
        self.unet.train()
        return sum(losses) / len(losses)

    def sample_grid(self, milestone, rows=4):
        # the average is only worth looking at once it has left its start
        net = self.ema.ema_model if self.ema.warm else self.unet
        imgs = self.ddim(net, rows * rows)
        c, h, w = self.shape
        grid = imgs.reshape(rows, rows, c, h, w).permute(2, 0, 3, 1, 4).reshape(c, rows * h, rows * w)
        np.save(self.results_folder / f"sample-{milestone}.npy", grid.numpy())

    def save(self, milestone):
        torch.save({"step": self.step, "model": self.unet.state_dict(),
                    "ema": self.ema.ema_model.state_dict(), "opt": self.opt.state_dict()},
                   self.results_folder / f"model-{milestone}.pt")

    def train(self):
        if self.is_main:
            self.results_folder.mkdir(parents=True, exist_ok=True)
        while self.step < self.num_steps:
            self.model.train()
            total = 0.0
            for i in range(self.grad_accum):
                self.model.require_backward_grad_sync = i == self.grad_accum - 1
                loss = self.p_losses(next(self.dl)) / self.grad_accum
                total += loss.item()
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.ema.update()
            if self.is_main and self.step % 20 == 0:
                print(f"{self.step}/{self.num_steps} loss: {total:.4f}", flush=True)
            if self.is_main and self.step % self.save_and_sample_every == 0:
                milestone = self.step // self.save_and_sample_every
                self.sample_grid(milestone)
                self.save(milestone)
                print(f"milestone {milestone} held-out loss: {self.validate():.4f}", flush=True)
        dist.barrier()
        if self.is_main:
            print("training complete", flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--num-steps", type=int, default=120)
    p.add_argument("--timesteps", type=int, default=40)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--results", default=str(Path(__file__).resolve().parent / "results"))
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(a.seed)
    net = Unet()
    torch.manual_seed(a.seed + 1 + int(os.environ["RANK"]))
    Trainer(net, Shapes(seed=a.seed), Shapes(64, seed=a.seed + 1).x, timesteps=a.timesteps, num_steps=a.num_steps,
            results_folder=a.results, seed=a.seed).train()
    dist.destroy_process_group()
