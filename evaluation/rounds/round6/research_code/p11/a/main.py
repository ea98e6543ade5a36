import argparse

import torch.distributed as dist

from anneal import Annealer, Clock
from problem import read_instance, write_instance
from tune import fit_surrogate


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--instance", default="work/cities.json")
    ap.add_argument("--n", type=int, default=40)
    ap.add_argument("--seconds", type=float, default=2.5)
    ap.add_argument("--restarts", type=int, default=700)
    ap.add_argument("--moves", type=int, default=150)
    ap.add_argument("--t-start", type=float, default=0.5)
    ap.add_argument("--t-end", type=float, default=0.005)
    ap.add_argument("--log-every", type=int, default=25)
    ap.add_argument("--surrogate-steps", type=int, default=20)
    ap.add_argument("--seed", type=int, default=8)
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_instance(cfg.instance, cfg.n, cfg.seed, cfg.restarts)
    clock = Clock(cfg.seconds)
    dist.barrier()
    cities, tour = read_instance(cfg.instance)
    annealer = Annealer(cities, tour, cfg)
    length = annealer.run(clock)
    mse = fit_surrogate(annealer, cfg.surrogate_steps)
    if rank == 0:
        print(f"best length {length:.3f} after {annealer.sweeps} sweeps, surrogate mse {mse:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
