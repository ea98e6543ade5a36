#!/usr/bin/env python
"""Deep kernel regression with a block-distributed kernel matrix.

The n x n kernel matrix lives on a P x P process grid, rank (i, j) holds K_ij.
Each outer iteration solves (K + s I) a = y with conjugate gradients and then
takes a gradient step on the feature map.  Ported from our mpi4py code.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist


class Communicator:
    def __init__(self, members, world_rank):
        self.members = members
        self.world_rank = world_rank
        self.rank = members.index(world_rank)
        self.size = len(members)

    def shift(self, t, disp=1):
        """MPI_Sendrecv along the ring: my block goes to rank + disp."""
        dst = self.members[(self.rank + disp) % self.size]
        src = self.members[(self.rank - disp) % self.size]
        t = t.contiguous()
        buf = torch.empty_like(t)
        if self.rank % 2 == 0:
            dist.send(t, dst)
            dist.recv(buf, src)
        else:
            dist.recv(buf, src)
            dist.send(t, dst)
        return buf

    def ring_sum(self, t):
        acc, buf = t.clone(), t
        for _ in range(self.size - 1):
            buf = self.shift(buf)
            acc += buf
        return acc


class Grid:
    """Two-dimensional process grid with row and column communicators."""

    def __init__(self):
        self.world_rank = dist.get_rank()
        size = dist.get_world_size()
        self.p = math.isqrt(size)
        if self.p * self.p != size:
            raise SystemExit("needs a square number of processes")
        self.i, self.j = divmod(self.world_rank, self.p)
        self.row = Communicator([self.i * self.p + k for k in range(self.p)], self.world_rank)
        self.col = Communicator([k * self.p + self.j for k in range(self.p)], self.world_rank)

    def dot(self, u, v):
        """u, v distributed by rows (replicated along a row of the grid)."""
        s = (u * v).sum().double()
        dist.all_reduce(s)
        return s.item() / self.p

    def to_columns(self, u):
        """u_i on (i, *)  ->  u_j on (*, j); the diagonal owns the piece."""
        return self.col.ring_sum(u if self.i == self.j else torch.zeros_like(u))

    def root_print(self, *a):
        if self.world_rank == 0:
            print(*a, flush=True)


class FeatureMap(torch.nn.Sequential):
    def __init__(self, d, width, k):
        super().__init__(torch.nn.Linear(d, width), torch.nn.Tanh(), torch.nn.Linear(width, k))


def kernel(a, b):
    return torch.exp(-0.5 * torch.cdist(a, b).pow(2))


def matvec(grid, K, sigma, x):
    """Row-distributed x -> row-distributed (K + sigma I) x."""
    xj = grid.to_columns(x)
    return grid.row.ring_sum(K @ xj) + sigma * x


def cg(grid, K, sigma, b, tol, maxit):
    x = torch.zeros_like(b)
    r = b.clone()
    p = r.clone()
    rr = grid.dot(r, r)
    stop = tol * tol * rr
    for it in range(maxit):
        if rr < stop:
            break
        q = matvec(grid, K, sigma, p)
        alpha = rr / grid.dot(p, q)
        x += alpha * p
        r -= alpha * q
        new = grid.dot(r, r)
        p = r + (new / rr) * p
        rr = new
    return x, it, math.sqrt(rr)


def target(x):
    return (torch.sin(3 * x[:, 0]) * x[:, 1] + 0.5 * x[:, 2].pow(2)).float()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("-n", type=int, default=400)
    ap.add_argument("--dim", type=int, default=3)
    ap.add_argument("--outer", type=int, default=5)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--tol", type=float, default=1e-3)
    ap.add_argument("--maxit", type=int, default=60)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--model", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernel.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    grid = Grid()
    torch.manual_seed(7)
    X = torch.rand(args.n, args.dim) * 2 - 1
    y = target(X)
    blocks = torch.arange(args.n).chunk(grid.p)
    rows, cols = blocks[grid.i], blocks[grid.j]
    phi = FeatureMap(args.dim, 24, 6)
    opt = torch.optim.Adam(phi.parameters(), lr=args.lr)
    dist.barrier()
    grid.root_print(f"grid {grid.p} x {grid.p}, blocks of {len(rows)}")

    for outer in range(args.outer):
        K = kernel(phi(X[rows]), phi(X[cols]))
        with torch.no_grad():
            ai, its, res = cg(grid, K.detach(), args.sigma, y[rows], args.tol, args.maxit)
            aj = grid.to_columns(ai)
        # d/dtheta of  y^T (K + sI)^-1 y  is  -a^T dK a
        obj = -(ai @ K @ aj)
        opt.zero_grad()
        obj.backward()
        for prm in phi.parameters():
            dist.all_reduce(prm.grad)
            prm.grad /= args.n
        opt.step()
        fit = grid.dot(ai, y[rows])
        grid.root_print(f"outer {outer:3d}  cg {its:3d}  res {res:.2e}  y'K^-1y {fit:.3f}")

    if grid.world_rank == 0:
        torch.save({"phi": phi.state_dict(), "alpha0": ai}, args.model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
