import argparse
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def get_args():
    p = argparse.ArgumentParser("lightgcn")
    p.add_argument("--n_users", type=int, default=400)
    p.add_argument("--n_items", type=int, default=300)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--bs", type=int, default=256)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--reg", type=float, default=1e-4)
    p.add_argument("--topk", type=int, default=20)
    p.add_argument("--seed", type=int, default=2020)
    p.add_argument("--save_dir", default=None)
    return p.parse_args()


class Interactions(object):
    """Users and items in taste groups; one held out item per user."""

    def __init__(self, args):
        rng = np.random.default_rng(args.seed)
        groups = 8
        gu = rng.integers(0, groups, args.n_users)
        gi = rng.integers(0, groups, args.n_items)
        self.pos, self.test = [], []
        for u in range(args.n_users):
            p = np.where(gi == gu[u], 12.0, 1.0)
            items = rng.choice(args.n_items, size=21, replace=False, p=p / p.sum())
            self.pos.append(items[:-1])
            self.test.append(items[-1])
        self.users = np.repeat(np.arange(args.n_users), 20)
        self.items = np.concatenate(self.pos)
        self.pos_sets = [set(x.tolist()) for x in self.pos]
        self.n_users, self.n_items = args.n_users, args.n_items

    def norm_adj(self):
        n = self.n_users + self.n_items
        r = np.concatenate([self.users, self.items + self.n_users])
        c = np.concatenate([self.items + self.n_users, self.users])
        deg = np.bincount(r, minlength=n).clip(1)
        v = 1.0 / np.sqrt(deg[r] * deg[c])
        idx = torch.from_numpy(np.stack([r, c]))
        return torch.sparse_coo_tensor(idx, torch.from_numpy(v).float(), (n, n)).coalesce()

    def epoch(self, seed, rank, world):
        """BPR triples of this rank: (user, positive, sampled negative)."""
        order = np.random.default_rng(seed).permutation(len(self.users))
        n = len(order) // world * world
        mine = order[:n][rank::world]
        rng = np.random.default_rng(seed * 31 + rank)
        neg = rng.integers(0, self.n_items, len(mine))
        for k, row in enumerate(mine):
            while int(neg[k]) in self.pos_sets[self.users[row]]:
                neg[k] = rng.integers(0, self.n_items)
        return (torch.from_numpy(self.users[mine]), torch.from_numpy(self.items[mine]),
                torch.from_numpy(neg))


class LightGCN(nn.Module):
    def __init__(self, args, adj):
        super().__init__()
        self.n_users, self.n_layers, self.reg = args.n_users, args.layers, args.reg
        self.emb = nn.Embedding(args.n_users + args.n_items, args.dim)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.adj = adj

    def propagate(self):
        x = self.emb.weight
        acc = x
        for _ in range(self.n_layers):
            x = torch.sparse.mm(self.adj, x)
            acc = acc + x
        acc = acc / (self.n_layers + 1)
        return acc[:self.n_users], acc[self.n_users:]

    def bpr_loss(self, users, pos, neg):
        eu, ei = self.propagate()
        u, p, n = eu[users], ei[pos], ei[neg]
        rank_loss = F.softplus((u * n).sum(1) - (u * p).sum(1)).mean()
        w = self.emb.weight
        raw = w[users].pow(2).sum() + w[pos + self.n_users].pow(2).sum() + w[neg + self.n_users].pow(2).sum()
        return rank_loss + self.reg * raw / len(users)

    def forward(self, users, pos, neg):
        return self.bpr_loss(users, pos, neg)

    @torch.no_grad()
    def rate(self, users):
        eu, ei = self.propagate()
        return eu[users] @ ei.t()


def train_one_epoch(net, opt, data, args, epoch):
    users, pos, neg = data.epoch(args.seed + epoch, dist.get_rank(), dist.get_world_size())
    total, n = 0.0, 0
    for u, i, j in zip(users.split(args.bs), pos.split(args.bs), neg.split(args.bs)):
        loss = net.module.bpr_loss(u, i, j)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        n += 1
    return total / n


def recall(net, data, args):
    """Each rank rates its share of the users."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(rank, data.n_users, world)
    score = net.module.rate(mine)
    for row, u in enumerate(mine.tolist()):
        score[row, torch.from_numpy(data.pos[u])] = -1e9
    top = score.topk(args.topk, dim=1).indices
    hit = sum(data.test[u] in top[row].tolist() for row, u in enumerate(mine.tolist()))
    t = torch.tensor([hit, len(mine)], dtype=torch.float)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    args = get_args()
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    data = Interactions(args)
    net = DistributedDataParallel(LightGCN(args, data.norm_adj()))
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    save_dir = args.save_dir or os.path.join(
        tempfile.gettempdir(), "lightgcn_" + os.environ.get("MASTER_PORT", "0"))
    best = 0.0
    for epoch in range(args.epochs):
        tic = time.time()
        loss = train_one_epoch(net, opt, data, args, epoch)
        r = recall(net, data, args)
        if rank == 0:
            print("Epoch[%d/%d] loss=%.4f recall@%d=%.4f time=%.1fs"
                  % (epoch + 1, args.epochs, loss, args.topk, r, time.time() - tic), flush=True)
            if r > best:
                os.makedirs(save_dir, exist_ok=True)
                torch.save(net.module.state_dict(), os.path.join(save_dir, "best.pth.tar"))
        best = max(best, r)
    dist.barrier()
    if rank == 0:
        print("best recall %.4f" % best, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
