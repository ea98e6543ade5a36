"""DDP with a rank-r gradient compressor (power iteration + error feedback).

The compressor is a DDP communication hook.  Every bucket is viewed as a near
square matrix M ~= P Q^T; only P and Q travel.  What the approximation loses
is kept and added to the next gradient of that bucket.
"""
import argparse
import contextlib
import logging
import math
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LowRankState:
    """What the hook has to remember between iterations."""

    def __init__(self, rank_r=2, start_iter=0):
        self.rank_r = rank_r
        self.start_iter = start_iter
        self.iteration = 0
        self.residual = {}
        self.q_memory = {}
        self.sent = 0
        self.dense = 0
        self.gen = torch.Generator().manual_seed(4242)

    def bump(self, bucket):
        if bucket.is_last():
            self.iteration += 1

    def ratio(self):
        return self.dense / max(1, self.sent)


def orthonormal(m, eps=1e-8):
    q, _ = torch.linalg.qr(m + eps * torch.ones_like(m))
    return q


def as_matrix(flat):
    rows = max(1, int(math.sqrt(flat.numel())))
    cols = math.ceil(flat.numel() / rows)
    padded = torch.zeros(rows * cols, dtype=flat.dtype)
    padded[:flat.numel()] = flat
    return padded.view(rows, cols)


def allreduce_mean(t):
    return dist.all_reduce(t.div_(dist.get_world_size()), async_op=True).get_future()


def lowrank_hook(state: LowRankState, bucket: dist.GradBucket):
    grad = bucket.buffer()
    state.dense += grad.numel()
    if state.iteration < state.start_iter:
        state.sent += grad.numel()
        state.bump(bucket)
        return allreduce_mean(grad).then(lambda f: f.value()[0])

    key = bucket.index()
    if key in state.residual:
        grad.add_(state.residual[key])
    mat = as_matrix(grad)
    if key not in state.q_memory:
        state.q_memory[key] = torch.randn(mat.shape[1], state.rank_r, generator=state.gen)
    q = orthonormal(state.q_memory[key])
    p = mat @ q
    dist.all_reduce(p.div_(dist.get_world_size()))
    p_hat = orthonormal(p)
    q_new = mat.t() @ p_hat
    state.sent += p.numel() + q_new.numel()

    def decompress(fut):
        q_mean = fut.value()[0]
        approx = (p_hat @ q_mean.t()).reshape(-1)[:grad.numel()]
        state.residual[key] = grad - approx
        state.q_memory[key] = q_mean
        grad.copy_(approx)
        return grad

    state.bump(bucket)
    return allreduce_mean(q_new).then(decompress)


class TwoTower(nn.Module):
    """Scores (user, item) pairs.  The scorer is shared by both losses."""

    def __init__(self, d_user=40, d_item=64, width=128):
        super().__init__()
        self.scorer = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))
        self.user = nn.Sequential(nn.Linear(d_user, width), nn.ReLU(), nn.Linear(width, width))
        self.item = nn.Sequential(nn.Linear(d_item, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, u, i):
        hu, hi = self.user(u), self.item(i)
        return self.scorer(torch.cat([hu * hi, hu - hi], -1)).squeeze(-1)


def synthetic(n, seed):
    g = torch.Generator().manual_seed(seed)
    u, i = torch.randn(n, 40, generator=g), torch.randn(n, 64, generator=g)
    y = ((u[:, :20] * i[:, :20]).sum(1) + u[:, 3] > 0).float()
    return TensorDataset(u, i, y)


@contextlib.contextmanager
def timed(name, sink):
    t = time.perf_counter()
    yield
    sink[name] = sink.get(name, 0.0) + time.perf_counter() - t


def run_epoch(ddp, loader, opt, clock, log, epoch):
    loss_fn = nn.BCEWithLogitsLoss()
    for n, (u, i, y) in enumerate(loader):
        with timed("forward", clock):
            loss = loss_fn(ddp(u, i), y)
        opt.zero_grad(set_to_none=False)
        with timed("backward", clock):
            loss.backward()
        opt.step()
        if n % 20 == 0:
            log.info("epoch %d batch %d loss %.4f", epoch, n, loss.item())


@torch.no_grad()
def auc_like(model, ds, rank, world):
    u, i, y = (t[rank::world] for t in ds.tensors)
    right = ((model(u, i) > 0).float() == y).sum()
    stats = torch.tensor([right.item(), len(y)], dtype=torch.float64)
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--approx-rank", type=int, default=4)
    ap.add_argument("--bucket-mb", type=float, default=0.12)
    ap.add_argument("--save", type=pathlib.Path, default=pathlib.Path("lowrank.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    log = logging.getLogger(os.path.basename(__file__))

    torch.manual_seed(0)
    net = TwoTower()
    ddp = DDP(net, bucket_cap_mb=args.bucket_mb)
    state = LowRankState(rank_r=args.approx_rank)
    ddp.register_comm_hook(state, lowrank_hook)
    opt = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)

    train, valid = synthetic(6000, 1), synthetic(1500, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=5)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)
    clock = {}
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        run_epoch(ddp, loader, opt, clock, log, epoch)
        acc = auc_like(net, valid, rank, world)
        log.info("epoch %d acc %.3f compression x%.1f", epoch, acc, state.ratio())
    log.info("time %s", {k: round(v, 2) for k, v in clock.items()})
    if rank == 0:
        torch.save({"model": net.state_dict(), "iteration": state.iteration}, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
