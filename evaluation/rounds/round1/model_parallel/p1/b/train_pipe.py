"""GPipe style training of a small character model over three stages.

    torchrun --nproc-per-node=3 train_pipe.py --steps 60
"""
import argparse
import logging
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("pipe")


@dataclass
class PipeConfig:
    vocab: int = 48
    width: int = 96
    seq: int = 32
    micro_batch: int = 8
    num_micro: int = 4
    blocks_per_stage: int = 2
    lr: float = 3e-3
    freeze: str = "1:12"
    seed: int = 7


class MixBlock(nn.Module):
    """Causal mixing over time followed by an MLP, both residual."""

    def __init__(self, cfg):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.width)
        self.mix = nn.Conv1d(cfg.width, cfg.width, kernel_size=4, groups=8)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, 2 * cfg.width), nn.GELU(), nn.Linear(2 * cfg.width, cfg.width))

    def forward(self, x):
        h = F.pad(self.norm1(x).transpose(1, 2), (3, 0))
        x = x + self.mix(h).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


def build_stage(cfg, stage, num_stages):
    layers = []
    if stage == 0:
        layers.append(nn.Embedding(cfg.vocab, cfg.width))
    layers += [MixBlock(cfg) for _ in range(cfg.blocks_per_stage)]
    if stage == num_stages - 1:
        layers += [nn.LayerNorm(cfg.width), nn.Linear(cfg.width, cfg.vocab)]
    return nn.Sequential(*layers)


def parse_freeze(text):
    """'1:12,2:40' -> {1: 12, 2: 40} (stage -> first step with frozen weights)"""
    plan = {}
    for part in filter(None, text.split(",")):
        stage, step = part.split(":")
        plan[int(stage)] = int(step)
    return plan


class CharStream:
    """Random walks over the alphabet; every stage draws the same sequence."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.gen = torch.Generator().manual_seed(cfg.seed)

    def next_batch(self):
        c = self.cfg
        n = c.micro_batch * c.num_micro
        start = torch.randint(0, c.vocab, (n, 1), generator=self.gen)
        hops = torch.randint(1, 4, (n, c.seq), generator=self.gen)
        walk = (start + torch.cat([torch.zeros(n, 1, dtype=torch.long), hops.cumsum(1)], 1)) % c.vocab
        return walk[:, :-1].split(c.micro_batch), walk[:, 1:].split(c.micro_batch)


class PipeStage:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.first = self.rank == 0
        self.last = self.rank == self.size - 1
        torch.manual_seed(cfg.seed + self.rank)
        self.net = build_stage(cfg, self.rank, self.size)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg.lr)
        self.act_shape = (cfg.micro_batch, cfg.seq, cfg.width)
        self.freeze_plan = parse_freeze(cfg.freeze)

    def trainable(self):
        return any(p.requires_grad for p in self.net.parameters())

    def apply_freeze(self, step):
        at = self.freeze_plan.get(self.rank)
        if at is not None and step == at:
            self.net.requires_grad_(False)
            log.info("stage %d: weights frozen from step %d on", self.rank, step)

    def forward_micro(self, tokens):
        if self.first:
            inp = tokens
        else:
            inp = torch.empty(self.act_shape)
            dist.recv(inp, src=self.rank - 1)
            inp.requires_grad_(True)
        out = self.net(inp)
        if not self.last:
            dist.send(out.detach(), dst=self.rank + 1)
        return inp, out

    def backward_micro(self, inp, out, target):
        if not out.requires_grad:
            return 0.0
        value = 0.0
        if self.last:
            loss = F.cross_entropy(out.flatten(0, 1), target.flatten()) / self.cfg.num_micro
            loss.backward()
            value = loss.item()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, src=self.rank + 1)
            out.backward(grad)
        if not self.first:
            dist.send(inp.grad, dst=self.rank - 1)
        return value

    def train_step(self, tokens, targets):
        self.opt.zero_grad(set_to_none=True)
        saved = [self.forward_micro(t) for t in tokens]
        total = 0.0
        for (inp, out), target in zip(saved, targets):
            total += self.backward_micro(inp, out, target)
        if self.trainable():
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.opt.step()
        return total

    def save(self, folder, step):
        os.makedirs(folder, exist_ok=True)
        torch.save({"net": self.net.state_dict(), "step": step},
                   os.path.join(folder, f"stage{self.rank}.pt"))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--freeze", default=PipeConfig.freeze)
    ap.add_argument("--log-every", type=int, default=10)
    ap.add_argument("--out", default="pipe_ckpt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"[stage {rank}] %(message)s")
    cfg = PipeConfig(freeze=args.freeze)
    stage, stream = PipeStage(cfg), CharStream(cfg)
    began = time.time()
    for step in range(args.steps):
        stage.apply_freeze(step)
        tokens, targets = stream.next_batch()
        loss = stage.train_step(tokens, targets)
        if stage.last and step % args.log_every == 0:
            log.info("step %3d  loss %.4f  (%.1fs)", step, loss, time.time() - began)
    stage.save(args.out, args.steps)
    dist.barrier()
    if rank == 0:
        log.info("saved %d stages in %s", dist.get_world_size(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
