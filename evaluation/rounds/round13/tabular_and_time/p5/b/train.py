"""Online ads-response model with a drift monitor next to the training loop."""
import argparse
import logging
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from drift import DriftMonitor
from stream import ImpressionStream

log = logging.getLogger("ads")


class CrossNet(nn.Module):
    def __init__(self, features, layers=3, width=96):
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.deep = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(features + width, 1)

    def forward(self, x):
        h = x
        for layer in self.cross:
            h = x * layer(h) + h
        return self.out(torch.cat([h, self.deep(x)], dim=1)).squeeze(1)


@contextmanager
def distributed():
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def drift_monitor(reference):
    monitor = DriftMonitor(reference, group=dist.group.WORLD)
    monitor.start()
    yield monitor
    monitor.close()


def train(args, rank, world):
    stream = ImpressionStream(rank, batch_size=args.batch_size)
    torch.manual_seed(args.seed)
    model = DDP(CrossNet(stream.features))
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
    reference = torch.cat([stream.sample(0.0)[0] for _ in range(8)])
    with drift_monitor(reference) as monitor:
        for step, (x, y) in enumerate(stream.day(args.steps), 1):
            monitor.submit(x)
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            if step % 50 == 0:
                log.info("step %d loss %.4f worst psi so far %.3f", step, loss.item(), monitor.worst)
    log.info("%d batches monitored, %d alarms, worst psi %.3f", monitor.seen, monitor.alarms, monitor.worst)
    total = torch.tensor([loss.item()]) / world
    dist.all_reduce(total)
    log.info("last loss, mean over regions: %.4f", total.item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    with distributed() as (rank, world):
        logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(name)s: %(message)s")
        train(args, rank, world)


if __name__ == "__main__":
    main()
