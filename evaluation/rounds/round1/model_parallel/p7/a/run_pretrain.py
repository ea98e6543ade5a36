"""1F1B pipeline training of a small image classifier.

    torchrun --nproc-per-node=2 run_pretrain.py
"""
from dataclasses import dataclass, fields
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pp.snapshot import BestKeeper
from pp.stages import ImageStage, SyntheticImages


@dataclass
class Config:
    units: int = 4
    channels: int = 16
    classes: int = 6
    side: int = 12
    batch: int = 32
    micro_batches: int = 4
    epochs: int = 3
    train_size: int = 384
    lr: float = 4e-3
    folder: str = "pp_runs"

    @classmethod
    def from_cli(cls):
        p = argparse.ArgumentParser()
        for f in fields(cls):
            p.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
        return cls(**vars(p.parse_args()))


def exchange(sends=(), recvs=()):
    """sends: (tensor, peer), recvs: (shape, peer); peers outside of the line are left out."""
    world = dist.get_world_size()
    ops, got = [], []
    for tensor, peer in sends:
        if 0 <= peer < world:
            ops.append(dist.P2POp(dist.isend, tensor.contiguous(), peer))
    for shape, peer in recvs:
        buf = torch.empty(shape) if 0 <= peer < world else None
        got.append(buf)
        if buf is not None:
            ops.append(dist.P2POp(dist.irecv, buf, peer))
    if ops:
        for w in dist.batch_isend_irecv(ops):
            w.wait()
    return got


class Pipeline:
    def __init__(self, cfg, stage):
        self.cfg, self.stage = cfg, stage
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shape = (cfg.batch // cfg.micro_batches, cfg.channels, cfg.side, cfg.side)
        self.last = self.rank == self.world - 1

    def _forward(self, image, label, inp, live, sums):
        if inp is None:
            inp = image
        elif torch.is_grad_enabled():
            inp.requires_grad_()
        out = self.stage(inp)
        if self.last:
            loss = F.cross_entropy(out, label)
            sums += torch.stack([loss.detach(), (out.argmax(1) == label).float().mean()])
            out = loss / self.cfg.micro_batches
        live.append((inp, out))
        return out.detach()

    def _backward(self, grad, live):
        inp, out = live.pop(0)
        out.backward(grad)
        return inp.grad

    def train_batch(self, x, y):
        m = self.cfg.micro_batches
        xs, ys = x.chunk(m), y.chunk(m)
        up, down = self.rank - 1, self.rank + 1
        warm = min(self.world - 1 - self.rank, m)
        live, sums, nxt = [], torch.zeros(2), 0
        for nxt in range(warm):
            inp, = exchange(recvs=[(self.shape, up)])
            out = self._forward(xs[nxt], ys[nxt], inp, live, sums)
            exchange(sends=[(out, down)])
        inp = exchange(recvs=[(self.shape, up)])[0] if m > warm else None
        for i in range(warm, m):
            out = self._forward(xs[i], ys[i], inp, live, sums)
            grad, = exchange(sends=[(out, down)], recvs=[(self.shape, down)])
            back = self._backward(grad, live)
            if i + 1 < m:
                inp, = exchange(sends=[(back, up)], recvs=[(self.shape, up)])
            else:
                exchange(sends=[(back, up)])
        for _ in range(warm):
            grad, = exchange(recvs=[(self.shape, down)])
            exchange(sends=[(self._backward(grad, live), up)])
        return sums / m

    @torch.no_grad()
    def evaluate(self, data):
        self.stage.eval()
        sums, n = torch.zeros(2), 0
        for x, y in data.batches(self.shape[0]):
            inp, = exchange(recvs=[(self.shape, self.rank - 1)])
            out = self._forward(x, y, inp, [], sums)
            exchange(sends=[(out, self.rank + 1)])
            n += 1
        self.stage.train()
        sums /= n
        dist.broadcast(sums, src=self.world - 1)
        return sums.tolist()


def main():
    cfg = Config.from_cli()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(40 + rank)
    stage = ImageStage(cfg, rank, dist.get_world_size())
    pipe = Pipeline(cfg, stage)
    opt = torch.optim.AdamW(stage.parameters(), lr=cfg.lr)
    train, val, test = (SyntheticImages(n, cfg, s) for n, s in ((cfg.train_size, 1), (96, 2), (128, 3)))
    keeper = BestKeeper(cfg.folder, rank)
    step = 0
    for epoch in range(cfg.epochs):
        for x, y in train.batches(cfg.batch, epoch):
            opt.zero_grad()
            loss, acc = pipe.train_batch(x, y).tolist()
            opt.step()
            step += 1
        score, acc = pipe.evaluate(val)
        kept = keeper.offer(score, stage, step)
        if rank == 0:
            print(f"epoch {epoch}: val loss {score:.4f} acc {acc:.3f}{' *' if kept else ''}", flush=True)

    step, score = keeper.restore(stage)
    loss, acc = pipe.evaluate(test)
    if rank == 0:
        print(f"test with weights of step {step}: loss {loss:.4f} acc {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
