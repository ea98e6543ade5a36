import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        ctx = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        return x + self.fc2(torch.relu(self.fc1(self.norm(ctx))))


class LM(nn.Module):
    def __init__(self, vocab=64, width=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.out(x)


def build(seed):
    torch.manual_seed(seed)
    model = LM()
    for b in model.blocks:
        fully_shard(b)
    return fully_shard(model)
