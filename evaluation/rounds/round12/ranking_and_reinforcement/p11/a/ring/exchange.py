import torch
import torch.distributed as dist


class RingExchange:
    """Passes item embeddings round the ring, without autograd."""

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.sent = 0

    def neighbour(self, tensor, hop):
        """Our tensor goes `hop` places on; the one from `hop` places back
        comes to us."""
        dst = (self.rank + hop) % self.world
        src = (self.rank - hop) % self.world
        theirs = torch.empty_like(tensor)
        ops = [
            dist.P2POp(dist.isend, tensor, dst),
            dist.P2POp(dist.irecv, theirs, src),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self.sent += tensor.numel()
        return theirs

    def collect(self, tensor, hops):
        tensor = tensor.detach().contiguous()
        return [self.neighbour(tensor, hop) for hop in hops]
