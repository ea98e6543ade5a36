import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def is_primary():
    return dist.get_rank() == 0


def all_reduce(t):
    if dist.get_world_size() > 1:
        dist.all_reduce(t)
    return t


class Quantize(nn.Module):
    """Codebook learned by moving averages, with restarts of codes nobody uses."""

    def __init__(self, dim, n_embed, decay=0.9, eps=1e-5, restart_below=0.5):
        super().__init__()
        self.dim, self.n_embed = dim, n_embed
        self.decay, self.eps, self.restart_below = decay, eps, restart_below
        embed = torch.randn(n_embed, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(n_embed))
        self.register_buffer("embed_avg", embed.clone())
        self.restarts = 0

    def forward(self, x):
        flat = x.reshape(-1, self.dim)
        d2 = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
        ind = d2.argmin(1)
        quant = F.embedding(ind, self.embed).view_as(x)
        if self.training:
            self.update(flat.detach(), ind)
        diff = (quant.detach() - x).pow(2).mean()
        return x + (quant - x).detach(), diff, ind.view(*x.shape[:-1])

    @torch.no_grad()
    def update(self, flat, ind):
        onehot = F.one_hot(ind, self.n_embed).type(flat.dtype)
        count = all_reduce(onehot.sum(0))
        total = all_reduce(onehot.t() @ flat)
        self.cluster_size.mul_(self.decay).add_(count, alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(total, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
        self.embed.copy_(self.embed_avg / size.unsqueeze(1))
        self.restart(flat)

    def restart(self, flat):
        idle = self.cluster_size < self.restart_below
        if not idle.any():
            return
        pick = torch.randint(0, len(flat), (int(idle.sum()),))
        fresh = flat[pick]
        self.embed[idle] = fresh
        self.embed_avg[idle] = fresh
        self.cluster_size[idle] = 1.0
        self.restarts += int(idle.sum())


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Sequential(nn.ReLU(), nn.Conv2d(c, c // 2, 3, padding=1), nn.ReLU(), nn.Conv2d(c // 2, c, 1))

    def forward(self, x):
        return x + self.conv(x)


class VQVAE(nn.Module):
    def __init__(self, c=32, embed_dim=8, n_embed=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, c, 4, 2, 1), nn.ReLU(), nn.Conv2d(c, c, 4, 2, 1), ResBlock(c),
                                 nn.Conv2d(c, embed_dim, 1))
        self.quantize = Quantize(embed_dim, n_embed)
        self.dec = nn.Sequential(nn.Conv2d(embed_dim, c, 3, padding=1), ResBlock(c), nn.ReLU(),
                                 nn.ConvTranspose2d(c, c, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(c, 3, 4, 2, 1))

    def forward(self, x):
        z = self.enc(x).permute(0, 2, 3, 1)
        q, diff, ids = self.quantize(z)
        return self.dec(q.permute(0, 3, 1, 2)), diff, ids


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    ramp = torch.linspace(0, 6.28, 32)
    f = torch.rand(n, 3, 2, generator=g) * 3
    x = torch.sin(f[..., 0, None, None] * ramp[:, None] + f[..., 1, None, None] * ramp[None, :])
    return x + 0.05 * torch.randn(x.shape, generator=g)


def train_epoch(epoch, loader, model, optimizer, scheduler, args):
    loader.sampler.set_epoch(epoch)
    mse_sum, mse_n = 0.0, 0
    for i, (img,) in enumerate(loader):
        model.zero_grad()
        out, latent_loss, _ = model(img)
        recon_loss = F.mse_loss(out, img)
        loss = recon_loss + args.latent_weight * latent_loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        mse_sum += recon_loss.item() * len(img)
        mse_n += len(img)
    part = all_reduce(torch.tensor([mse_sum, mse_n], dtype=torch.float64))
    if is_primary():
        print(f"epoch {epoch + 1}: mse {part[0] / part[1]:.5f} latent {latent_loss.item():.4f} "
              f"restarted {model.module.quantize.restarts} lr {optimizer.param_groups[0]['lr']:.5f}", flush=True)


@torch.no_grad()
def evaluate(model, images, args):
    model.eval()
    net = model.module
    rank, world = dist.get_rank(), dist.get_world_size()
    hist = torch.zeros(net.quantize.n_embed)
    err = torch.zeros(2, dtype=torch.float64)
    for x in images[rank::world].split(args.batch):
        out, _, ids = net(x)
        hist += torch.bincount(ids.flatten(), minlength=len(hist)).float()
        err += torch.tensor([(out - x).pow(2).sum().item(), x.numel()], dtype=torch.float64)
    all_reduce(hist)
    all_reduce(err)
    p = hist / hist.sum()
    perplexity = torch.exp(-(p * (p + 1e-10).log()).sum())
    if is_primary():
        print(f"held out: mse {err[0] / err[1]:.5f} perplexity {perplexity:.1f}", flush=True)
    model.train()


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = VQVAE()
    # the codebook keeps itself in step through its own reductions
    model = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(args.seed + dist.get_rank())
    data = TensorDataset(textures(args.images, 1))
    loader = DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data, shuffle=True), drop_last=True)
    held_out = textures(96, 2)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    os.makedirs(args.out, exist_ok=True)
    for epoch in range(args.epochs):
        train_epoch(epoch, loader, model, optimizer, scheduler, args)
        evaluate(model, held_out, args)
        if is_primary():
            torch.save(model.module.state_dict(), os.path.join(args.out, f"vqvae_{epoch + 1:03d}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--latent-weight", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoint"))
    main(parser.parse_args())
