"""Small style-based GAN. The last rank does not train: it scores the averaged
generator while the other ranks keep going."""
import argparse
import copy
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class MappingNet(nn.Module):
    def __init__(self, z_dim, w_dim, layers=3):
        super().__init__()
        dims = [z_dim] + [w_dim] * layers
        self.fc = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))

    def forward(self, z):
        x = z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        for fc in self.fc:
            x = F.leaky_relu(fc(x), 0.2)
        return x


class StyleConv(nn.Module):
    def __init__(self, cin, cout, w_dim):
        super().__init__()
        self.affine = nn.Linear(w_dim, cin)
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)

    def forward(self, x, w):
        s = self.affine(w)[:, :, None, None] + 1
        return F.leaky_relu(self.conv(x * s), 0.2)


class Generator(nn.Module):
    def __init__(self, z_dim=32, w_dim=32, ch=24):
        super().__init__()
        self.z_dim = z_dim
        self.mapping = MappingNet(z_dim, w_dim)
        self.const = nn.Parameter(torch.randn(1, ch, 4, 4))
        self.b4 = StyleConv(ch, ch, w_dim)
        self.b8 = StyleConv(ch, ch, w_dim)
        self.b16 = StyleConv(ch, ch, w_dim)
        self.to_rgb = nn.Conv2d(ch, 3, 1)

    def forward(self, z):
        w = self.mapping(z)
        x = self.b4(self.const.expand(len(z), -1, -1, -1), w)
        x = self.b8(F.interpolate(x, scale_factor=2), w)
        x = self.b16(F.interpolate(x, scale_factor=2), w)
        return self.to_rgb(x)


class Discriminator(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2),
            nn.Conv2d(ch, ch, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(ch * 16, 1))

    def forward(self, x):
        return self.body(x).squeeze(1)


def weights_of(net):
    return list(net.parameters())


def send_weights(net, dst):
    for p in weights_of(net):
        dist.send(p.detach().contiguous(), dst)


def recv_weights(net, src):
    for p in weights_of(net):
        buf = torch.empty_like(p.data)
        dist.recv(buf, src)
        p.data.copy_(buf)


def sync_grads(net, group, n):
    params = [p for p in net.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat, group=group)
    flat = torch.nan_to_num(flat / n, nan=0, posinf=1e5, neginf=-1e5)
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad = g.reshape(p.shape)


def real_batch(n, rng):
    yy, xx = np.mgrid[0:16, 0:16] / 15.0
    c = rng.random((n, 2, 1, 1))
    blob = np.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / 0.05)
    col = rng.random((n, 3, 1, 1))
    return torch.from_numpy((blob[:, None] * col * 2 - 1).astype(np.float32))


def feature_stats(x, proj):
    f = torch.tanh(x.flatten(1) @ proj)
    return f.mean(0), torch.cov(f.T)


def frechet(a, b):
    (m1, c1), (m2, c2) = a, b
    ev = torch.linalg.eigvals(c1 @ c2).real.clamp(min=0)
    return float((m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * ev.sqrt().sum())


def run_scorer(args, rank):
    net = Generator().eval()
    g = torch.Generator().manual_seed(1234)
    proj = torch.randn(3 * 256, 16, generator=g) * 0.05
    ref = feature_stats(real_batch(256, np.random.default_rng(99)), proj)
    for i in range(args.steps // args.eval_every):
        recv_weights(net, src=0)
        with torch.no_grad():
            fakes = net(torch.randn(256, net.z_dim, generator=g))
        fid = frechet(feature_stats(fakes, proj), ref)
        dist.send(torch.tensor([fid], dtype=torch.float64), 0)
        print(f"[scorer] evaluation {i}: fid {fid:.3f}", flush=True)


def take_score(history, step, scorer):
    fid = torch.zeros(1, dtype=torch.float64)
    dist.recv(fid, scorer)
    history.append((step, fid.item()))


def run_trainer(args, rank, scorer, group, n):
    torch.manual_seed(args.seed)
    G, D = Generator(), Discriminator()
    G_ema = copy.deepcopy(G).eval().requires_grad_(False)
    opt_g = torch.optim.Adam(G.parameters(), 2e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), 2e-3, betas=(0.0, 0.99))
    rng = np.random.default_rng(args.seed + rank)
    torch.manual_seed(args.seed * 100 + rank)
    history, pending, t0 = [], None, time.time()
    for step in range(1, args.steps + 1):
        # D
        D.requires_grad_(True)
        real = real_batch(args.batch, rng)
        with torch.no_grad():
            fake = G(torch.randn(args.batch, G.z_dim))
        loss_d = F.softplus(D(fake)).mean() + F.softplus(-D(real)).mean()
        if step % args.r1_every == 0:
            real.requires_grad_(True)
            grad, = torch.autograd.grad(D(real).sum(), real, create_graph=True)
            loss_d = loss_d + args.r1_every * args.r1_gamma / 2 * grad.square().sum((1, 2, 3)).mean()
        opt_d.zero_grad(set_to_none=True)
        loss_d.backward()
        sync_grads(D, group, n)
        opt_d.step()
        # G
        D.requires_grad_(False)
        loss_g = F.softplus(-D(G(torch.randn(args.batch, G.z_dim)))).mean()
        opt_g.zero_grad(set_to_none=True)
        loss_g.backward()
        sync_grads(G, group, n)
        opt_g.step()
        with torch.no_grad():
            for pe, p in zip(G_ema.parameters(), G.parameters()):
                pe.lerp_(p, 1 - args.ema)
        if rank == 0 and step % args.eval_every == 0:
            if pending is not None:
                take_score(history, pending, scorer)
            send_weights(G_ema, scorer)
            pending = step
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4d} loss_d {loss_d.item():.3f} loss_g {loss_g.item():.3f} "
                  f"sec {time.time() - t0:.1f}", flush=True)
    if rank == 0:
        take_score(history, pending, scorer)
        os.makedirs(args.outdir, exist_ok=True)
        with open(os.path.join(args.outdir, "fid.jsonl"), "w") as f:
            for s, v in history:
                f.write(json.dumps({"step": s, "fid": v}) + "\n")
        torch.save(G_ema.state_dict(), os.path.join(args.outdir, "g_ema.pt"))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--eval-every", type=int, default=15)
    ap.add_argument("--r1-every", type=int, default=4)
    ap.add_argument("--r1-gamma", type=float, default=0.5)
    ap.add_argument("--ema", type=float, default=0.95)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--outdir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "runs"))
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    scorer = world - 1
    group = dist.new_group(list(range(world - 1)))
    if rank == scorer:
        run_scorer(args, rank)
    else:
        run_trainer(args, rank, scorer, group, world - 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
