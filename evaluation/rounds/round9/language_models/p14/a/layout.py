from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Layout:
    """Ranks as a grid: rows exchange tokens (one expert per column), columns hold copies of an expert."""

    ep_size: int
    ep_group: object
    expert_dp_group: object
    ep_rank: int


def build(ep_size):
    world, rank = dist.get_world_size(), dist.get_rank()
    ep_group = expert_dp_group = None
    for row in range(world // ep_size):
        ranks = list(range(row * ep_size, (row + 1) * ep_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            ep_group = group
    for column in range(ep_size):
        ranks = list(range(column, world, ep_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            expert_dp_group = group
    return Layout(ep_size, ep_group, expert_dp_group, rank % ep_size)
