import torch
import torch.distributed as dist
import torch.nn as nn

from .metrics import PsnrMeter


def make_stage(rank, world, width):
    def conv(i, o):
        return nn.Conv2d(i, o, 3, padding=1)

    if rank == 0:
        return nn.Sequential(conv(1, width), nn.ReLU(), conv(width, width))
    if rank == world - 1:
        return nn.Sequential(nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, 1))
    return nn.Sequential(nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, width))


class Stage:
    def __init__(self, module, rank, world, width, size):
        self.module, self.rank = module, rank
        self.first, self.last = rank == 0, rank == world - 1
        self.width, self.size = width, size
        self.stash = []
        self.psnr = PsnrMeter()

    def forward(self, inputs):
        n = inputs.shape[0]
        if self.first:
            x = inputs
        else:
            x = torch.empty(n, self.width, self.size, self.size)
            dist.recv(x, self.rank - 1)
            x.requires_grad_(True)
        y = self.module(x)
        self.stash.append((x, y))
        if not self.last:
            dist.send(y.detach().contiguous(), self.rank + 1)

    def backward(self, target, chunks):
        x, y = self.stash.pop()
        loss = None
        if self.last:
            loss = (y - target).pow(2).mean() / chunks
            loss.backward()
            self.psnr.update(y.detach(), target)
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, self.rank + 1)
            y.backward(grad)
        if not self.first:
            dist.send(x.grad.contiguous(), self.rank - 1)
        return 0.0 if loss is None else loss.item()
