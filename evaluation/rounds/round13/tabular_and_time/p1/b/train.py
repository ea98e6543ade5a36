"""Anomaly detection on site telemetry, run in spot windows: each window starts from the checkpoint folder."""
import argparse
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass

import torch.distributed as dist

from checkpoint import CheckpointDir
from data import SiteTelemetry
from trainer import Trainer


@dataclass
class Config:
    channels: int = 12
    batch_size: int = 32
    lr: float = 2e-3
    seed: int = 11
    window_steps: int = 55
    windows: int = 4


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--windows", type=int, default=Config.windows)
    cfg = Config(windows=ap.parse_args().windows)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    root = os.path.join(tempfile.gettempdir(), "telemetry-" + os.environ["TORCHELASTIC_RUN_ID"])
    shard, holdout = SiteTelemetry(rank, channels=cfg.channels), SiteTelemetry(rank, rows=256, channels=cfg.channels)
    ckpt = CheckpointDir(root)
    for window in range(cfg.windows):
        trainer = Trainer(cfg, shard, holdout, ckpt)
        logging.info("window %d starts at step %d", window, trainer.step)
        trainer.run(until=(window + 1) * cfg.window_steps)
    logging.info("final threshold %.4f", trainer.threshold())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
