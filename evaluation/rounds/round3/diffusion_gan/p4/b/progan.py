# Progressive growing, WGAN-GP. Images live as single .npy files, as our scraper leaves them.
import logging
import os
import queue
import random
import sys
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("progan")


@dataclass
class Config:
    root: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "work")
    n_images: int = 120
    z_dim: int = 24
    ch: int = 16
    resolutions: tuple = (8, 16, 32)
    steps_per_phase: int = 24
    fade_steps: int = 8
    batch: int = 6
    n_critic: int = 2
    gp_weight: float = 10.0
    lr: float = 1e-3
    seed: int = 11
    betas: tuple = field(default=(0.0, 0.99))


def make_dataset(cfg):
    """Stands in for the scraped folder: mostly colour pictures, a few scans."""
    folder = os.path.join(cfg.root, "images")
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(cfg.seed)
    yy, xx = np.mgrid[0:32, 0:32] / 31.0
    for i in range(cfg.n_images):
        f = rng.uniform(1, 4, 3)
        img = 0.5 + 0.5 * np.sin(6.28 * (f[:, None, None] * xx + f[::-1, None, None] * yy))
        if i in (35, 83):
            img = img.mean(0)
        np.save(os.path.join(folder, f"{i:05d}.npy"), (img * 255).astype(np.uint8))


class Prefetcher(threading.Thread):
    def __init__(self, files, batch, res, seed, depth=4):
        super().__init__(daemon=True)
        self.files, self.batch, self.res = files, batch, res
        self.q = queue.Queue(depth)
        self.rng = random.Random(seed)
        self.closing = threading.Event()

    def read(self, path):
        img = np.load(path)
        if img.ndim == 2:
            img = np.repeat(img[None], 3, axis=0)
        return img

    def run(self):
        while not self.closing.is_set():
            order = list(self.files)
            self.rng.shuffle(order)
            for i in range(0, len(order) - self.batch + 1, self.batch):
                imgs = np.stack([self.read(p) for p in order[i:i + self.batch]])
                x = torch.from_numpy(imgs).float() / 127.5 - 1
                x = F.adaptive_avg_pool2d(x, self.res)
                if not self.offer(x):
                    return

    def offer(self, x):
        while not self.closing.is_set():
            try:
                self.q.put(x, timeout=0.2)
                return True
            except queue.Full:
                pass
        return False

    def next(self):
        return self.q.get()

    def close(self):
        self.closing.set()
        self.join()


class G(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        c = cfg.ch
        self.stem = nn.Linear(cfg.z_dim, c * 16)
        self.blocks = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in cfg.resolutions)
        self.rgb = nn.ModuleList(nn.Conv2d(c, 3, 1) for _ in cfg.resolutions)

    def forward(self, z, stage, alpha):
        x = self.stem(z).view(len(z), -1, 4, 4)
        for k in range(stage + 1):
            prev = x
            x = F.leaky_relu(self.blocks[k](F.interpolate(x, scale_factor=2)), 0.2)
        out = self.rgb[stage](x)
        if stage and alpha < 1:
            out = torch.lerp(F.interpolate(self.rgb[stage - 1](prev), scale_factor=2), out, alpha)
        return torch.tanh(out)


class D(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        c = cfg.ch
        self.rgb = nn.ModuleList(nn.Conv2d(3, c, 1) for _ in cfg.resolutions)
        self.blocks = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in cfg.resolutions)
        self.head = nn.Linear(c * 16 + 1, 1)

    def forward(self, x, stage, alpha):
        h = F.leaky_relu(self.rgb[stage](x), 0.2)
        for k in range(stage, -1, -1):
            h = F.avg_pool2d(F.leaky_relu(self.blocks[k](h), 0.2), 2)
            if k == stage and stage and alpha < 1:
                h = torch.lerp(F.leaky_relu(self.rgb[stage - 1](F.avg_pool2d(x, 2)), 0.2), h, alpha)
        h = h.flatten(1)
        std = h.std(0).mean().expand(len(h), 1)
        return self.head(torch.cat([h, std], 1))


def average_grads(net, world):
    # every tensor every time, layers that have not grown in yet count as zero
    for p in net.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / world, [p.grad for p in net.parameters()])


def gradient_penalty(d, real, fake, stage, alpha):
    u = torch.rand(len(real), 1, 1, 1)
    x = torch.lerp(real, fake, u).requires_grad_(True)
    g, = torch.autograd.grad(d(x, stage, alpha).sum(), x, create_graph=True)
    return (g.flatten(1).norm(dim=1) - 1).square().mean()


def run_phase(cfg, stage, g, d, og, od, files, rank, world):
    res = cfg.resolutions[stage]
    feed = Prefetcher(files, cfg.batch, res, cfg.seed * 10 + stage)
    feed.start()
    for step in range(cfg.steps_per_phase):
        alpha = min(1.0, (step + 1) / cfg.fade_steps) if stage else 1.0
        for _ in range(cfg.n_critic):
            real = feed.next()
            with torch.no_grad():
                fake = g(torch.randn(cfg.batch, cfg.z_dim), stage, alpha)
            loss_d = d(fake, stage, alpha).mean() - d(real, stage, alpha).mean()
            loss_d = loss_d + cfg.gp_weight * gradient_penalty(d, real, fake, stage, alpha)
            od.zero_grad()
            loss_d.backward()
            average_grads(d, world)
            od.step()
        loss_g = -d(g(torch.randn(cfg.batch, cfg.z_dim), stage, alpha), stage, alpha).mean()
        og.zero_grad()
        loss_g.backward()
        average_grads(g, world)
        og.step()
        if step % 8 == 0:
            log.info("res %d step %d alpha %.2f d %.3f g %.3f", res, step, alpha, loss_d.item(), loss_g.item())
    feed.close()


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO if rank == 0 else logging.ERROR,
                        format=f"[r{rank}] %(message)s")
    if rank == 0:
        make_dataset(cfg)
    dist.barrier()
    folder = os.path.join(cfg.root, "images")
    files = [os.path.join(folder, n) for n in sorted(os.listdir(folder))][rank::world]
    torch.manual_seed(cfg.seed)
    g, d = G(cfg), D(cfg)
    og = torch.optim.Adam(g.parameters(), cfg.lr, betas=cfg.betas)
    od = torch.optim.Adam(d.parameters(), cfg.lr, betas=cfg.betas)
    torch.manual_seed(cfg.seed + 1 + rank)
    for stage in range(len(cfg.resolutions)):
        run_phase(cfg, stage, g, d, og, od, files, rank, world)
        if rank == 0:
            torch.save({"g": g.state_dict(), "d": d.state_dict(), "stage": stage},
                       os.path.join(cfg.root, f"progan_{cfg.resolutions[stage]}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
