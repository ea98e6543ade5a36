"""Continued pre-training: a general stage, then a domain stage that resumes from the checkpoint of the first."""
import argparse
import logging
import shutil
import tempfile

import torch.distributed as dist

from trainer import Stage


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"[rank{rank}] %(message)s")
    folder = tempfile.mkdtemp(prefix="cpt-") if rank == 0 else ""
    first = int(args.total_tokens * args.general_share)
    for domain, budget in (("general", first), ("medical", args.total_tokens)):
        stage = Stage(args, domain, budget, folder)
        if rank == 0:
            logging.info("stage %s from step %d", domain, stage.progress.step)
        stage.run()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--total-tokens", type=int, default=23000)
    p.add_argument("--general-share", type=float, default=0.45)
    p.add_argument("--vocab", type=int, default=64)
    p.add_argument("--hidden", type=int, default=48)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=24)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--eval-every", type=int, default=8)
    p.add_argument("--seed", type=int, default=2)
    main(p.parse_args())
