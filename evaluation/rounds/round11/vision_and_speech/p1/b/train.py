import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import data
from model import CenterDetector, detection_loss


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--min-side", type=int, default=4)
    return p.parse_args()


def train_epoch(model, loader, opt, gen_epoch):
    model.train()
    total, seen = 0.0, 0
    for img, heat, wh in loader:
        opt.zero_grad(set_to_none=True)
        ph, pw = model(img)
        loss = detection_loss(ph, pw, heat, wh)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        total += loss.item() * img.size(0)
        seen += img.size(0)
    return {"loss_sum": total, "images": seen, "epoch": gen_epoch}


def merge(stats):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, stats)
    images = sum(s["images"] for s in out)
    return sum(s["loss_sum"] for s in out) / images, images


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    folder = [tempfile.mkdtemp(prefix="det_") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "train.jsonl")
    if rank == 0:
        data.write_annotations(path)
    dist.barrier()

    dataset = data.load_split(path, rank, world, args.min_side)
    g = torch.Generator().manual_seed(100 + rank)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, generator=g, drop_last=True)

    model = DDP(CenterDetector(data.NUM_CLASSES))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        stats = train_epoch(model, loader, opt, epoch)
        loss, images = merge(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} images {images}", flush=True)

    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
