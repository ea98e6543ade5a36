from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Topology:
    rank: int
    world: int
    island: int          # which island this worker is part of
    slot: int            # position inside of the island
    n_islands: int
    inner: dist.ProcessGroup   # all workers of my island
    outer: dist.ProcessGroup   # the workers at my position in all islands


def build_topology(island_size: int) -> Topology:
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % island_size:
        raise ValueError(f"world size {world} is no multiple of the island size {island_size}")
    n_islands = world // island_size
    island, slot = divmod(rank, island_size)

    # new_group is a collective over the world: every rank walks through all groups
    inner = outer = None
    for i in range(n_islands):
        g = dist.new_group(list(range(i * island_size, (i + 1) * island_size)))
        if i == island:
            inner = g
    for s in range(island_size):
        g = dist.new_group(list(range(s, world, island_size)))
        if s == slot:
            outer = g
    return Topology(rank, world, island, slot, n_islands, inner, outer)
