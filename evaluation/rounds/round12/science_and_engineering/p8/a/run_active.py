import argparse

import numpy as np
import torch
import torch.distributed as dist

from committee import Committee
from oracle import LabelExchange, cell_voltage


def start_set(rng, n=12):
    x = rng.random((n, 3))
    return torch.from_numpy(x).float(), torch.from_numpy(cell_voltage(x)).float()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--pool", type=int, default=300)
    ap.add_argument("--per-rank", type=int, default=2)
    ap.add_argument("--tolerance", type=float, default=0.034)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    common = np.random.default_rng(31)
    x, y = start_set(common)
    pool = torch.from_numpy(common.random((args.pool, 3))).float()
    open_ids = torch.ones(args.pool, dtype=torch.bool)
    committee = Committee(rank, world)
    labels = LabelExchange(rank, world)
    for round_no in range(args.rounds):
        loss = committee.fit(x, y, args.steps)
        score = committee.disagreement(pool).masked_fill(~open_ids, 0.0)
        ranked = score.argsort(descending=True)[:args.per_rank * world]
        ranked = ranked[score[ranked] > args.tolerance]
        open_ids[ranked] = False
        mine = pool[ranked[rank::world]].double().numpy()
        new_x, new_y = labels.exchange(round_no, mine)
        x, y = torch.cat([x, new_x]), torch.cat([y, new_y])
        dist.all_reduce(loss)
        if rank == 0:
            print(f"round {round_no}: {len(x)} labels (+{len(new_x)}), loss {loss.item() / world:.5f}, "
                  f"disagreement {score.max():.4f}", flush=True)

    dist.barrier()
    if rank == 0:
        print(f"solver ran {labels.solved} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
