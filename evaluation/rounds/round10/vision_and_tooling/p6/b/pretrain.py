import argparse

import torch
import torch.distributed as dist

from pipe.data import InputView, Patches, TargetView, make_loader
from pipe.schedule import GPipe
from pipe.stages import build_stage


class StageRunner:
    """One pipeline stage: its module, its view of the data and its optimizer."""

    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        ds = Patches(args.samples, args.dim, args.classes)
        if rank == world - 1:
            self.loader = make_loader(TargetView(ds), args.batch, args.seed)
        else:
            self.loader = make_loader(InputView(ds), args.batch, args.seed, drop_last=True)
        torch.manual_seed(args.seed + rank)
        self.module = build_stage(rank, world, args.dim, args.width, args.classes)
        self.pipe = GPipe(self.module, rank, world, args.micro, args.width)
        self.opt = torch.optim.SGD(self.module.parameters(), lr=args.lr, momentum=0.9)

    def batches(self, epoch):
        self.loader.sampler.epoch = epoch
        if 0 < self.rank < self.world - 1:
            for _ in range(len(self.loader)):
                yield None
        else:
            yield from self.loader

    def run_epoch(self, epoch):
        total = 0.0
        n_micro = self.args.batch // self.args.micro
        for batch in self.batches(epoch):
            self.opt.zero_grad()
            total += self.pipe.forward_backward(batch, n_micro)
            self.opt.step()
        loss = torch.tensor([total / len(self.loader)])
        dist.broadcast(loss, src=self.world - 1)
        return loss.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--samples", type=int, default=250)
    p.add_argument("--dim", type=int, default=20)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--classes", type=int, default=5)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--micro", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=17)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    runner = StageRunner(args, rank, world)
    for epoch in range(args.epochs):
        loss = runner.run_epoch(epoch)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
