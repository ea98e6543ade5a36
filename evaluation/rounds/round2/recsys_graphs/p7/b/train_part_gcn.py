"""Full-graph GCN over a node partition.

Every rank owns a range of accounts and the follow edges that point at them.
Each epoch a random subset of the edges is kept; rows of accounts owned by
other ranks (the halo) are received right before a layer needs them.
"""
import argparse
import logging
from dataclasses import dataclass, field
from typing import Dict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

logger = logging.getLogger(__name__)


@dataclass
class Partition:
    lo: int
    hi: int
    x: torch.Tensor
    y: torch.Tensor
    src: torch.Tensor
    dst: torch.Tensor
    train: torch.Tensor


@dataclass
class HaloPlan:
    src: torch.Tensor  # positions in [own rows | halo rows]
    dst: torch.Tensor
    recv_ids: Dict[int, torch.Tensor] = field(default_factory=dict)
    send_ids: Dict[int, torch.Tensor] = field(default_factory=dict)


def load_partition(rank, world, per_rank, n_class, dim):
    g = torch.Generator().manual_seed(17)
    n = per_rank * world
    y = torch.randint(0, n_class, (n,), generator=g)
    centre = torch.randn(n_class, dim, generator=g)
    x = 0.5 * centre[y] + torch.randn(n, dim, generator=g)
    srcs, dsts = [], []
    for p in range(world):
        lo = p * per_rank
        m = per_rank * 12
        s = torch.randint(lo, lo + per_rank, (m,), generator=g)
        d = torch.randint(lo, lo + per_rank, (m,), generator=g)
        keep = (y[s] == y[d]) | (torch.rand(m, generator=g) < 0.2)
        srcs.append(s[keep])
        dsts.append(d[keep])
        for q in range(world):
            if q == p:
                continue
            # communities follow the next one a lot, the far ones hardly
            m = 160 if (p - q) % world == 1 else 14
            srcs.append(torch.randint(q * per_rank, (q + 1) * per_rank, (m,), generator=g))
            dsts.append(torch.randint(lo, lo + per_rank, (m,), generator=g))
    src, dst = torch.cat(srcs), torch.cat(dsts)
    lo, hi = rank * per_rank, (rank + 1) * per_rank
    mine = (dst >= lo) & (dst < hi)
    train = torch.rand(per_rank, generator=torch.Generator().manual_seed(rank)) < 0.6
    return Partition(lo, hi, x[lo:hi], y[lo:hi], src[mine], dst[mine], train)


def make_plan(part, keep_prob, gen, per_rank):
    rank, world = dist.get_rank(), dist.get_world_size()
    keep = torch.rand(len(part.src), generator=gen) < keep_prob
    src, dst = part.src[keep], part.dst[keep] - part.lo
    owner = src // per_rank
    plan = HaloPlan(src=src - part.lo, dst=dst)
    wanted, base = [None] * world, part.hi - part.lo
    for p in range(world):
        if p == rank:
            continue
        sel = owner == p
        ids, inv = src[sel].unique(return_inverse=True)
        plan.recv_ids[p] = ids - p * per_rank
        plan.src[sel] = base + inv
        base += len(ids)
        wanted[p] = plan.recv_ids[p].tolist()
    everyone = [None] * world
    dist.all_gather_object(everyone, wanted)
    for p in range(world):
        if p != rank:
            plan.send_ids[p] = torch.tensor(everyone[p][rank], dtype=torch.int64)
    return plan


def fetch_halo(h, plan):
    """Own rows followed by the halo rows, ordered by owner."""
    h = h.detach()
    ops, parts = [], []
    for p in sorted(plan.recv_ids):
        if plan.send_ids[p].numel() > 0:
            ops.append(dist.P2POp(dist.isend, h[plan.send_ids[p]], p))
        if plan.recv_ids[p].numel() > 0:
            buf = h.new_empty(plan.recv_ids[p].numel(), h.shape[1])
            ops.append(dist.P2POp(dist.irecv, buf, p))
            parts.append(buf)
    if ops:
        for r in dist.batch_isend_irecv(ops):
            r.wait()
    return torch.cat(parts) if parts else h.new_empty(0, h.shape[1])


class GCN(nn.Module):
    def __init__(self, dim, hid, n_class):
        super().__init__()
        self.a = nn.Linear(2 * dim, hid)
        self.b = nn.Linear(2 * hid, n_class)

    @staticmethod
    def gather(h, plan):
        full = torch.cat([h, fetch_halo(h, plan)])
        agg = torch.zeros_like(h).index_add(0, plan.dst, full[plan.src])
        deg = torch.zeros(len(h)).index_add(0, plan.dst, torch.ones(len(plan.dst))).clamp(min=1)
        return torch.cat([h, agg / deg.unsqueeze(1)], 1)

    def forward(self, x, plan):
        h = F.relu(self.a(self.gather(x, plan)))
        return self.b(self.gather(h, plan))


def sync_grads(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("--accounts", type=int, default=300, help="per rank")
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--keep", type=float, default=0.25)
    ap.add_argument("--hidden", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.02)
    cfg = ap.parse_args(argv)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    part = load_partition(rank, dist.get_world_size(), cfg.accounts, 5, 12)
    torch.manual_seed(0)
    model = GCN(12, cfg.hidden, 5)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    gen = torch.Generator().manual_seed(100 + rank)

    for epoch in range(cfg.epochs):
        plan = make_plan(part, cfg.keep, gen, cfg.accounts)
        logits = model(part.x, plan)
        loss = F.cross_entropy(logits[part.train], part.y[part.train])
        opt.zero_grad()
        loss.backward()
        sync_grads(model)
        opt.step()
        good = (logits.argmax(1) == part.y)[~part.train]
        t = torch.tensor([good.sum().item(), good.numel()], dtype=torch.float)
        dist.all_reduce(t)
        if epoch % 5 == 0 or epoch == cfg.epochs - 1:
            logger.info("epoch %d loss %.3f test acc %.3f", epoch, loss.item(), (t[0] / t[1]).item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
