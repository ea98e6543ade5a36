import argparse

import torch.distributed as dist

from sweep.board import Board
from sweep.leader import Leader
from sweep.objective import train_one


def make_groups(size):
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = None
    for start in range(0, world, size):
        g = dist.new_group(list(range(start, start + size)))
        if start <= rank < start + size:
            mine = (start // size, g)
    return mine


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--group-size", type=int, default=2)
    p.add_argument("--trials", type=int, default=7)
    p.add_argument("--seed", type=int, default=100)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    index, group = make_groups(args.group_size)
    board = Board(dist.distributed_c10d._get_default_store(), index)
    leader = Leader(board, args.seed + index) if dist.get_rank(group) == 0 else None

    for trial in range(args.trials):
        params = leader.next_trial(trial) if leader else board.params(trial)
        score = train_one(params, group)
        if leader:
            leader.report(params, score)
            print(f"group {index} trial {trial} {params} -> {score:.4f}", flush=True)

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, leader.best() if leader else None)
    if rank == 0:
        print("best:", min(f for f in found if f), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
