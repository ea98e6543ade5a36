"""Fine-tuning inside a given wall-clock allocation.

The batch system gives us --walltime seconds.  A real-time interval timer
raises SIGALRM on every rank shortly before that; the ranks agree on the stop,
leave one last checkpoint and exit with code 0 so that the chained job can
pick it up.
"""
import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

logger = logging.getLogger("finetune")


class WallClock:
    def __init__(self, seconds, margin):
        self.expired = False
        self.started = time.monotonic()
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds - margin))

    def _on_alarm(self, signum, frame):
        self.expired = True

    def elapsed(self):
        return time.monotonic() - self.started

    def time_is_up(self):
        """True on all ranks as soon as it is up on one of them."""
        flag = torch.tensor(int(self.expired), dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


@contextlib.contextmanager
def held_back(*signals):
    """Keep signals from cutting into the block; deliver them at its end."""
    pending = deque()
    for s in signals:
        signal.signal(s, lambda num, frame: pending.append(num))
    try:
        yield
    finally:
        for s in signals:
            signal.signal(s, signal.SIG_DFL)
        while pending:
            os.kill(os.getpid(), pending.popleft())


def save_checkpoint(path, model, opt, step):
    tmp = path.with_suffix(".part")
    with held_back(signal.SIGTERM, signal.SIGALRM):
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, tmp)
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
    logger.info("wrote %s at step %d", path.name, step)


class Adapter(nn.Module):
    def __init__(self, d, r):
        super().__init__()
        self.down = nn.Linear(d, r, bias=False)
        self.up = nn.Linear(r, d, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.up(self.down(x))


class Backbone(nn.Module):
    """A frozen stack with low-rank adapters beside every layer."""

    def __init__(self, d=64, depth=4, r=4, classes=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.adapters = nn.ModuleList(Adapter(d, r) for _ in range(depth))
        self.head = nn.Linear(d, classes)
        self.layers.requires_grad_(False)

    def forward(self, x):
        for layer, adapter in zip(self.layers, self.adapters):
            x = x + torch.tanh(layer(x) + adapter(x))
        return self.head(x)


def sync_gradients(params):
    grads = [p.grad for p in params]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, piece in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(piece)


def stream(rank, batch, d, classes, seed):
    proto = torch.randn(classes, d, generator=torch.Generator().manual_seed(seed))
    g = torch.Generator().manual_seed(seed + 31 * (rank + 1))
    while True:
        y = torch.randint(0, classes, (batch,), generator=g)
        yield proto[y] + 2.0 * torch.randn(batch, d, generator=g), y


def accuracy(model, batches):
    hit = torch.zeros(2)
    with torch.no_grad():
        for x, y in batches:
            hit += torch.tensor([(model(x).argmax(-1) == y).sum().item(), len(y)])
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()


def train(args):
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = Backbone()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=args.lr)
    path = args.out / "last.pt"
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    data = stream(rank, args.batch, 64, 5, args.seed)
    heldout = [next(data) for _ in range(4)]
    clock = WallClock(args.walltime, args.margin)
    step = 0
    while step < args.max_steps:
        x, y = next(data)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        sync_gradients(params)
        opt.step()
        step += 1
        if step % args.eval_every == 0:
            acc = accuracy(model, heldout)
            if rank == 0:
                logger.info("step %d  %.1fs  loss %.3f  acc %.3f", step, clock.elapsed(), loss.item(), acc)
                save_checkpoint(path, model, opt, step)
        if clock.time_is_up():
            logger.info("time is up at step %d", step)
            break
    if rank == 0:
        save_checkpoint(path, model, opt, step)
    dist.barrier()


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--walltime", type=float, default=8.0)
    ap.add_argument("--margin", type=float, default=2.0)
    ap.add_argument("--max-steps", type=int, default=10_000_000)
    ap.add_argument("--eval-every", type=int, default=60)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "ft")
    args = ap.parse_args(argv)

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout,
                        format=f"%(asctime)s r{dist.get_rank()} %(message)s")
    train(args)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
