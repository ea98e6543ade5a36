import argparse
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from data import VOCAB, CaptionedImages
from model import TinyCLIP, info_nce

log = logging.getLogger("clip")


class Meter:
    def __init__(self):
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, loss, hits, n):
        self.sums += torch.tensor([float(loss) * n, float(hits), n], dtype=torch.float64)

    def reduce(self):
        total = self.sums.clone()
        dist.all_reduce(total)
        return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def train_epoch(model, loader, opt):
    meter = Meter()
    model.train()
    for image, ids in loader:
        v, t, scale = model(image, ids)
        loss, hits = info_nce(v, t, scale)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        meter.add(loss.detach(), hits, len(image))
    return meter.reduce()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--manifest-size", type=int, default=900)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=11)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s %(message)s")
    torch.manual_seed(args.seed)

    data = CaptionedImages(args.manifest_size, args.seed, rank, world)
    order = torch.Generator().manual_seed(args.seed + rank)
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, generator=order)
    model = DDP(TinyCLIP(len(VOCAB) + 1))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    log.info("%d pairs per rank, %d steps per epoch", len(data), len(loader))

    for epoch in range(args.epochs):
        loss, acc = train_epoch(model, loader, opt)
        log.info("epoch %d loss %.4f retrieval@1 %.3f", epoch, loss, acc)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
