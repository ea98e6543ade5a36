import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn

from solver import Diverged
from source import OscillatorSource

log = logging.getLogger("fit")


class Propagator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.delta = nn.Linear(width, 2)

    def forward(self, inputs):
        return inputs[:, :2] + self.delta(self.body(inputs))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(2)
        self.model = Propagator()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.source = OscillatorSource(seed=[args.seed, self.rank], batch=args.batch)
        self.retries = 0

    def train(self):
        smooth = None
        for step in range(self.args.steps):
            state, params = self.source.draw()
            try:
                inputs, target = self.source.simulate(state, params)
            except Diverged as err:
                self.retries += 1
                log.warning("rank %d step %d: %s, skipped", self.rank, step, err)
                continue
            loss = nn.functional.smooth_l1_loss(self.model(inputs), target)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            dist.all_reduce(flat)
            at = 0
            for p in self.model.parameters():
                p.grad.copy_(flat[at:at + p.numel()].view_as(p) / dist.get_world_size())
                at += p.numel()
            self.opt.step()
            smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            if self.rank == 0 and step % 10 == 0:
                log.info("step %d loss %.4f", step, smooth)
        return smooth

    def summary(self, smooth):
        mine = torch.tensor([smooth, self.retries], dtype=torch.float64)
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        if self.rank == 0:
            for rank, (loss, diverged) in enumerate(rows):
                log.info("rank %d: final loss %.4f, %d batches diverged", rank, loss, diverged)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    trainer.summary(trainer.train())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
