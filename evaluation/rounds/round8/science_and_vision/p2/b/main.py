"""Land-cover segmentation on tiles that are decoded once and cached on disk."""
import json
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from seg.net import TinyUNet
from seg.tiles import IGNORE, TileDataset, write_raw_tiles

ROOT = pathlib.Path(__file__).resolve().parent
CFG = json.loads((ROOT / "config.json").read_text())


def prepare(rank):
    work = ROOT / "workdir"
    if rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        (work / "raw").mkdir(parents=True)
        (work / "cache").mkdir()
        write_raw_tiles(work / "raw", CFG["tiles"], CFG["size"], CFG["classes"], CFG["seed"])
    dist.barrier()
    return work


def run_epoch(net, opt, loader, classes):
    net.train()
    inter, union = torch.zeros(classes), torch.zeros(classes)
    total = torch.zeros(2)
    for image, mask in loader:
        logits = net(image)
        valid = mask != IGNORE
        loss = F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="sum")
        loss = loss / valid.sum().clamp(min=1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += torch.tensor([loss.item(), 1.0])
        pred = logits.argmax(1)
        for c in range(classes):
            p, m = (pred == c) & valid, (mask == c) & valid
            inter[c] += (p & m).sum()
            union[c] += (p | m).sum()
    return total, inter, union


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(CFG["seed"])
    work = prepare(rank)
    data = TileDataset(work, CFG["tiles"])
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=CFG["seed"])
    loader = DataLoader(data, batch_size=CFG["batch"], sampler=sampler, num_workers=1)
    net = DDP(TinyUNet(3, CFG["classes"]))
    opt = torch.optim.Adam(net.parameters(), lr=CFG["lr"])
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        total, inter, union = run_epoch(net, opt, loader, CFG["classes"])
        stats = torch.cat([total, inter, union])
        dist.all_reduce(stats)
        c = CFG["classes"]
        iou = stats[2:2 + c] / stats[2 + c:].clamp(min=1)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[1]:.3f} mIoU {iou.mean():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
