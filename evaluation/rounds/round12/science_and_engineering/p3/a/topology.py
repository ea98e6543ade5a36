from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Cell:
    """A few ranks which train one trial together."""
    index: int
    member: int
    size: int
    leader: int
    group: object

    @property
    def is_leader(self):
        return self.member == 0


def carve_cells(size):
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % size:
        raise ValueError(f"{world} ranks do not divide into cells of {size}")
    mine = None
    for c in range(world // size):
        ranks = list(range(c * size, (c + 1) * size))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = Cell(index=c, member=rank - ranks[0], size=size, leader=ranks[0], group=group)
    return mine
