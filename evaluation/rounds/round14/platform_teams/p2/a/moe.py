import torch
import torch.distributed as dist
from torch import nn

from comm import Dispatch, exchange_counts


class Expert(nn.Module):
    def __init__(self, dim, seed):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(dim, 2 * dim, generator=gen) / dim ** 0.5)
        self.down = nn.Parameter(torch.randn(2 * dim, dim, generator=gen) / (2 * dim) ** 0.5)

    def forward(self, x):
        return torch.relu(x @ self.up) @ self.down


class SwitchLayer(nn.Module):
    """Top-1 routing with one expert on each rank."""

    def __init__(self, dim, layer):
        super().__init__()
        self.world = dist.get_world_size()
        self.router = nn.Linear(dim, self.world, bias=False)
        self.expert = Expert(dim, seed=1000 * layer + dist.get_rank())
        self.load = torch.zeros(self.world, dtype=torch.long)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, choice = self.router(flat).softmax(-1).max(-1)
        order = torch.argsort(choice, stable=True)
        send = torch.bincount(choice, minlength=self.world)
        recv = exchange_counts(send)
        self.load += send
        send, recv = send.tolist(), recv.tolist()
        inbox = Dispatch.apply(flat[order], send, recv)
        outbox = self.expert(inbox)
        returned = Dispatch.apply(outbox, recv, send)
        restored = torch.empty_like(returned).index_copy(0, order, returned)
        return x + (weight.unsqueeze(-1) * restored).view_as(x)


class TinySwitch(nn.Module):
    def __init__(self, vocab, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(SwitchLayer(dim, i) for i in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers):
            x = layer(norm(x))
        return self.head(x)

    def split_parameters(self):
        local = [p for layer in self.layers for p in layer.expert.parameters()]
        ids = {id(p) for p in local}
        return [p for p in self.parameters() if id(p) not in ids], local
