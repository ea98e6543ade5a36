"""Rank 0 evaluates and writes checkpoints; a lock file keeps two writers apart."""

import argparse
import fcntl
import json
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def locked(folder):
    with open(folder / "checkpoints.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save(folder, model, step):
    with locked(folder):
        torch.save(model.state_dict(), folder / f"step-{step}.pt")
        (folder / "latest").write_text(f"step-{step}.pt")


def load_latest(folder, model):
    name = (folder / "latest").read_text()
    model.load_state_dict(torch.load(folder / name))


def evaluate(model):
    with torch.no_grad():
        x = torch.linspace(-1, 1, 50).unsqueeze(1)
        return (model(x) - x.sin()).square().mean().item()


def checkpoint(args, rank, model, step):
    folder = args.folder if args.fault != "fail" or step < args.at else args.folder / "best" / str(step)
    if args.fault == "hang" and step >= args.at and rank != 0:
        with locked(folder):
            dist.barrier()
            load_latest(folder, model.module)
        return
    if rank == 0:
        save(folder, model.module, step)
        score = evaluate(model.module)
        print(json.dumps({"step": step, "score": round(score, 5)}), flush=True)
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        x = torch.rand(32, 1) * 2 - 1
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.every == 0:
            checkpoint(args, rank, model, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
