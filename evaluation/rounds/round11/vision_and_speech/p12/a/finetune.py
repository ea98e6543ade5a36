import argparse
import gc
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F

from model import Classifier
from shapes import augment, batch
from sync import GradientSync


def pretrain(path, steps, classes):
    gen = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    net = Classifier(classes)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        x, y = batch(gen, 32, classes)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save(net.state_dict(), path)


def load_pretrained(path, pre_classes):
    net = Classifier(pre_classes)
    net.load_state_dict(torch.load(path))
    return net


def prepare(args, path):
    """Model with a fresh head for the new task, ready for data parallel training."""
    net = load_pretrained(path, args.pre_classes)
    net.reset_head(args.classes)
    sync = GradientSync(net)
    head = list(net.head.parameters())
    body = list(net.backbone.parameters())
    opt = torch.optim.AdamW([{"params": body, "lr": args.lr * 0.3}, {"params": head, "lr": args.lr}])
    return net, sync, opt


@torch.no_grad()
def evaluate(ema, args, rank, world):
    gen = torch.Generator().manual_seed(5000 + rank)
    x, y = batch(gen, 128, args.classes)
    hits = (ema(x).argmax(1) == y).float().mean()
    dist.all_reduce(hits)
    return hits.item() / world


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--pre-steps", type=int, default=40)
    p.add_argument("--pre-classes", type=int, default=4)
    p.add_argument("--classes", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=12)
    p.add_argument("--lr", type=float, default=5e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="ft_") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "pretrained.pt")
    if rank == 0:
        pretrain(path, args.pre_steps, args.pre_classes)
    dist.barrier()

    torch.manual_seed(100 + rank)
    net, sync, opt = prepare(args, path)
    ema = copy.deepcopy(net).requires_grad_(False)
    gen = torch.Generator().manual_seed(200 + rank)
    for step in range(1, args.steps + 1):
        x, y = batch(gen, args.batch_size, args.classes)
        loss = F.cross_entropy(net(augment(x)), y)
        opt.zero_grad()
        loss.backward()
        sync.finish()
        opt.step()
        with torch.no_grad():
            for e, q in zip(ema.parameters(), net.parameters()):
                e.lerp_(q, 0.1)
        if step % 20 == 0:
            acc = evaluate(ema, args, rank, world)
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f} ema acc {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(ema.state_dict(), os.path.join(folder[0], "finetuned.pt"))
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
