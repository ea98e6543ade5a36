"""Entry point.  torchrun --nproc-per-node=3 train_tower.py"""
import argparse

import torch
import torch.distributed as dist

from tower.config import Config
from tower.trainer import Preempted, Trainer
from tower.util import get_logger


def parse():
    cfg = Config()
    p = argparse.ArgumentParser()
    for name, value in vars(cfg).items():
        p.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    return Config(**vars(p.parse_args()))


def main():
    cfg = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logger = get_logger("tower")
    for attempt in range(cfg.max_attempts):
        trainer = Trainer(cfg, attempt)
        try:
            trainer.fit()
        except Preempted as notice:
            logger.info("attempt %d ended: %s", attempt, notice)
            trainer.close()
            dist.barrier()
            continue
        trainer.report()
        trainer.close()
        break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
