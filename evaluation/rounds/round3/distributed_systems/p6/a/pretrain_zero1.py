"""Masked-token pretraining with a sharded AdamW (stage 1) over flat memory."""
import dataclasses
import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass
class TrainConfig:
    vocab: int = 80
    seq: int = 20
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 16
    steps: int = 180
    lr: float = 2e-3
    weight_decay: float = 0.01
    ema_decay: float = 0.98
    eval_every: int = 45
    mask_rate: float = 0.2
    seed: int = 1234
    run_dir: str = "zero1_run"

    @classmethod
    def from_cli(cls, argv):
        cfg = cls()
        for item in argv:
            key, _, value = item.lstrip("-").partition("=")
            setattr(cfg, key, type(getattr(cfg, key))(value))
        return cfg


class Encoder(nn.Module):
    def __init__(self, c: TrainConfig):
        super().__init__()
        self.tok = nn.Embedding(c.vocab + 1, c.width)
        self.pos = nn.Parameter(0.02 * torch.randn(c.seq, c.width))
        layer = nn.TransformerEncoderLayer(c.width, c.heads, 2 * c.width, dropout=0.0,
                                           batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, c.layers, enable_nested_tensor=False)
        self.out = nn.Linear(c.width, c.vocab)

    def forward(self, ids):
        return self.out(self.body(self.tok(ids) + self.pos))


class FlatShardedAdamW:
    """All parameters live in one flat tensor; each rank keeps the Adam moments
    of one contiguous piece of it, updates that piece and gathers the others."""

    def __init__(self, model, lr, weight_decay, betas=(0.9, 0.98), eps=1e-8):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.lr, self.wd, self.betas, self.eps = lr, weight_decay, betas, eps
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        total = sum(p.numel() for p in self.params)
        self.piece = math.ceil(total / self.world)
        self.flat = torch.zeros(self.piece * self.world)
        self.flat_grad = torch.zeros_like(self.flat)
        at = 0
        for p in self.params:
            n = p.numel()
            self.flat[at:at + n].copy_(p.data.reshape(-1))
            p.data = self.flat[at:at + n].view_as(p)
            p.grad = self.flat_grad[at:at + n].view_as(p)
            at += n
        dist.broadcast(self.flat, src=0)
        lo = self.rank * self.piece
        self.mine = self.flat[lo:lo + self.piece]
        self.my_grad = self.flat_grad[lo:lo + self.piece]
        self.m = torch.zeros(self.piece)
        self.v = torch.zeros(self.piece)
        self.t = 0

    def zero_grad(self):
        self.flat_grad.zero_()

    @torch.no_grad()
    def step(self, lr_scale=1.0, max_norm=1.0):
        dist.all_reduce(self.flat_grad)
        self.flat_grad.div_(self.world)
        norm = self.flat_grad.norm()
        self.flat_grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.t += 1
        b1, b2 = self.betas
        self.m.mul_(b1).add_(self.my_grad, alpha=1 - b1)
        self.v.mul_(b2).addcmul_(self.my_grad, self.my_grad, value=1 - b2)
        m_hat = self.m / (1 - b1 ** self.t)
        v_hat = self.v / (1 - b2 ** self.t)
        lr = self.lr * lr_scale
        self.mine.mul_(1 - lr * self.wd).sub_(lr * m_hat / (v_hat.sqrt() + self.eps))
        pieces = list(self.flat.chunk(self.world))
        dist.all_gather(pieces, self.mine.clone())
        return norm.item()


class WeightAverage:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {k: p.detach().clone() for k, p in model.named_parameters()}
        self.kept = {}

    @torch.no_grad()
    def update(self):
        for k, p in self.model.named_parameters():
            self.shadow[k].lerp_(p, 1 - self.decay)

    def __enter__(self):
        for k, p in self.model.named_parameters():
            self.kept[k] = p.data.clone()
            p.data.copy_(self.shadow[k])
        return self.model

    def __exit__(self, *exc):
        for k, p in self.model.named_parameters():
            p.data = self.kept.pop(k)


class Corpus:
    def __init__(self, c: TrainConfig, seed):
        self.c = c
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n=None):
        c = self.c
        n = n or c.batch
        start = torch.randint(0, c.vocab, (n, 1), generator=self.gen)
        stride = torch.randint(1, 5, (n, 1), generator=self.gen)
        ids = (start + stride * torch.arange(c.seq)) % c.vocab
        masked = torch.rand(n, c.seq, generator=self.gen) < c.mask_rate
        return ids.masked_fill(masked, c.vocab), ids, masked


def masked_loss(model, batch):
    inp, ids, masked = batch
    return F.cross_entropy(model(inp)[masked], ids[masked])


def main():
    cfg = TrainConfig.from_cli(sys.argv[1:])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model = Encoder(cfg)
    opt = FlatShardedAdamW(model, cfg.lr, cfg.weight_decay)
    average = WeightAverage(model, cfg.ema_decay) if rank == 0 else None
    train = Corpus(cfg, seed=cfg.seed + 1 + rank)
    held_out = [Corpus(cfg, seed=99).batch(64) for _ in range(2)]
    metrics = []
    if rank == 0:
        os.makedirs(cfg.run_dir, exist_ok=True)

    t0 = time.time()
    for step in range(1, cfg.steps + 1):
        opt.zero_grad()
        loss = masked_loss(model, train.batch())
        loss.backward()
        scale = min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / (cfg.steps + 1)))
        gnorm = opt.step(lr_scale=scale)
        if average is not None:
            average.update()
        if step % 15 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step:4d} loss {shown.item() / world:.4f} gnorm {gnorm:.2f} "
                      f"{step / (time.time() - t0):.1f} it/s", flush=True)
        if rank == 0 and step % cfg.eval_every == 0:
            with torch.no_grad(), average as ema_model:
                val = sum(masked_loss(ema_model, b).item() for b in held_out) / len(held_out)
            print(f"step {step:4d} held-out loss {val:.4f}", flush=True)
            metrics.append({"step": step, "held_out": val})
            torch.save({"model": model.state_dict(), "ema": average.shadow, "step": step},
                       os.path.join(cfg.run_dir, "latest.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(cfg.run_dir, "metrics.json"), "w") as fh:
            json.dump(metrics, fh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
