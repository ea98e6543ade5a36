"""
A lane is a pair of ranks that trains one customer's adapter.
Customers bring different amounts of data, lanes meet only at the end of a round.
"""
import torch.distributed as dist


def lane_members(world, per_lane):
    n = world // per_lane
    return [list(range(k * per_lane, (k + 1) * per_lane)) for k in range(n)]


class Lane:
    def __init__(self, per_lane):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.group = None
        for members in lane_members(world, per_lane):
            group = dist.new_group(members)
            if rank in members:
                self.group, self.members = group, members
        self.size = per_lane
        self.position = rank % per_lane

    def mean(self, tensor):
        dist.all_reduce(tensor, group=self.group)
        return tensor.div_(self.size)
