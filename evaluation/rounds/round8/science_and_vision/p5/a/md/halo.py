import torch
import torch.distributed as dist


class SlabHalo:
    """Periodic slabs along x; atoms near a face are copied to that neighbour."""

    def __init__(self, rank, world, box, reach, capacity):
        self.left, self.right = (rank - 1) % world, (rank + 1) % world
        self.lo, self.hi = rank * box / world, (rank + 1) * box / world
        self.shift_left = box if rank == 0 else 0.0
        self.shift_right = -box if rank == world - 1 else 0.0
        self.reach, self.capacity = reach, capacity

    def _pack(self, pos, mask, shift):
        buf = torch.full((self.capacity, 4), -1.0)
        chosen = pos[mask]
        buf[:len(chosen), :3] = chosen
        buf[:len(chosen), 0] += shift
        buf[:len(chosen), 3] = 1.0
        return buf

    def exchange(self, pos):
        to_left = self._pack(pos, pos[:, 0] < self.lo + self.reach, self.shift_left)
        to_right = self._pack(pos, pos[:, 0] > self.hi - self.reach, self.shift_right)
        from_left, from_right = torch.empty_like(to_left), torch.empty_like(to_right)
        ops = [
            dist.P2POp(dist.isend, to_left, self.left, tag=1),
            dist.P2POp(dist.isend, to_right, self.right, tag=2),
            dist.P2POp(dist.irecv, from_right, self.right, tag=1),
            dist.P2POp(dist.irecv, from_left, self.left, tag=2),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        both = torch.cat([from_left, from_right])
        return both[both[:, 3] > 0][:, :3]
