"""Row halos between latitude slabs, differentiable."""
import torch
import torch.distributed as dist


class Slab:
    """Where this rank sits in the 1-D decomposition (south -> north)."""

    NORTHWARD, SOUTHWARD = 11, 12

    def __init__(self, rank, size, nlat):
        assert nlat % size == 0
        self.rank, self.size = rank, size
        self.south = rank - 1 if rank > 0 else None
        self.north = rank + 1 if rank < size - 1 else None
        self.rows = nlat // size
        self.lo = rank * self.rows
        self.hi = self.lo + self.rows


def _swap(to_south, to_north, slab):
    """Send one strip each way, return (from_south, from_north); zeros at the poles."""
    from_south, from_north = torch.zeros_like(to_south), torch.zeros_like(to_north)
    reqs = []
    if slab.south is not None:
        reqs.append(dist.irecv(from_south, slab.south, tag=Slab.NORTHWARD))
        reqs.append(dist.isend(to_south, slab.south, tag=Slab.SOUTHWARD))
    if slab.north is not None:
        reqs.append(dist.irecv(from_north, slab.north, tag=Slab.SOUTHWARD))
        reqs.append(dist.isend(to_north, slab.north, tag=Slab.NORTHWARD))
    for r in reqs:
        r.wait()
    return from_south, from_north


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slab, w):
        ctx.slab, ctx.w = slab, w
        lo, hi = _swap(x[..., :w, :].contiguous(), x[..., -w:, :].contiguous(), slab)
        return torch.cat([lo, x, hi], dim=-2)

    @staticmethod
    def backward(ctx, g):
        w = ctx.w
        lo, hi = _swap(g[..., :w, :].contiguous(), g[..., -w:, :].contiguous(), ctx.slab)
        gx = g[..., w:-w, :].clone()
        gx[..., :w, :] += lo
        gx[..., -w:, :] += hi
        return gx, None, None


def exchange(x, slab, width=1):
    return _Exchange.apply(x, slab, width)
