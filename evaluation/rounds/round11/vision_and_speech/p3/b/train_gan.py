import argparse
import gc
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from augment import AugmentPipe
from nets import Critic, Generator


def real_batch(gen, n, size=12):
    """Soft crosses at random places."""
    c = torch.randint(3, size - 3, (n, 2), generator=gen)
    r = torch.arange(size)
    rows = torch.exp(-0.5 * (r[None] - c[:, :1]) ** 2.0)
    cols = torch.exp(-0.5 * (r[None] - c[:, 1:]) ** 2.0)
    img = torch.maximum(rows[:, :, None].expand(n, size, size), cols[:, None, :].expand(n, size, size))
    return img.unsqueeze(1) * 2 - 1


class LazyRegularizer:
    """Gradient penalty on a random subset of critic steps, weighted to keep the expectation."""

    def __init__(self, prob, weight):
        self.prob, self.weight = prob, weight

    def due(self):
        return random.random() < self.prob

    def penalty(self, critic, real):
        real = real.detach().requires_grad_(True)
        score = critic(real).sum()
        (g,) = torch.autograd.grad(score, real, create_graph=True)
        return self.weight / self.prob * g.flatten(1).pow(2).sum(1).mean()


class Trainer:
    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        torch.manual_seed(args.seed)
        random.seed(args.seed)
        self.G = DDP(Generator())
        self.D = DDP(Critic())
        self.optG = torch.optim.Adam(self.G.parameters(), lr=2e-4, betas=(0.0, 0.99))
        self.optD = torch.optim.Adam(self.D.parameters(), lr=4e-4, betas=(0.0, 0.99))
        self.gen = torch.Generator().manual_seed(args.seed * 1000 + rank)
        self.aug = AugmentPipe(seed=args.seed * 1000 + rank)
        self.reg = LazyRegularizer(args.reg_prob, 0.5)
        self.penalties = 0

    def noise(self):
        return torch.randn(self.args.batch_size, 8, generator=self.gen)

    def critic_step(self):
        real = self.aug(real_batch(self.gen, self.args.batch_size))
        with torch.no_grad():
            fake = self.aug(self.G.module(self.noise()))
        scores = self.D(torch.cat([real, fake]))
        r, f = scores.chunk(2)
        loss = F.softplus(-r).mean() + F.softplus(f).mean()
        self.optD.zero_grad()
        loss.backward()
        self.optD.step()
        if self.reg.due():
            pen = self.reg.penalty(self.D.module, real)
            params = list(self.D.module.parameters())
            grads = torch.autograd.grad(pen, params, allow_unused=True)
            norms = torch.stack([g.norm() if g is not None else torch.zeros(()) for g in grads])
            everyone = [torch.empty_like(norms) for _ in range(self.world)]
            dist.all_gather(everyone, norms)
            scale = 1.0 / torch.stack(everyone).mean(0).clamp(min=1.0)
            with torch.no_grad():
                for p, g, s in zip(params, grads, scale):
                    if g is not None:
                        dist.all_reduce(g)
                        p.sub_(1e-4 * s * g / self.world)
            self.penalties += 1
        return loss.item()

    def generator_step(self):
        fake = self.aug(self.G(self.noise()))
        loss = F.softplus(-self.D.module(fake)).mean()
        self.optG.zero_grad()
        loss.backward()
        self.optG.step()
        return loss.item()

    def fit(self):
        for it in range(self.args.iters):
            d = self.critic_step()
            g = self.generator_step()
            if self.rank == 0 and it % 10 == 9:
                print(f"iter {it + 1} D {d:.3f} G {g:.3f} penalties {self.penalties}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--reg-prob", type=float, default=0.3)
    p.add_argument("--seed", type=int, default=3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    t = Trainer(args, dist.get_rank(), dist.get_world_size())
    t.fit()
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
