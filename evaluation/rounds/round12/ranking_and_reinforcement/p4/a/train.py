"""Trains a session model in two stages: a short first stage, which leaves a
checkpoint, and the main stage, which goes on from it."""
import json
import os
import shutil

import torch
import torch.distributed as dist

from fw.checkpoint import Checkpointer
from fw.data import SessionDataset, make_loader
from fw.model import SessionGRU
from fw.trainer import Trainer


def build(cfg):
    torch.manual_seed(cfg["seed"])
    data = SessionDataset(cfg["sessions"], cfg["items"], cfg["length"], cfg["seed"])
    return Trainer(SessionGRU(cfg["items"], cfg["dim"]), make_loader(data, cfg["batch"], cfg["seed"]), cfg)


def first_stage(cfg, ckpt):
    trainer = build(cfg)
    trainer.fit(cfg["warm_epochs"])
    ckpt.save(trainer)


def main_stage(cfg, ckpt):
    trainer = build(cfg)
    ckpt.resume(trainer)
    trainer.fit(cfg["epochs"])
    ckpt.save(trainer)
    return trainer


def main():
    with open("config.json") as fh:
        cfg = json.load(fh)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and os.path.isdir(cfg["folder"]):
        shutil.rmtree(cfg["folder"])
    dist.barrier()
    ckpt = Checkpointer(cfg["folder"])
    first_stage(cfg, ckpt)
    trainer = main_stage(cfg, ckpt)
    if dist.get_rank() == 0:
        print("final loss", round(trainer.history[-1], 4), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
