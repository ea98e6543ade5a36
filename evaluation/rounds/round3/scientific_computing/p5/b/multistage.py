# Multi-stage PINN for -u'' = f on (0, 1), u(0) = u(1) = 0.
# Each stage freezes what has been learnt and adds a network for the remainder,
# rescaled by the size of the residual (after Wang & Lai).
import argparse
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

HERE = os.path.dirname(os.path.abspath(__file__))


def get_args():
    p = argparse.ArgumentParser("multistage")
    p.add_argument("--stages", type=int, default=3)
    p.add_argument("--iters", type=int, default=150)
    p.add_argument("--points", type=int, default=128, help="collocation points per rank")
    p.add_argument("--resample", type=int, default=50)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--save", default=os.path.join(HERE, "stages"))
    return p.parse_args()


def forcing(x):
    return math.pi ** 2 * torch.sin(math.pi * x) + 4 * math.pi ** 2 * torch.sin(6 * math.pi * x)


def exact(x):
    return torch.sin(math.pi * x) + torch.sin(6 * math.pi * x) / 9


class Stage(nn.Module):
    """sin-activated first layer with the frequency of the stage, then tanh."""

    def __init__(self, freq, scale, width=24):
        super().__init__()
        self.freq, self.scale = freq, scale
        self.first = nn.Linear(1, width)
        self.rest = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        nn.init.uniform_(self.first.weight, -1, 1)

    def forward(self, x):
        h = torch.sin(self.freq * self.first(x))
        return self.scale * x * (1 - x) * self.rest(h)


class MultiStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList()

    def forward(self, x):
        return sum(s(x) for s in self.stages)


def sync_module(module):
    for t in module.state_dict().values():
        dist.broadcast(t, 0)


def reduce_grads(params):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def gmean(v):
    t = torch.as_tensor(v, dtype=torch.double).clone()
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed + self.rank)     # own points on every rank
        self.u = MultiStage()
        self.add_stage(freq=1.0, scale=1.0)
        self.draw()

    def say(self, msg):
        if self.rank == 0:
            sys.stdout.write(msg + "\n")
            sys.stdout.flush()

    def draw(self):
        """New collocation points; half of them where the residual is large."""
        n = self.args.points
        cand = torch.rand(4 * n, 1)
        res = self.residual(cand.requires_grad_()).detach().abs().squeeze(1)
        hard = torch.multinomial(res + 1e-6, n // 2)
        self.x = torch.cat([cand.detach()[hard], torch.rand(n - n // 2, 1)]).requires_grad_()

    def residual(self, x):
        u = self.u(x)
        du, = torch.autograd.grad(u.sum(), x, create_graph=True)
        d2u, = torch.autograd.grad(du.sum(), x, create_graph=True)
        return d2u + forcing(x)

    def add_stage(self, freq, scale):
        for p in self.u.parameters():
            p.requires_grad_(False)
        new = Stage(freq, scale)
        sync_module(new)
        self.u.stages.append(new)
        self.params = list(new.parameters())
        self.opt = torch.optim.Adam(self.params, lr=self.args.lr)

    def fit_stage(self, k):
        for it in range(self.args.iters):
            if it and it % self.args.resample == 0:
                self.draw()
            loss = self.residual(self.x).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            reduce_grads(self.params)
            self.opt.step()
            if it % 50 == 0:
                m = gmean(loss.item())
                self.say(f"stage {k} it {it:4d} loss {m:.4e}")
        return math.sqrt(gmean(loss.item()))

    def dominant_frequency(self):
        """From the zero crossings of the residual on a grid."""
        x = torch.linspace(0, 1, 401)[:, None].requires_grad_()
        r = self.residual(x).detach().squeeze(1)
        crossings = (r[1:] * r[:-1] < 0).sum().item()
        return gmean(float(crossings)) * math.pi

    def error(self):
        x = torch.linspace(0, 1, 301)[:, None]
        with torch.no_grad():
            return ((self.u(x) - exact(x)).norm() / exact(x).norm()).item()

    def run(self):
        for k in range(self.args.stages):
            rms = self.fit_stage(k)
            freq = self.dominant_frequency()
            self.say(f"stage {k} rms residual {rms:.3e} rel. error {self.error():.3e} next freq {freq:.1f}")
            if self.rank == 0:
                os.makedirs(self.args.save, exist_ok=True)
                torch.save(self.u.state_dict(), os.path.join(self.args.save, f"u{k}.pt"))
            if k + 1 < self.args.stages:
                self.add_stage(freq=max(freq, 1.0), scale=rms / max(freq, 1.0) ** 2)
                self.draw()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        Runner(get_args()).run()
    finally:
        dist.destroy_process_group()
