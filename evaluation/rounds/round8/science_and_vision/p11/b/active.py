"""Active learning of a galaxy classifier: train, score the pool, ask the oracle."""
import json
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from loop.oracle import Oracle, wait_for_round
from loop.pool import Pool
from loop.rundir import make_run_dir

HERE = pathlib.Path(__file__).resolve().parent
CFG = {"pool": 240, "dim": 12, "classes": 4, "start": 32, "ask": 16, "rounds": 3, "steps": 15, "batch": 8, "lr": 0.02, "seed": 40}


def fit(net, opt, pool, labelled, rank, world, gen):
    mean = torch.zeros(1)
    for _ in range(CFG["steps"]):
        pick = torch.randperm(len(labelled), generator=gen)[: CFG["batch"] * world]
        idx = labelled[pick][rank::world]
        loss = F.cross_entropy(net(pool.x[idx]), pool.y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean += loss.detach() / CFG["steps"]
    dist.all_reduce(mean)
    return mean.item() / world


@torch.no_grad()
def score(net, pool, unlabelled, rank, world):
    """Predictive entropy of this rank's part of the pool, gathered in order."""
    part = torch.zeros(pool.size)
    mine = unlabelled[rank::world]
    p = F.softmax(net.module(pool.x[mine]), 1)
    part[mine] = -(p * p.clamp(min=1e-9).log()).sum(1)
    dist.all_reduce(part)
    return part


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(CFG["seed"])
    if rank == 0:
        shutil.rmtree(HERE / "runs", ignore_errors=True)
    dist.barrier()
    run_dir = make_run_dir(HERE / "runs", rank)
    pool = Pool(CFG["pool"], CFG["dim"], CFG["classes"], CFG["seed"])
    oracle = Oracle(run_dir, pool)
    net = DDP(nn.Sequential(nn.Linear(CFG["dim"], 24), nn.ReLU(), nn.Linear(24, CFG["classes"])))
    opt = torch.optim.SGD(net.parameters(), lr=CFG["lr"], momentum=0.9)
    gen = torch.Generator().manual_seed(CFG["seed"])
    labelled = torch.arange(CFG["start"])
    for rnd in range(CFG["rounds"]):
        loss = fit(net, opt, pool, labelled, rank, world, gen)
        rest = pool.without(labelled)
        entropy = score(net, pool, rest, rank, world)
        if rank == 0:
            query = rest[entropy[rest].topk(CFG["ask"]).indices]
            oracle.label(rnd, query)
            print(f"round {rnd} loss {loss:.3f} labelled {len(labelled)}", flush=True)
        answer = wait_for_round(run_dir, rnd)
        labelled = torch.cat([labelled, torch.tensor(answer["indices"])])
    acc = (net.module(pool.x).argmax(1) == pool.y).float().mean()
    if rank == 0:
        print(f"pool accuracy {acc.item():.3f}", flush=True)
        (run_dir / "final.json").write_text(json.dumps({"acc": acc.item(), "n": len(labelled)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
