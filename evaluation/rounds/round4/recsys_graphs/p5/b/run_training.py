"""Entry point of the click / conversion model training job."""
import logging
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ctr.data import ImpressionLog, make_loader
from ctr.model import SharedBottom
from ctr.trainer import Trainer


@dataclass
class Config:
    epochs: int = 4
    batch_size: int = 56
    rows: int = 9000
    valid_rows: int = 1500
    lr: float = 3e-3
    warmup_steps: int = 20
    clip: float = 5.0
    conv_weight: float = 0.5
    conv_ramp_epochs: int = 2
    patience: int = 1
    seed: int = 4


def main():
    cfg = Config()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR,
                        format="%(asctime)s [%(name)s] %(message)s")
    torch.manual_seed(cfg.seed)

    train, sampler = make_loader(ImpressionLog(cfg.rows, seed=1), cfg.batch_size, rank, world, train=True)
    valid, _ = make_loader(ImpressionLog(cfg.valid_rows, seed=2), 250, rank, world, train=False)
    with tempfile.TemporaryDirectory(prefix="ctr_") as workdir:
        Trainer(SharedBottom(), cfg, rank, world, workdir).fit(train, sampler, valid)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
