"""A one-stage detector on synthetic scenes with any number of boxes per image."""
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from detect.data import Scenes, collate
from detect.head import GridDetector
from detect.losses import DetectionLoss


def run(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = Scenes(args.images, args.size, args.seed, augment=True)
    sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=True, seed=args.seed)
    loader = torch.utils.data.DataLoader(data, args.batch, sampler=sampler, collate_fn=collate)
    net = DDP(GridDetector(args.size, cells=4))
    criterion = DetectionLoss(cells=4)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for images, boxes in loader:
            loss, parts = criterion(net(images), boxes)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            sched.step()
            meter += torch.tensor([parts["total"], 1.0])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: {meter[0] / meter[1]:.4f} lr {sched.get_last_lr()[0]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--images", type=int, default=48)
    p.add_argument("--size", type=int, default=32)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--seed", type=int, default=11)
    run(p.parse_args())
