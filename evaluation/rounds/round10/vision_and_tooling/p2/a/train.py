import configparser
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from balance import DiscriminatorGate
from data import make_loader
from dist_utils import mean_of, setup, wrap
from nets import Discriminator, Generator


def set_grad(net, flag):
    for p in net.parameters():
        p.requires_grad_(flag)


class GanTrainer:
    def __init__(self, cfg, rank):
        self.cfg = cfg
        m, o = cfg["model"], cfg["optim"]
        self.z = m.getint("z")
        self.gen = wrap(Generator(self.z, m.getint("width")))
        self.disc = wrap(Discriminator(m.getint("width")))
        self.opt_g = torch.optim.Adam(self.gen.parameters(), o.getfloat("lr_g"), betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.disc.parameters(), o.getfloat("lr_d"), betas=(0.5, 0.99))
        self.noise = torch.Generator().manual_seed(o.getint("seed") * 100 + rank)
        self.rank = rank
        self.gate = DiscriminatorGate(o.getfloat("d_ceiling"), o.getint("d_rest"))

    def sample_z(self, n):
        return torch.randn(n, self.z, generator=self.noise)

    def step_d(self, real):
        with torch.no_grad():
            fake = self.gen.module(self.sample_z(len(real)))
        on_real = self.disc(real)
        on_fake = self.disc(fake)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        self.gate.observe(on_real.detach(), on_fake.detach())
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def step_g(self, n):
        set_grad(self.disc, False)
        fake = self.gen(self.sample_z(n))
        loss = F.softplus(-self.disc.module(fake)).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        set_grad(self.disc, True)
        return loss.item()

    def fit(self, loader):
        every = self.cfg["logging"].getint("every")
        d = 0.0
        for epoch in range(self.cfg["optim"].getint("epochs")):
            loader.sampler.set_epoch(epoch)
            for step, (real,) in enumerate(loader):
                if self.gate.open():
                    d = self.step_d(real)
                g = self.step_g(len(real))
                if step % every == 0:
                    md, mg = mean_of([d, g])
                    if self.rank == 0:
                        print(f"epoch {epoch} step {step} D {md:.3f} G {mg:.3f} "
                              f"D accuracy {self.gate.accuracy:.2f}", flush=True)


def main():
    cfg = configparser.ConfigParser()
    cfg.read(sys.argv[1] if len(sys.argv) > 1 else "gan.ini")
    rank, world = setup()
    torch.manual_seed(cfg["optim"].getint("seed"))
    GanTrainer(cfg, rank).fit(make_loader(cfg["data"]))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("finished")


if __name__ == "__main__":
    main()
