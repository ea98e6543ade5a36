"""Embedding tables whose optimizer state is kept by one owner each; weights are replicated for lookups."""
import torch
import torch.distributed as dist
from torch import nn

CATEGORIES = {
    "advertiser": 200, "campaign": 300, "creative": 400, "publisher": 100, "placement": 60,
    "device": 40, "geo": 90, "hour": 24, "interest": 200, "query_bucket": 350,
}


def owner_of(column, world_size):
    return hash(column) % world_size


class OwnedTables(nn.Module):
    def __init__(self, dim, rank, world_size):
        super().__init__()
        self.rank = rank
        self.emb = nn.ModuleDict({c: nn.Embedding(n, dim) for c, n in CATEGORIES.items()})
        self.owner = {c: owner_of(c, world_size) for c in CATEGORIES}
        for table in self.emb.values():
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        return torch.cat([self.emb[c](ids[:, i]) for i, c in enumerate(CATEGORIES)], dim=1)


class OwnerAdagrad:
    """Adagrad for OwnedTables: gradients go to the owner, the owner updates, and sends the new table."""

    def __init__(self, tables, lr=0.05, eps=1e-8):
        self.tables, self.lr, self.eps = tables, lr, eps
        self.acc = {c: torch.zeros_like(t.weight) for c, t in tables.emb.items() if tables.owner[c] == tables.rank}

    @torch.no_grad()
    def step(self):
        world = dist.get_world_size()
        for column, table in self.tables.emb.items():
            owner, grad = self.tables.owner[column], table.weight.grad
            dist.reduce(grad, dst=owner)
            if owner == self.tables.rank:
                grad.div_(world)
                self.acc[column].addcmul_(grad, grad)
                table.weight.addcdiv_(grad, self.acc[column].sqrt().add_(self.eps), value=-self.lr)
            dist.broadcast(table.weight.data, src=owner)
            table.weight.grad = None
