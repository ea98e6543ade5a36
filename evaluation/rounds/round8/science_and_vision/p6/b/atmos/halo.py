import torch
import torch.distributed as dist


class HaloExchanger:
    """Rows of the bands to the north and south. Each exchange has its own tag,
    so that late messages can't be mistaken for those of a later exchange."""

    def __init__(self, rank, world, width):
        self.north = rank - 1 if rank > 0 else None
        self.south = rank + 1 if rank < world - 1 else None
        self.width = width
        self.sequence = 0

    def ticket(self):
        self.sequence += 1
        return self.sequence

    def pad(self, field):
        tag, w = self.ticket(), self.width
        top = field[..., :w, :].contiguous()
        bottom = field[..., -w:, :].contiguous()
        above, below = top.clone(), bottom.clone()
        work = []
        if self.north is not None:
            work.append(dist.irecv(above, self.north, tag=tag))
            work.append(dist.isend(top, self.north, tag=tag))
        if self.south is not None:
            work.append(dist.irecv(below, self.south, tag=tag))
            work.append(dist.isend(bottom, self.south, tag=tag))
        for w_ in work:
            w_.wait()
        return torch.cat([above, field, below], dim=-2)
