"""Segmentation with a sharded (FSDP2) encoder-decoder and periodic full checkpoints."""
import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from scenes import scene_batch


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, dim * 2)
        self.fc2 = nn.Linear(dim * 2, dim)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class PatchSegmenter(nn.Module):
    def __init__(self, patch=4, dim=32, depth=3, classes=3):
        super().__init__()
        self.patch, self.classes = patch, classes
        self.embed = nn.Linear(patch * patch, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes * patch * patch)

    def forward(self, img):
        n, h, w = img.shape
        p = self.patch
        x = img.view(n, h // p, p, w // p, p).permute(0, 1, 3, 2, 4).reshape(n, -1, p * p)
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        x = self.head(x).view(n, h // p, w // p, self.classes, p, p)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(n, self.classes, h, w)


def build(mesh):
    model = PatchSegmenter()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def validate(model, rank):
    model.eval()
    img, mask = scene_batch(9000 + rank, 8)
    pred = model(img).argmax(1)
    inter = torch.tensor([((pred == c) & (mask == c)).sum() for c in range(3)], dtype=torch.float)
    union = torch.tensor([((pred == c) | (mask == c)).sum() for c in range(3)], dtype=torch.float)
    both = torch.stack([inter, union])
    dist.all_reduce(both)
    model.train()
    return (both[0] / both[1].clamp(min=1)).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--val-every", type=int, default=10)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    mesh = init_device_mesh("cpu", (world,))
    model = build(mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)

    folder = [tempfile.mkdtemp(prefix="seg_") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    saver = Checkpointer(folder[0], rank)

    for step in range(1, args.steps + 1):
        img, mask = scene_batch(step * world + rank, 4)
        loss = F.cross_entropy(model(img), mask)
        loss.backward()
        opt.step()
        opt.zero_grad()

        if step % args.val_every == 0:
            miou = validate(model, rank)
            saved = saver.maybe_save(model, step, miou)
            dist.barrier()
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} miou {miou:.4f} saved {saved}", flush=True)

    dist.barrier()
    if rank == 0:
        print("files", sorted(os.listdir(folder[0])), flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
