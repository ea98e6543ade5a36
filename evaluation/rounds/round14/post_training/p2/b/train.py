import logging

import torch
import torch.distributed as dist

from config import RLConfig
from roles import Actor, Scorer


def main():
    cfg = RLConfig()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"[r{rank}] %(message)s")
    if dist.get_world_size() != len(cfg.actors) + len(cfg.scorers):
        raise SystemExit("the role layout needs %d ranks" % (len(cfg.actors) + len(cfg.scorers)))
    torch.manual_seed(cfg.seed)
    actor_group = dist.new_group(cfg.actors)
    scorer_group = dist.new_group(cfg.scorers)
    if rank in cfg.actors:
        worker = Actor(cfg, rank, actor_group)
    else:
        worker = Scorer(cfg, rank, scorer_group)
    for step in range(cfg.steps):
        worker.run(step)
    dist.barrier()
    if rank == 0:
        logging.info("finished %d steps", cfg.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
