import json
import math
import sys

import torch
import torch.distributed as dist

import data
from schedule import GPipe
from stages import build_stage


def batches_per_epoch(cfg):
    return cfg["samples"] // cfg["batch_size"]


def run_epoch(pipe, cfg, epoch):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    micro = math.ceil(cfg["batch_size"] / cfg["micro_size"])
    total = 0.0
    if rank == 0:
        for (x,) in data.inputs(cfg, epoch):
            pipe.step(x.chunk(micro), None, micro)
    elif rank == last:
        for (y,) in data.labels(cfg, epoch):
            total += pipe.step(None, y.chunk(micro), micro)
    else:
        for _ in range(batches_per_epoch(cfg)):
            pipe.step(None, None, micro)
    return total / batches_per_epoch(cfg)


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else "conf/base.json") as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg["seed"] + rank)
    stage = build_stage(rank, world, cfg)
    opt = torch.optim.Adam(stage.parameters(), lr=cfg["lr"])
    pipe = GPipe(stage, opt, cfg)
    for epoch in range(cfg["epochs"]):
        loss = torch.tensor([run_epoch(pipe, cfg, epoch)])
        norm = sum(p.pow(2).sum() for p in stage.parameters()).detach().reshape(1)
        dist.all_reduce(norm)
        dist.broadcast(loss, src=world - 1)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} |w| {norm.sqrt().item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
