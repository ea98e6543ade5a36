import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint
from config import Config
from diffusion import EMA, Denoiser, Schedule


def log(*a):
    if dist.get_rank() == 0:
        print(*a, flush=True)


def make_data(dim, n=2048, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(4, dim)) * 2
    x = centres[rng.integers(0, 4, n)] + 0.1 * rng.normal(size=(n, dim))
    return torch.from_numpy(x.astype(np.float32))


class Batches:
    """Endless batches of this rank's part of the data."""

    def __init__(self, data, batch, rank, world, seed):
        self.data = data[rank::world]
        self.batch = batch
        self.gen = torch.Generator().manual_seed(seed + rank)

    def next(self):
        idx = torch.randint(0, len(self.data), (self.batch,), generator=self.gen)
        return self.data[idx]


def sample_quality(cfg, sched, ema, data):
    """Each rank draws samples with the averaged weights; distance to the data means, over all ranks."""
    net = Denoiser(cfg.dim, cfg.hidden)
    net.load_state_dict(ema.state_dict())
    gen = torch.Generator().manual_seed(99 + dist.get_rank())
    x = sched.sample(net, 32, cfg.dim, gen)
    dist_min = torch.cdist(x, data[:256]).min(1).values.mean()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, float(dist_min))
    return sum(parts) / len(parts)


def run_stage(cfg, stage, data):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    net = Denoiser(cfg.dim, cfg.hidden)
    opt = torch.optim.Adam(net.parameters(), lr=stage.lr)
    ema = EMA(net, cfg.ema_decay)
    step = 0
    if stage.resume:
        step = checkpoint.restore(cfg, net, ema, opt)
        for g in opt.param_groups:
            g["lr"] = stage.lr
    log(f"stage {stage.name}: from step {step} to {stage.steps}")
    ddp = DDP(net)
    sched = Schedule(cfg.timesteps)
    batches = Batches(data, cfg.batch, rank, world, cfg.seed)
    gen = torch.Generator().manual_seed(1000 + rank + step)

    while step < stage.steps:
        noisy, t, eps = sched.noise(batches.next(), gen)
        loss = (ddp(noisy, t) - eps).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        step += 1
        if step % cfg.sample_every == 0:
            q = sample_quality(cfg, sched, ema, data)
            log(f"step {step} loss {loss.item():.4f} sample distance {q:.3f}")
        if step % cfg.save_every == 0:
            checkpoint.save(cfg, step, net, ema, opt)


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    data = make_data(cfg.dim)
    for stage in cfg.stages:
        run_stage(cfg, stage, data)
    log("all stages done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
