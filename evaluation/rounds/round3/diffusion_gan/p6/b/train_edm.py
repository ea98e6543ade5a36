"""Train a preconditioned denoiser and report the Frechet distance of its samples at each tick."""
import argparse
import copy
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist

#----------------------------------------------------------------------------
# Printing and process helpers.

def print0(*args, **kwargs):
    if dist.get_rank() == 0:
        print(*args, **kwargs, flush=True)

class InfiniteSampler(torch.utils.data.Sampler):
    def __init__(self, size, rank, num_replicas, seed=0):
        self.size, self.rank, self.num_replicas, self.seed = size, rank, num_replicas, seed

    def __iter__(self):
        order = np.random.RandomState(self.seed).permutation(self.size)
        idx = 0
        while True:
            if idx % self.num_replicas == self.rank:
                yield int(order[idx % self.size])
            idx += 1

class StackedRandomGenerator:
    def __init__(self, seeds):
        self.generators = [torch.Generator().manual_seed(int(s)) for s in seeds]

    def randn(self, size):
        return torch.stack([torch.randn(size[1:], generator=g) for g in self.generators])

#----------------------------------------------------------------------------
# Network with EDM preconditioning.

class EDMPrecond(torch.nn.Module):
    def __init__(self, dim=192, hidden=128, sigma_data=0.5):
        super().__init__()
        self.sigma_data = sigma_data
        self.net = torch.nn.Sequential(
            torch.nn.Linear(dim + 1, hidden), torch.nn.SiLU(),
            torch.nn.Linear(hidden, hidden), torch.nn.SiLU(),
            torch.nn.Linear(hidden, dim))

    def forward(self, x, sigma):
        s = sigma.reshape(-1, 1)
        var = s ** 2 + self.sigma_data ** 2
        c_skip, c_out = self.sigma_data ** 2 / var, s * self.sigma_data / var.sqrt()
        h = torch.cat([x.flatten(1) / var.sqrt(), s.log() / 4], dim=1)
        return (c_skip * x.flatten(1) + c_out * self.net(h)).reshape(x.shape)

class EDMLoss:
    def __init__(self, P_mean=-1.2, P_std=1.2, sigma_data=0.5):
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def __call__(self, net, images):
        sigma = (torch.randn(len(images), 1, 1, 1) * self.P_std + self.P_mean).exp()
        weight = (sigma ** 2 + self.sigma_data ** 2) / (sigma * self.sigma_data) ** 2
        return weight * (net(images + torch.randn_like(images) * sigma, sigma) - images) ** 2

#----------------------------------------------------------------------------
# Sampling.

@torch.no_grad()
def edm_sampler(net, latents, num_steps=8, sigma_min=0.01, sigma_max=20, rho=7):
    i = torch.arange(num_steps)
    t = (sigma_max ** (1 / rho) + i / (num_steps - 1) * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
    t = torch.cat([t, torch.zeros(1)])
    x = latents * t[0]
    for k, (cur, nxt) in enumerate(zip(t[:-1], t[1:])):
        d_cur = (x - net(x, cur.expand(len(x)))) / cur
        x_next = x + (nxt - cur) * d_cur
        if k < num_steps - 1:
            d_prime = (x_next - net(x_next, nxt.expand(len(x)))) / nxt
            x_next = x + (nxt - cur) * (d_cur + d_prime) / 2
        x = x_next
    return x

#----------------------------------------------------------------------------
# Frechet distance.

class Detector:
    def __init__(self, dim=192, features=24):
        g = torch.Generator().manual_seed(77)
        self.w = torch.randn(dim, features, generator=g) / dim ** 0.5

    def __call__(self, x):
        return torch.nn.functional.gelu(x.flatten(1) @ self.w).double()

def reference_stats(images, detector):
    f = detector(images)
    return f.mean(0), torch.cov(f.T)

def sample_stats(net, detector, shape, seeds, max_batch_size):
    world, rank = dist.get_world_size(), dist.get_rank()
    num_batches = ((len(seeds) - 1) // (max_batch_size * world) + 1) * world
    all_batches = torch.as_tensor(seeds).tensor_split(num_batches)
    rank_batches = all_batches[rank::world]
    mu = torch.zeros(detector.w.shape[1], dtype=torch.float64)
    sigma = torch.zeros(len(mu), len(mu), dtype=torch.float64)
    for batch_seeds in rank_batches:
        dist.barrier()
        if len(batch_seeds) == 0:
            continue
        rnd = StackedRandomGenerator(batch_seeds)
        images = edm_sampler(net, rnd.randn([len(batch_seeds), *shape]))
        f = detector(images)
        mu += f.sum(0)
        sigma += f.T @ f
    dist.all_reduce(mu)
    dist.all_reduce(sigma)
    mu /= len(seeds)
    sigma -= mu.ger(mu) * len(seeds)
    return mu, sigma / (len(seeds) - 1)

def frechet_distance(mu, sigma, mu_ref, sigma_ref):
    ev = torch.linalg.eigvals(sigma @ sigma_ref).real.clamp(min=0)
    return float((mu - mu_ref).square().sum() + (sigma.trace() + sigma_ref.trace() - 2 * ev.sqrt().sum()))

#----------------------------------------------------------------------------
# Training.

def training_loop(opts):
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(opts.seed)
    ramp = torch.linspace(-1, 1, 8)
    k = torch.rand(opts.dataset_size, 3, 2, 1, 1, generator=g)
    images = (k[:, :, 0] * ramp[:, None] + k[:, :, 1] * ramp[None, :]) * 0.8

    sampler = InfiniteSampler(len(images), rank, world, opts.seed)
    loader = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), sampler=sampler,
                                              batch_size=opts.batch // world))
    torch.manual_seed(opts.seed)
    net = EDMPrecond()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=opts.lr)
    loss_fn = EDMLoss()
    torch.manual_seed(opts.seed * world + rank)
    detector = Detector()
    mu_ref, sigma_ref = reference_stats(images, detector)

    cur_nimg, cur_tick, start = 0, 0, time.time()
    losses = []
    while True:
        optimizer.zero_grad(set_to_none=True)
        batch, = next(loader)
        loss = loss_fn(ddp, batch)
        loss.mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = opts.lr * min(cur_nimg / max(opts.lr_rampup_img, 1e-8), 1)
        for p in net.parameters():
            torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        optimizer.step()
        losses.append(loss.mean().item())
        beta = 0.5 ** (opts.batch / max(opts.ema_halflife_img, 1e-8))
        for p_ema, p_net in zip(ema.parameters(), net.parameters()):
            p_ema.copy_(p_net.detach().lerp(p_ema, beta))
        cur_nimg += opts.batch
        if cur_nimg < (cur_tick + 1) * opts.img_per_tick:
            continue

        cur_tick += 1
        print0(f"tick {cur_tick} img {cur_nimg} loss {np.mean(losses):.4f} sec {time.time() - start:.1f}")
        losses.clear()
        if cur_tick % opts.fid_ticks == 0:
            mu, sigma = sample_stats(ema, detector, images.shape[1:], range(opts.fid_samples), opts.sample_batch)
            if rank == 0:
                fid = frechet_distance(mu, sigma, mu_ref, sigma_ref)
                print0(f"  fid over {opts.fid_samples} samples: {fid:.4f}")
                with open(os.path.join(opts.run_dir, "metric-fid.jsonl"), "a") as f:
                    f.write(json.dumps(dict(tick=cur_tick, nimg=cur_nimg, fid=fid)) + "\n")
            dist.barrier()
        if rank == 0:
            torch.save(dict(ema=ema.state_dict(), opt=optimizer.state_dict()),
                       os.path.join(opts.run_dir, f"training-state-{cur_tick:04d}.pt"))
        if cur_nimg >= opts.total_img:
            break
    print0("Exiting...")

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--run-dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "run"))
    p.add_argument("--dataset-size", type=int, default=600)
    p.add_argument("--total-img", type=int, default=4800)
    p.add_argument("--img-per-tick", type=int, default=1200)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--lr-rampup-img", type=int, default=400)
    p.add_argument("--ema-halflife-img", type=int, default=400)
    p.add_argument("--fid-ticks", type=int, default=2)
    p.add_argument("--fid-samples", type=int, default=500)
    p.add_argument("--sample-batch", type=int, default=32)
    p.add_argument("--seed", type=int, default=1)
    opts = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        os.makedirs(opts.run_dir, exist_ok=True)
    dist.barrier()
    training_loop(opts)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
