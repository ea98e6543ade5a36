"""Entry point: torchrun --standalone --nproc-per-node=3 train.py"""
import json
import logging
import os
import pathlib
import shutil
import tempfile

import torch
import torch.distributed as dist

from nightjar.callbacks import CheckpointRotation, EmaCallback, MixtureReport, StepLogger
from nightjar.data import shard_stream
from nightjar.hooks import HookRegistry
from nightjar.trainer import Trainer

HERE = pathlib.Path(__file__).resolve().parent


def main():
    cfg = json.loads((HERE / "config.json").read_text())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.ERROR,
        format=f"[r{rank}] %(asctime)s %(name)s: %(message)s",
    )
    torch.manual_seed(cfg["seed"])

    # everything that is not a gradient goes over its own group
    side = dist.new_group(backend="gloo")
    box = [tempfile.mkdtemp(prefix=cfg["run"]) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0, group=side)
    workdir = pathlib.Path(box[0])

    hooks = HookRegistry()
    trainer = Trainer(cfg, hooks)
    EmaCallback(cfg["ema_decay"]).attach(hooks)
    MixtureReport(cfg["report_every"], side).attach(hooks)
    CheckpointRotation(workdir, cfg["save_every"], cfg["keep_last"]).attach(hooks)
    StepLogger(every=5).attach(hooks)

    trainer.fit(shard_stream(cfg, rank, world))
    dist.barrier(group=side)
    if rank == 0:
        left = sorted(p.name for p in workdir.iterdir())
        logging.getLogger("main").info("done at step %d, kept %s", trainer.step, left)
        shutil.rmtree(workdir)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
