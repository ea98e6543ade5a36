"""
Residual-quantised item codes ("semantic ids") for generative retrieval.

encoder/decoder: DDP.  codebooks: EMA k-means, every rank keeps a copy and updates it
with the summed statistics, so no broadcast is needed during training.  Codes that
nobody uses any more are re-seeded with residuals of the current (global) batch.
"""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--items", type=int, default=3000)
    p.add_argument("--content-dim", type=int, default=64)
    p.add_argument("--latent", type=int, default=16)
    p.add_argument("--levels", type=int, default=3)
    p.add_argument("--codes", type=int, default=32)
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch", type=int, default=100)
    p.add_argument("--decay", type=float, default=0.95)
    p.add_argument("--reseed-every", type=int, default=10)
    p.add_argument("--noise", type=float, default=0.1)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=21)
    return p.parse_args()


def make_catalogue(n, dim):
    g = torch.Generator().manual_seed(1)
    coarse = torch.randn(12, dim, generator=g) * 2
    fine = torch.randn(12, 8, dim, generator=g)
    a = torch.randint(12, (n,), generator=g)
    b = torch.randint(8, (n,), generator=g)
    return coarse[a] + fine[a, b] + 0.3 * torch.randn(n, dim, generator=g)


class AutoEncoder(nn.Module):
    def __init__(self, dim, latent):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, latent))
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x, quantise):
        z = self.enc(x)
        zq, codes, commit = quantise(z)
        return self.dec(z + (zq - z).detach()), codes, commit


class ResidualQuantiser:
    """not a module on purpose: nothing in here is touched by autograd or DDP"""

    def __init__(self, levels, codes, dim, decay, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.books = [torch.randn(codes, dim) * 0.5 for _ in range(levels)]
        for book in self.books:
            dist.broadcast(book, src=0)
        self.size = [torch.ones(codes) for _ in range(levels)]
        self.total = [book.clone() for book in self.books]
        self.decay, self.training, self.residuals = decay, True, []

    def __call__(self, z):
        left, out, codes, commit = z, torch.zeros_like(z), [], 0.0
        self.residuals = []
        for lvl, book in enumerate(self.books):
            idx = torch.cdist(left.detach(), book).argmin(1)
            q = book[idx]
            commit = commit + F.mse_loss(left, q)
            if self.training:
                self.residuals.append((left.detach(), idx))
            out, left = out + q, left - q
            codes.append(idx)
        return out, torch.stack(codes, 1), commit

    @torch.no_grad()
    def update(self):
        for lvl, (left, idx) in enumerate(self.residuals):
            hot = F.one_hot(idx, self.books[lvl].size(0)).to(left.dtype)
            stats = torch.cat([hot.sum(0)[:, None], hot.T @ left], dim=1)
            dist.all_reduce(stats)
            self.size[lvl].mul_(self.decay).add_(stats[:, 0], alpha=1 - self.decay)
            self.total[lvl].mul_(self.decay).add_(stats[:, 1:], alpha=1 - self.decay)
            self.books[lvl] = self.total[lvl] / self.size[lvl].clamp(min=1e-4)[:, None]

    @torch.no_grad()
    def reseed(self, threshold=0.3):
        n = 0
        for lvl, (left, _) in enumerate(self.residuals):
            parts = [torch.empty_like(left) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, left)
            pool = torch.cat(parts)
            dead = (self.size[lvl] < threshold).nonzero().squeeze(1)
            pick = torch.randperm(len(pool), generator=self.gen)[: len(dead)]
            self.books[lvl][dead] = pool[pick]
            self.total[lvl][dead] = pool[pick]
            self.size[lvl][dead] = 1.0
            n += len(dead)
        return n


@torch.no_grad()
def collisions(model, quant, x):
    """share of items that do not have an id of their own, and the reconstruction error"""
    quant.training = False
    recon, codes, _ = model(x, quant)
    quant.training = True
    _, counts = codes.unique(dim=0, return_counts=True)
    return 1.0 - (counts == 1).sum().item() / len(x), F.mse_loss(recon, x).item()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed = args.seed + rank  # different noise on every rank
    torch.manual_seed(seed)

    items = make_catalogue(args.items, args.content_dim)
    model = DDP(AutoEncoder(args.content_dim, args.latent))
    quant = ResidualQuantiser(args.levels, args.codes, args.latent, args.decay, seed=args.seed)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    step = 0
    for epoch in range(args.epochs):
        order = torch.randperm(args.items, generator=torch.Generator().manual_seed(epoch))
        order = order[: len(order) // (world * args.batch) * world * args.batch]
        reseeded, last = 0, 0.0
        for ids in order[rank::world].split(args.batch):
            x = items[ids]
            noisy = x + args.noise * torch.randn_like(x)
            recon, _, commit = model(noisy, quant)
            loss = F.mse_loss(recon, x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            quant.update()
            step += 1
            if step % args.reseed_every == 0:
                reseeded += quant.reseed()
            last = loss.item()
        if rank == 0:
            coll, err = collisions(model.module, quant, items)
            print(f"epoch {epoch} loss {last:.4f} recon {err:.4f} collisions {coll:.3f} reseeded {reseeded}", flush=True)

    dist.barrier()
    if rank == 0:
        with tempfile.TemporaryDirectory() as d:
            torch.save({"model": model.module.state_dict(), "books": quant.books}, os.path.join(d, "rq.pt"))
            print("saved", os.listdir(d))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
