import torch
import torch.nn as nn

from gnn.halo import HaloCache


class SageLayer(nn.Module):
    def __init__(self, dim_in, dim_out, part, nodes, tolerance):
        super().__init__()
        self.own = nn.Linear(dim_in, dim_out)
        self.nbr = nn.Linear(dim_in, dim_out, bias=False)
        self.halo = HaloCache(part, nodes, tolerance)
        self.part = part

    def forward(self, h):
        table = self.halo.table(h)
        src, dst = self.part.edges
        col = torch.as_tensor(dst) - int(self.part.owned[0])
        agg = torch.zeros_like(h).index_add(0, col, table[torch.as_tensor(src)])
        deg = torch.bincount(col, minlength=h.shape[0]).clamp(min=1)[:, None]
        return self.own(h) + self.nbr(agg / deg)


class Sage(nn.Module):
    """Remote rows enter every layer as constants (historical embeddings, no gradient)."""

    def __init__(self, dims, part, nodes, tolerance=0.08):
        super().__init__()
        self.layers = nn.ModuleList(
            SageLayer(a, b, part, nodes, tolerance) for a, b in zip(dims[:-1], dims[1:])
        )

    def forward(self, h):
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i + 1 < len(self.layers):
                h = h.relu()
        return h
