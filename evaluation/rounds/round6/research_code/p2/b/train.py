import argparse
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import MixtureRing
from losses import compactness, d_hinge, gradient_penalty
from models import Discriminator, Generator

log = logging.getLogger("gan")


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        self.data = MixtureRing(args.modes, args.batch, args.seed, self.rank)
        self.gp_gen = torch.Generator().manual_seed(args.seed + self.rank)
        self.disc = Discriminator()
        self.G = DDP(Generator(args.z), process_group=dist.new_group())
        self.D = DDP(self.disc, process_group=dist.new_group())
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.skipped = 0

    def d_loss(self):
        real, label = self.data.draw()
        with torch.no_grad():
            fake = self.G.module(self.data.noise(self.args.z))
        score, feat = self.D(torch.cat([real, fake]), features=True)
        n = real.shape[0]
        loss = d_hinge(score[:n], score[n:])
        loss = loss + self.args.gp * gradient_penalty(self.disc, real, fake, self.gp_gen)
        return loss + self.args.compact * compactness(feat[:n], label)

    def d_step(self):
        loss = self.d_loss()
        if not torch.isfinite(loss):
            raise ValueError("discriminator loss is not finite")
        self.opt_d.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def g_step(self):
        for p in self.D.parameters():
            p.requires_grad_(False)
        self.opt_g.zero_grad(set_to_none=True)
        loss = -self.disc(self.G(self.data.noise(self.args.z))).mean()
        loss.backward()
        self.opt_g.step()
        for p in self.D.parameters():
            p.requires_grad_(True)
        return loss.item()

    def fit(self):
        d = g = 0.0
        for step in range(self.args.steps):
            for _ in range(self.args.n_critic):
                try:
                    d = self.d_step()
                except ValueError as err:
                    self.skipped += 1
                    log.debug("step %d: %s", step, err)
            g = self.g_step()
            if self.rank == 0 and step % 20 == 0:
                log.info("step %4d  d %.4f  g %.4f", step, d, g)
        stats = torch.tensor([d, g, float(self.skipped)], dtype=torch.float64)
        dist.all_reduce(stats)
        if self.rank == 0:
            log.info("done: mean d %.4f mean g %.4f skipped %d", *(stats / dist.get_world_size()).tolist())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--n-critic", type=int, default=2)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--modes", type=int, default=12)
    ap.add_argument("--z", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--gp", type=float, default=1.0)
    ap.add_argument("--compact", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    Trainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
