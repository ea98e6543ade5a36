"""Active-learning campaign over a simulation pool, in two allocations of the cluster."""
import argparse
import os
import shutil

import torch
import torch.distributed as dist

from learner import Learner
from state import Snapshots


def allocation(args, rank, rounds):
    learner = Learner(rank)
    snapshots = Snapshots(args.folder, rank, args.save_every)
    acquired, first = snapshots.restore(learner)
    if rank == 0:
        print(f"allocation starts at round {first} with {acquired} new labels", flush=True)
    for r in range(first, rounds):
        loss = learner.fit(args.fit_steps)
        mine, everybody = learner.query(args.threshold, args.limit)
        acquired += everybody
        saved = snapshots.maybe_save(learner, acquired, r + 1)
        if rank == 0:
            note = " (snapshot)" if saved else ""
            print(f"round {r}: loss {loss:.4f}, {everybody} new labels, {acquired} so far{note}", flush=True)
    dist.barrier()
    return learner


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", default="campaign")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--first-allocation", type=int, default=2)
    ap.add_argument("--fit-steps", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=16)
    ap.add_argument("--threshold", type=float, default=0.2)
    ap.add_argument("--limit", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(args.folder, ignore_errors=True)
        os.makedirs(args.folder)
    dist.barrier()

    allocation(args, rank, args.first_allocation)
    learner = allocation(args, rank, args.rounds)

    left = torch.tensor([int((~learner.labelled).sum())])
    dist.reduce(left, dst=0)
    if rank == 0:
        print(f"campaign over, {int(left)} pool points never simulated")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
