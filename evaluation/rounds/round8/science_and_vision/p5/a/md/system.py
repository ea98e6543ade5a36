import torch


def initial_slab(atoms, box, rank, world, seed):
    gen = torch.Generator().manual_seed(seed + rank)
    pos = torch.rand(atoms, 3, generator=gen)
    pos[:, 0] = (rank + pos[:, 0]) * box / world
    pos[:, 1:] *= box / 2
    vel = 0.2 * torch.randn(atoms, 3, generator=gen)
    return pos, vel - vel.mean(0)


def pair_forces(pos, everyone, pairs, cutoff):
    i, j = pairs
    delta = pos[i] - everyone[j]
    r = delta.norm(dim=1).clamp(min=1e-3)
    strength = torch.where(r < cutoff, 4.0 * (1 - r / cutoff), torch.zeros_like(r))
    force = torch.zeros_like(pos)
    return force.index_add(0, i, strength[:, None] * delta / r[:, None])
