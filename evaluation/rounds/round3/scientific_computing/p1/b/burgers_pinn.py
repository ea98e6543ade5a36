"""Viscous Burgers' equation with a physics-informed network.

Adam warm-up followed by L-BFGS refinement.  Collocation points are split over
the ranks, every rank holds the whole network.

    torchrun --nproc-per-node=2 burgers_pinn.py --adam 60 --lbfgs 6
"""
import argparse
import math
import os
import time
from dataclasses import dataclass, asdict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass
class Config:
    n_f: int = 600          # collocation points in total
    n_b: int = 60           # initial and boundary points, on every rank
    width: int = 20
    depth: int = 4
    nu: float = 0.01 / math.pi
    lr: float = 2e-3
    adam: int = 60
    lbfgs: int = 6
    inner: int = 12
    history: int = 20
    seed: int = 1234
    out: str = ""


class Comm:
    """Thin wrapper, so that the solver reads like the MPI version."""

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def allreduce_mean(self, t):
        t = t.detach().clone()
        dist.all_reduce(t)
        return t / self.size

    def bcast(self, t, root=0):
        dist.broadcast(t, src=root)
        return t

    def print(self, *a):
        if self.rank == 0:
            print(*a, flush=True)

    def finalize(self):
        dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        dims = [2] + [width] * depth + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))
        for l in self.layers:
            nn.init.xavier_normal_(l.weight)
            nn.init.zeros_(l.bias)

    def forward(self, x, t):
        h = torch.cat([x, t], 1)
        for l in self.layers[:-1]:
            h = torch.tanh(l(h))
        return self.layers[-1](h)


def latin(n, gen):
    """Latin hypercube in [-1, 1] x [0, 1]."""
    u = (torch.stack([torch.randperm(n, generator=gen) for _ in range(2)], 1)
         + torch.rand(n, 2, generator=gen)) / n
    return 2 * u[:, :1] - 1, u[:, 1:]


class Solver:
    def __init__(self, cfg, comm):
        self.cfg, self.comm = cfg, comm
        torch.manual_seed(cfg.seed)
        self.net = Net(cfg.width, cfg.depth)
        self.params = list(self.net.parameters())
        gen = torch.Generator().manual_seed(cfg.seed)
        x, t = latin(cfg.n_f, gen)
        order = x[:, 0].argsort()                       # strips in x
        mine = order.chunk(comm.size)[comm.rank]
        self.xf = x[mine].requires_grad_()
        self.tf = t[mine].requires_grad_()
        xi = 2 * torch.rand(cfg.n_b, 1, generator=gen) - 1
        tb = torch.rand(cfg.n_b, 1, generator=gen)
        side = torch.where(torch.rand(cfg.n_b, 1, generator=gen) < 0.5, -1.0, 1.0)
        self.xb = torch.cat([xi, side])
        self.tb = torch.cat([torch.zeros_like(xi), tb])
        self.ub = torch.cat([-torch.sin(math.pi * xi), torch.zeros_like(tb)])
        self.evals = 0

    def residual(self):
        u = self.net(self.xf, self.tf)
        one = torch.ones_like(u)
        ux, ut = torch.autograd.grad(u, (self.xf, self.tf), one, create_graph=True)
        uxx, = torch.autograd.grad(ux, self.xf, one, create_graph=True)
        return ut + u * ux - self.cfg.nu * uxx

    def loss(self):
        data = (self.net(self.xb, self.tb) - self.ub).pow(2).mean()
        return data + self.residual().pow(2).mean()

    def average_gradients(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.params])
        flat = self.comm.allreduce_mean(flat)
        i = 0
        for p in self.params:
            p.grad.copy_(flat[i:i + p.numel()].view_as(p))
            i += p.numel()

    def run_adam(self):
        opt = torch.optim.Adam(self.params, lr=self.cfg.lr)
        for it in range(self.cfg.adam):
            opt.zero_grad()
            loss = self.loss()
            loss.backward()
            self.average_gradients()
            opt.step()
            if it % 20 == 0:
                mean = self.comm.allreduce_mean(loss).item()
                self.comm.print(f"adam  {it:4d}  loss {mean:.4e}")

    def run_lbfgs(self):
        c = self.cfg
        opt = torch.optim.LBFGS(self.params, lr=1.0, max_iter=c.inner, history_size=c.history,
                                tolerance_grad=1e-9, tolerance_change=1e-12,
                                line_search_fn="strong_wolfe")

        def closure():
            opt.zero_grad()
            loss = self.loss()
            loss.backward()
            self.average_gradients()
            self.current = self.comm.allreduce_mean(loss)
            self.evals += 1
            return loss

        for it in range(c.lbfgs):
            opt.step(closure)
            self.comm.print(f"lbfgs {it:4d}  loss {self.current.item():.4e}  evaluations {self.evals}")
            if self.should_stop(it):
                break

    def should_stop(self, it):
        """Root looks at the solution at t = 1 and decides for everybody."""
        flag = torch.zeros(1)
        if self.comm.rank == 0:
            with torch.no_grad():
                x = torch.linspace(-1, 1, 201)[:, None]
                u = self.net(x, torch.ones_like(x))
            odd = (u + u.flip(0)).abs().max().item()
            np.savez(os.path.join(self.cfg.out, f"u_{it:03d}.npz"), x=x.numpy(), u=u.numpy())
            flag[0] = float(odd < 1e-4)
        return bool(self.comm.bcast(flag).item())


def main():
    p = argparse.ArgumentParser()
    for k, v in asdict(Config()).items():
        p.add_argument("--" + k, type=type(v), default=v)
    cfg = Config(**vars(p.parse_args()))
    cfg.out = cfg.out or os.path.join(os.path.dirname(os.path.abspath(__file__)), "out")
    os.makedirs(cfg.out, exist_ok=True)
    comm = Comm()
    s = Solver(cfg, comm)
    t0 = time.time()
    s.run_adam()
    s.run_lbfgs()
    comm.print(f"done in {time.time() - t0:.1f} s")
    if comm.rank == 0:
        torch.save({"cfg": asdict(cfg), "net": s.net.state_dict()}, os.path.join(cfg.out, "net.pt"))
    comm.finalize()


if __name__ == "__main__":
    main()
