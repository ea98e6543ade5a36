import torch
import torch.distributed as dist


class HaloCache:
    """Remote rows of one layer's input; fetched again once the input has moved enough."""

    def __init__(self, part, nodes, tolerance):
        self.part = part
        self.nodes = nodes
        self.tolerance = tolerance
        self.first = int(part.owned[0])
        self.seen = None
        self.rows = {}
        self.fetches = 0

    def moved(self, h):
        if self.seen is None or self.seen.shape != h.shape:
            return True
        drift = (h - self.seen).norm() / self.seen.norm().clamp(min=1e-8)
        return drift.item() > self.tolerance

    def fetch(self, h):
        pending, rows = [], {}
        for peer, ids in self.part.recv.items():
            rows[peer] = h.new_empty(len(ids), h.shape[1])
            pending.append(dist.irecv(rows[peer], src=peer))
        for peer, ids in self.part.send.items():
            out = h[torch.as_tensor(ids) - self.first].contiguous()
            pending.append(dist.isend(out, dst=peer))
        for work in pending:
            work.wait()
        self.rows, self.seen = rows, h.clone()
        self.fetches += 1

    def table(self, h):
        detached = h.detach()
        if self.moved(detached):
            self.fetch(detached)
        out = h.new_zeros(self.nodes, h.shape[1])
        for peer, rows in self.rows.items():
            out[torch.as_tensor(self.part.recv[peer])] = rows
        local = torch.arange(self.first, self.first + h.shape[0])
        return out.index_copy(0, local, h)
