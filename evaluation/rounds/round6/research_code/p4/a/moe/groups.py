from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Groups:
    ep: dist.ProcessGroup
    dp: dist.ProcessGroup
    ep_ranks: list
    dp_ranks: list


def build(ep_size):
    """Expert-parallel groups are neighbours, data-parallel groups hold the same experts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % ep_size == 0
    mine = {}
    for start in range(0, world, ep_size):
        ranks = list(range(start, start + ep_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine["ep"], mine["ep_ranks"] = group, ranks
    for offset in range(ep_size):
        ranks = list(range(offset, world, ep_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine["dp"], mine["dp_ranks"] = group, ranks
    return Groups(**mine)
