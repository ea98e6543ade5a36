import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from search import Coordinator, Worker
from space import candidates, ladder
from state import load_state
from trial import build, fit


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--trials", type=int, default=12)
    ap.add_argument("--keep", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=6)
    ap.add_argument("--state", default="state/search.json")
    ap.add_argument("--final-steps", type=int, default=100)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("search", dist.distributed_c10d._get_default_store())
    params = candidates(args.trials, args.seed)
    sizes = ladder(args.trials, args.keep)
    state = load_state(args.state if rank == 0 else None, args.trials)
    best = torch.zeros(1, dtype=torch.long)
    if rank == 0:
        best[0] = Coordinator(store, params, sizes, state, list(range(1, world))).run()
    else:
        Worker(store, rank, sizes, state).run()
    dist.broadcast(best, src=0)
    chosen = params[int(best)]
    model = DDP(build(chosen))
    error = torch.tensor([fit(model, chosen, args.final_steps, seed=1000 + rank)])
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"trial {int(best)} retrained on {world} ranks: error {error.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
