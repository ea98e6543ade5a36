import torch
import torch.distributed as dist


class FederatedAverage:
    """Sample-weighted mean of the client models; traffic is kept in single precision."""

    def __init__(self, model, samples, wire_dtype=torch.float32):
        self.model = model
        self.wire_dtype = wire_dtype
        total = torch.tensor([float(samples)])
        dist.all_reduce(total)
        self.weight = samples / float(total)

    @torch.no_grad()
    def broadcast(self, src=0):
        for p in self.model.parameters():
            dist.broadcast(p.data, src=src)

    @torch.no_grad()
    def merge(self):
        sent = 0
        for p in self.model.parameters():
            wire = p.data.to(self.wire_dtype)
            wire.mul_(self.weight)
            dist.all_reduce(wire)
            sent += wire.numel() * wire.element_size()
        return sent
