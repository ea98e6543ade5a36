"""Entry point: the last rank serves the reward model, the others train the policy."""
import argparse
import logging
import os

import torch
import torch.distributed as dist

from tinyrlhf.links import Topology
from tinyrlhf.policy import PolicyWorker
from tinyrlhf.reward import RewardWorker


def get_args():
    p = argparse.ArgumentParser("tinyrlhf")
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--rollouts", type=int, default=8)
    p.add_argument("--context", type=int, default=20, help="prompt plus completion, in tokens")
    p.add_argument("--min-prompt", type=int, default=4)
    p.add_argument("--max-prompt", type=int, default=20)
    p.add_argument("--cycle", type=int, default=8, help="steps of one prompt length cycle")
    p.add_argument("--ppo-epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--missing-reward", type=float, default=-1.0)
    p.add_argument("--save-dir", default=None)
    p.add_argument("--seed", type=int, default=5)
    return p.parse_args()


def main():
    args = get_args()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    topo = Topology.build()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {topo.role}/{topo.rank} %(message)s")
    torch.manual_seed(args.seed)
    worker = (RewardWorker if topo.is_reward else PolicyWorker)(args, topo)
    summary = worker.run()

    rows = [None] * topo.world
    dist.all_gather_object(rows, summary)
    if topo.rank == 0:
        logging.info("done: %s", rows)
        if args.save_dir:
            os.makedirs(args.save_dir, exist_ok=True)
            torch.save(worker.model.state_dict(), os.path.join(args.save_dir, "policy.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
