import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ImageTower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.proj = nn.Linear(48, width)
        self.blocks = nn.ModuleList(Block(width, 2 * width) for _ in range(depth))

    def forward(self, x):
        x = self.proj(x)
        for b in self.blocks:
            x = b(x)
        return x


class TextTower(nn.Module):
    def __init__(self, width, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.block = Block(width, 3 * width)

    def forward(self, ids):
        return self.block(self.emb(ids).mean(1))


class VLM(nn.Module):
    def __init__(self, width=32, vocab=40):
        super().__init__()
        self.image = ImageTower(width, depth=2)
        self.text = TextTower(width, vocab)
        self.head = nn.Linear(width, 8)

    def forward(self, kind, x):
        h = self.image(x) if kind == "image" else self.text(x)
        return self.head(h)


def shard(model):
    for b in model.image.blocks:
        fully_shard(b)
    fully_shard(model.image)
    fully_shard(model.text.block)
    fully_shard(model.text)
    fully_shard(model)
    return model
