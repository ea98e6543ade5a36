import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from fw.callbacks import Callbacks, FlushAtEpochEnd, GlobalLoss, GradNorm
from fw.fm import FactorizationMachine
from fw.uploader import MetricUploader

FIELDS = [50, 30, 7, 12]


def make_epoch(steps, batch, gen):
    for _ in range(steps):
        x = torch.stack([torch.randint(n, (batch,), generator=gen) for n in FIELDS], 1)
        y = ((x[:, 0] % 7 == x[:, 2]) | (x[:, 1] % 12 == x[:, 3])).float()
        yield x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--runs", default="runs")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sink = None
    if rank == 0:
        if os.path.isdir(args.runs):
            shutil.rmtree(args.runs)
        sink = MetricUploader(args.runs)
    torch.manual_seed(1)
    model = DDP(FactorizationMachine(FIELDS, 8))
    gen = torch.Generator().manual_seed(100 + rank)
    callbacks = Callbacks(GradNorm(model, sink), GlobalLoss(sink), FlushAtEpochEnd(sink))

    step = 0
    for epoch in range(args.epochs):
        for x, y in make_epoch(args.steps, args.batch, gen):
            step += 1
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            model.zero_grad()
            loss.backward()
            callbacks("backward_end", step=step)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(args.lr * p.grad)
            callbacks("step_end", step=step, loss=loss.item())
        callbacks("epoch_end", epoch=epoch, step=step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
