"""Aerial-image segmentation with the image height split over the ranks (spatial parallel)."""
import argparse
import gc

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def exchange_rows(top, bottom, rank, world):
    """Swap edge rows with the strip above and the strip below; zeros at the image border."""
    above, below = torch.zeros_like(top), torch.zeros_like(bottom)
    up = rank - 1 if rank > 0 else None
    down = rank + 1 if rank + 1 < world - 1 else None
    works = []
    if up is not None:
        works.append(dist.isend(top.contiguous(), up, tag=1))
        works.append(dist.irecv(above, up, tag=2))
    if down is not None:
        works.append(dist.isend(bottom.contiguous(), down, tag=2))
        works.append(dist.irecv(below, down, tag=1))
    for w in works:
        w.wait()
    return above, below


class HaloPad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, halo, rank, world):
        ctx.halo, ctx.rank, ctx.world = halo, rank, world
        above, below = exchange_rows(x[:, :, :halo], x[:, :, -halo:], rank, world)
        return torch.cat([above, x, below], dim=2)

    @staticmethod
    def backward(ctx, grad):
        h = ctx.halo
        inner = grad[:, :, h:-h].clone()
        above, below = exchange_rows(grad[:, :, :h], grad[:, :, -h:], ctx.rank, ctx.world)
        inner[:, :, :h] += above
        inner[:, :, -h:] += below
        return inner, None, None, None


class StripConv(nn.Module):
    def __init__(self, cin, cout, rank, world, dilation=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=(0, dilation), dilation=dilation)
        self.halo, self.rank, self.world = dilation, rank, world

    def forward(self, x):
        return self.conv(HaloPad.apply(x, self.halo, self.rank, self.world))


class StripNet(nn.Module):
    def __init__(self, rank, world, classes=3, width=8):
        super().__init__()
        self.c1 = StripConv(1, width, rank, world)
        self.c2 = StripConv(width, width, rank, world, dilation=2)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        return self.out(F.relu(self.c2(F.relu(self.c1(x)))))


def aerial(step, n, size):
    g = torch.Generator().manual_seed(500 + step)
    field = F.interpolate(torch.randn(n, 1, 4, 4, generator=g), size=(size, size), mode="bilinear")
    mask = torch.bucketize(field.squeeze(1), torch.tensor([-0.35, 0.35]))
    return field + 0.3 * torch.randn(field.shape, generator=g), mask


def strip(t, rank, world):
    return t.chunk(world, dim=-2)[rank].contiguous()


def sync_grads(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--size", type=int, default=24)
    ap.add_argument("--batch-size", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = StripNet(rank, world)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    pixels = args.batch_size * args.size * args.size
    for step in range(args.steps):
        img, mask = aerial(step, args.batch_size, args.size)
        logits = model(strip(img, rank, world))
        loss = F.cross_entropy(logits, strip(mask, rank, world), reduction="sum") / pixels
        opt.zero_grad()
        loss.backward()
        sync_grads(model)
        opt.step()
        if (step + 1) % 10 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item():.4f}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
