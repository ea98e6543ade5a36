import torch.distributed as dist


class Topology:
    """Splits the world into consecutive blocks; negatives are shared inside a block."""

    def __init__(self, block):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.world % block:
            raise ValueError(f"world size {self.world} is not a multiple of {block}")
        self.block = block
        self.groups = []
        for start in range(0, self.world, block):
            self.groups.append(dist.new_group(list(range(start, start + block))))

    @property
    def block_id(self):
        return self.rank % len(self.groups)

    @property
    def group(self):
        return self.groups[self.block_id]

    @property
    def slot(self):
        return self.rank % self.block
