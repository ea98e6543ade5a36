#!/usr/bin/env python
"""FSDP2 pretraining smoke run (2 ranks, CPU).

    torchrun --standalone --nproc-per-node=2 run_pretrain.py
"""
import dataclasses
import tempfile

import torch
import torch.distributed as dist

from shardkit.loop import Loop
from shardkit.metrics import JsonlSink, MetricBuffer
from shardkit.model import build_sharded


@dataclasses.dataclass
class Config:
    seed: int = 7
    vocab: int = 128
    dim: int = 64
    depth: int = 3
    context: int = 96
    window: int = 32
    batch: int = 4
    accum: int = 2
    steps: int = 18
    lr: float = 1.5e-3
    clip: float = 0.8
    log_every: int = 6
    ema: float = 0.97
    z_loss_from: int = 8      # z-loss is ramped in once the softmax has settled
    z_loss: float = 1e-3
    freeze: tuple = ("embed",)


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    torch.manual_seed(cfg.seed)
    model, mesh = build_sharded(cfg)
    with tempfile.TemporaryDirectory(prefix="shardkit-") as out:
        loop = Loop(cfg, model, MetricBuffer(cfg.log_every * cfg.accum))
        if dist.get_rank() == 0:
            loop.sinks.append(JsonlSink(out))
        loop.run()
        state = loop.export_ema()
        if dist.get_rank() == 0:
            torch.save(state, f"{out}/ema.pt")
            print(f"exported {len(state)} tensors after {loop.step} steps, "
                  f"loss {loop.sinks[0].last['loss']:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
