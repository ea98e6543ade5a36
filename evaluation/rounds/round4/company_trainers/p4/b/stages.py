import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.a(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.b(x))


class Stage:
    """One pipeline stage. GPipe order: all forwards, then all backwards."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.first, self.last = self.index == 0, self.index == self.count - 1
        width = cfg["width"]
        self.embed = nn.Embedding(cfg["vocab"], width) if self.first else nn.Identity()
        self.body = nn.Sequential(*[Block(width) for _ in range(cfg["blocks"][self.index])])
        self.head = nn.Linear(width, cfg["vocab"]) if self.last else nn.Identity()
        self.module = nn.ModuleList([self.embed, self.body, self.head])
        self.shape = (cfg["micro_size"], cfg["context"], width)

    def parameters(self):
        return self.module.parameters()

    # transport
    def _receive(self, peer):
        buf = torch.empty(self.shape)
        dist.recv(buf, src=peer)
        return buf

    def _send(self, tensor, peer):
        dist.send(tensor.detach().contiguous(), dst=peer)

    # compute
    def forward(self, x):
        return self.head(self.body(self.embed(x)))

    def feed(self, batch):
        """What goes into this stage, one item per micro batch: (input, target)."""
        inputs, targets = batch
        if self.first:
            for piece in inputs.split(self.cfg["micro_size"]):
                yield piece, None
        elif self.last:
            for piece in targets.split(self.cfg["micro_size"]):
                yield self._receive(self.index - 1).requires_grad_(), piece
        else:
            for _ in range(self.cfg["accum"]):
                yield self._receive(self.index - 1).requires_grad_(), None

    def run_batch(self, batch, smoothing):
        pending, total = [], 0.0
        for x, target in self.feed(batch):
            y = self.forward(x)
            if self.last:
                y = F.cross_entropy(y.flatten(0, 1), target.flatten(), label_smoothing=smoothing)
                y = y / self.cfg["accum"]
                total += y.item()
            else:
                self._send(y, self.index + 1)
            pending.append((x, y))
        for x, y in pending:
            if self.last:
                y.backward()
            else:
                y.backward(self._receive(self.index + 1))
            if not self.first:
                self._send(x.grad, self.index - 1)
        return total
