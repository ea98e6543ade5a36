import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Tower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        return self.net(x)


class Captioner(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.tower = Tower(dim)
        self.tok = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(2 * dim, dim), nn.Tanh())
        self.head = nn.Linear(dim, vocab)

    def forward(self, pics, ids):
        v = self.tower(pics).unsqueeze(1).expand(-1, ids.shape[1], -1)
        return self.head(self.mix(torch.cat([v, self.tok(ids)], -1)))


def build(vocab):
    net = Captioner(vocab)
    fully_shard(net.tower)
    fully_shard(net)
    return net
