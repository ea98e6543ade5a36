# Rectified flow with a small text-conditioned transformer.
import argparse
import contextlib
import os
import random
import time
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class CaptionEmbedder(nn.Module):
    """Pooled caption features to the model width, with dropout of the condition for guidance."""

    def __init__(self, in_dim, hidden, drop_prob):
        super().__init__()
        self.proj = nn.Sequential(nn.Linear(in_dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.drop_prob = drop_prob
        self.hidden = hidden

    def forward(self, y):
        if self.training and self.drop_prob > 0:
            keep = (torch.rand(len(y), 1) >= self.drop_prob).to(y.dtype)
            return self.proj(y) * keep
        return self.proj(y)

    def null(self, n):
        return torch.zeros(n, self.hidden)


class DiTBlock(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden * 2), nn.GELU(), nn.Linear(hidden * 2, hidden))
        self.ada = nn.Linear(hidden, hidden * 6)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c):
        s1, g1, a1, s2, g2, a2 = self.ada(F.silu(c)).chunk(6, dim=1)
        h = modulate(self.norm1(x), s1, g1)
        x = x + a1.unsqueeze(1) * self.attn(h, h, h, need_weights=False)[0]
        return x + a2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), s2, g2))


class DiT(nn.Module):
    def __init__(self, channels=4, size=8, patch=2, hidden=48, depth=3, heads=4, text_dim=20, drop_prob=0.1):
        super().__init__()
        self.channels, self.size, self.patch = channels, size, patch
        tokens = (size // patch) ** 2
        self.x_embed = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.pos = nn.Parameter(torch.randn(1, tokens, hidden) * 0.02)
        self.t_embed = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.y_embed = CaptionEmbedder(text_dim, hidden, drop_prob)
        self.blocks = nn.ModuleList(DiTBlock(hidden, heads) for _ in range(depth))
        self.out = nn.Linear(hidden, patch * patch * channels)

    def forward(self, x, t, y=None):
        h = self.x_embed(x).flatten(2).transpose(1, 2) + self.pos
        c = self.t_embed(t[:, None]) + (self.y_embed(y) if y is not None else self.y_embed.null(len(x)))
        for blk in self.blocks:
            h = blk(h, c)
        n, p = self.size // self.patch, self.patch
        h = self.out(h).reshape(len(x), n, n, p, p, self.channels)
        return h.permute(0, 5, 1, 3, 2, 4).reshape(len(x), self.channels, self.size, self.size)


class LatentStream:
    """Endless (latent, caption feature) pairs, different on every rank."""

    def __init__(self, batch, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.mix = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))

    def __iter__(self):
        while True:
            y = torch.randn(self.batch, 20, generator=self.g)
            z = torch.randn(self.batch, 4, 8, 8, generator=self.g) * 0.3
            yield z + (y @ self.mix)[:, :, None, None] / 5, y


@torch.no_grad()
def update_ema(ema, model, decay):
    for (_, pe), (_, p) in zip(ema.named_parameters(), model.named_parameters()):
        pe.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def sample(model, y, steps=10, cfg_scale=2.0):
    z = torch.randn(len(y), model.channels, model.size, model.size)
    for i in range(steps):
        t = torch.full((len(y),), 1 - i / steps)
        v_c, v_u = model(z, t, y), model(z, t)
        z = z - (v_u + cfg_scale * (v_c - v_u)) / steps
    return z


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        net = DiT(drop_prob=args.cond_drop)
        self.ema = deepcopy(net).eval().requires_grad_(False)
        self.model = DDP(net)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0)
        self.seed_everything(args.seed * self.world + self.rank)
        self.stream = iter(LatentStream(args.batch, args.seed * self.world + self.rank))
        self.running, self.since = 0.0, 0

    @staticmethod
    def seed_everything(seed):
        random.seed(seed)
        torch.manual_seed(seed)

    def loss(self):
        x, y = next(self.stream)
        t = torch.sigmoid(torch.randn(len(x)))
        noise = torch.randn_like(x)
        tt = t[:, None, None, None]
        v = self.model((1 - tt) * x + tt * noise, t, y)
        return F.mse_loss(v, noise - x)

    def step(self):
        self.opt.zero_grad(set_to_none=True)
        for i in range(self.args.accum):
            last = i == self.args.accum - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.loss() / self.args.accum
                loss.backward()
            self.running += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        update_ema(self.ema, self.model.module, 0.99)
        self.since += 1

    def report(self, step, t0):
        avg = torch.tensor(self.running / self.since)
        dist.all_reduce(avg)
        if self.rank == 0:
            print(f"(step={step:05d}) loss {avg.item() / self.world:.4f}, "
                  f"{self.since / (time.time() - t0):.2f} steps/s", flush=True)
        self.running, self.since = 0.0, 0

    def checkpoint(self, step):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "ema": self.ema.state_dict(), "args": vars(self.args)},
                       os.path.join(self.args.results_dir, f"{step:05d}.pt"))
            y = torch.randn(8, 20, generator=torch.Generator().manual_seed(5))
            torch.save(sample(self.ema, y), os.path.join(self.args.results_dir, f"{step:05d}_samples.pt"))
        dist.barrier()

    def fit(self):
        t0 = time.time()
        for step in range(1, self.args.max_steps + 1):
            self.step()
            if step % self.args.log_every == 0:
                self.report(step, t0)
                t0 = time.time()
            if step % self.args.ckpt_every == 0:
                self.checkpoint(step)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--results-dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results"))
    ap.add_argument("--max-steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=1)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--cond-drop", type=float, default=0.1)
    ap.add_argument("--log-every", type=int, default=20)
    ap.add_argument("--ckpt-every", type=int, default=40)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.makedirs(args.results_dir, exist_ok=True)
    Trainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
