#!/usr/bin/env python
"""Islands of data-parallel workers with infrequent outer synchronisation."""
import argparse
import json
import pathlib

import torch.distributed as dist

from islands.topology import build_topology
from islands.trainer import IslandTrainer
from islands.data import SensorStream


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--island-size", type=int, default=2)
    ap.add_argument("--total-steps", type=int, default=240)
    ap.add_argument("--inner-steps", type=int, default=20, help="H, inner steps between two outer steps")
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--inner-lr", type=float, default=3e-3)
    ap.add_argument("--outer-lr", type=float, default=0.7)
    ap.add_argument("--outer-momentum", type=float, default=0.9)
    ap.add_argument("--spike-factor", type=float, default=4.0)
    ap.add_argument("--eval-every", type=int, default=80)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/islands"))
    return ap.parse_args()


def main():
    args = parse_args()
    dist.init_process_group(backend="gloo")
    topo = build_topology(args.island_size)
    stream = SensorStream(topo, batch_size=args.batch_size, seed=args.seed)
    trainer = IslandTrainer(args, topo, stream)
    history = trainer.fit()
    if topo.rank == 0:
        args.workdir.mkdir(parents=True, exist_ok=True)
        (args.workdir / "history.json").write_text(json.dumps(history, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
