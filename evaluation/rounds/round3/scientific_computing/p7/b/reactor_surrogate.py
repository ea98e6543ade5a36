"""Surrogate of a stirred-tank reactor, trained with adaptive sampling.

A deep ensemble is trained on solver runs; in every round each rank scores a
pool of candidates in its part of the parameter space by the disagreement of
the ensemble, runs the solver for the most uncertain ones and adds them.
"""
import argparse
import logging
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class SolverError(RuntimeError):
    pass


def simulate(da, beta, t_end=2.0, tol=1e-4, h_min=2e-3):
    """Conversion and temperature at t_end; adaptive Heun steps."""

    def rhs(x, th):
        k = da * (1 - x) * math.exp(min(th / (1 + th / 20), 40.0))
        return -x + k, -1.5 * th + beta * k

    x = th = t = 0.0
    h = 0.02
    while t < t_end:
        h = min(h, t_end - t)
        a = rhs(x, th)
        b = rhs(x + h * a[0], th + h * a[1])
        err = h / 2 * max(abs(b[0] - a[0]), abs(b[1] - a[1]))
        if err < tol:
            x, th, t = x + h / 2 * (a[0] + b[0]), th + h / 2 * (a[1] + b[1]), t + h
        elif h < h_min:
            raise SolverError(f"step size {h:.1e} at t={t:.3f} (Da={da:.3f}, beta={beta:.2f})")
        h *= min(2.0, max(0.3, 0.9 * math.sqrt(tol / max(err, 1e-12))))
    return x, th


class Ensemble(nn.Module):
    def __init__(self, members, width=24):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
            for _ in range(members))

    def forward(self, p):
        return torch.stack([n(p) for n in self.nets])


class Region:
    """Equal strips of the Damkoehler number, one for each rank."""

    def __init__(self, rank, size, da=(0.02, 0.5), beta=(1.0, 9.0)):
        w = (da[1] - da[0]) / size
        self.lo = torch.tensor([da[0] + rank * w, beta[0]])
        self.hi = torch.tensor([da[0] + (rank + 1) * w, beta[1]])
        self.mid = torch.tensor([sum(da) / 2, sum(beta) / 2])
        self.half = torch.tensor([(da[1] - da[0]) / 2, (beta[1] - beta[0]) / 2])

    def sample(self, n, gen):
        return self.lo + (self.hi - self.lo) * torch.rand(n, 2, generator=gen)

    def normalise(self, p):
        return (p - self.mid) / self.half


class AdaptiveTrainer:
    def __init__(self, opt):
        self.opt = opt
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.log = logging.getLogger(f"rank{self.rank}")
        self.gen = torch.Generator().manual_seed(100 + self.rank)
        self.region = Region(self.rank, self.size)
        torch.manual_seed(0)
        self.model = Ensemble(opt.members)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=opt.lr)
        self.p = torch.empty(0, 2)
        self.q = torch.empty(0, 2)

    def label(self, params):
        """Run the solver, keep what converged."""
        keep, out = [], []
        for p in params:
            try:
                out.append(simulate(*p.tolist()))
            except SolverError as e:
                self.log.debug("run dropped: %s", e)
                continue
            keep.append(p)
        if keep:
            self.p = torch.cat([self.p, torch.stack(keep)])
            self.q = torch.cat([self.q, torch.tensor(out) * torch.tensor([1.0, 0.2])])

    def all_min(self, n):
        t = torch.tensor([n])
        dist.all_reduce(t, op=dist.ReduceOp.MIN)
        return int(t)

    def epoch(self):
        order = torch.randperm(len(self.p), generator=self.gen)
        steps = len(self.p) // self.opt.batch
        total = 0.0
        for k in range(steps):
            idx = order[k * self.opt.batch:(k + 1) * self.opt.batch]
            pred = self.model(self.region.normalise(self.p[idx]))
            loss = (pred - self.q[idx]).pow(2).mean()
            self.adam.zero_grad()
            loss.backward()
            grads = [p.grad for p in self.model.parameters()]
            flat = nn.utils.parameters_to_vector(grads)
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat / self.size, grads)
            self.adam.step()
            total += loss.item()
        return total / max(steps, 1)

    @torch.no_grad()
    def acquire(self):
        pool = self.region.sample(self.opt.pool, self.gen)
        spread = self.model(self.region.normalise(pool)).std(0).sum(1)
        score, best = spread.topk(self.opt.add)
        self.label(pool[best])
        return score.mean().item()

    def report(self, rnd, loss, score):
        rows = [None] * self.size
        dist.all_gather_object(rows, {"loss": loss, "score": score, "runs": len(self.p)})
        if self.rank == 0:
            self.log.info("round %d loss %s spread %s runs %s", rnd, *(
                [round(r[k], 4) for r in rows] for k in ("loss", "score", "runs")))
            torch.save({"round": rnd, "model": self.model.state_dict()}, self.opt.ckpt)
        return max(r["score"] for r in rows)

    def fit(self):
        self.label(self.region.sample(self.opt.initial, self.gen))
        for rnd in range(self.opt.rounds):
            for _ in range(self.opt.epochs):
                loss = self.epoch()
            score = self.acquire()
            if self.report(rnd, loss, score) < self.opt.target:
                break


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--members", type=int, default=3)
    ap.add_argument("--initial", type=int, default=48)
    ap.add_argument("--pool", type=int, default=200)
    ap.add_argument("--add", type=int, default=16)
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--target", type=float, default=1e-3)
    ap.add_argument("--ckpt", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "surrogate.pt"))
    opt = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    dist.init_process_group("gloo")
    AdaptiveTrainer(opt).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
