from dataclasses import dataclass

import torch.distributed as dist

TOWERS = ("image", "text")


@dataclass
class Topology:
    """Which tower a rank trains, with whom it shares gradients and who is
    its partner in the other tower."""
    rank: int
    tower: str
    replica: int
    dp_group: object
    partner: int


def build_topology():
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = world // len(TOWERS)
    tower, replica = divmod(rank, replicas)
    dp_group = None
    for t in range(len(TOWERS)):
        members = [t * replicas + r for r in range(replicas)]
        group = dist.new_group(members)
        if rank in members:
            dp_group = group
    other = (tower + 1) % len(TOWERS)
    return Topology(rank, TOWERS[tower], replica, dp_group, other * replicas + replica)
