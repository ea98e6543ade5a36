"""Point cloud of the cavity, refined towards the left wall, cut into vertical slabs."""
import torch
import torch.distributed as dist


def cavity_points(n, seed):
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, 2, generator=g)
    pts = torch.stack([u[:, 0] ** 6, u[:, 1] * 0.2], dim=1)
    return pts[pts[:, 0].argsort()]


def own_slab(points, rank, world):
    per = len(points) // world
    return points[rank * per:(rank + 1) * per].clone()


def interaction_radius(own, factor):
    """Edge length of the radius graph: a multiple of the mean nearest-neighbour spacing."""
    d = torch.cdist(own, own)
    d.fill_diagonal_(float("inf"))
    spacing = d.min(dim=1).values.mean()
    return float(factor * spacing)


def slab_extents(own):
    mine = torch.tensor([own[:, 0].min(), own[:, 0].max()])
    out = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(out, mine)
    return torch.stack(out)


def pressure_field(pts, t):
    x, y = pts[:, 0], pts[:, 1]
    return (torch.sin(9 * x - t) * torch.cos(12 * y + 0.5 * t)).unsqueeze(1)
