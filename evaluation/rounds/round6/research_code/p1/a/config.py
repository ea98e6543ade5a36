import json
import os
from dataclasses import dataclass, fields


@dataclass
class Config:
    env_size: int = 9
    hidden: int = 32
    unroll: int = 16
    total_frames: int = 4608
    num_actors: int = 2
    gamma: float = 0.97
    entropy_cost: float = 0.01
    lr: float = 3e-3
    seed: int = 7
    log_every: int = 20


def load_config(path, world_size):
    cfg = Config()
    if os.path.exists(path):
        with open(path) as f:
            overrides = json.load(f)
        known = {f.name for f in fields(Config)}
        for key, value in overrides.items():
            if key not in known:
                raise KeyError(f"unknown option {key!r} in {path}")
            setattr(cfg, key, value)
    cfg.num_actors = world_size - 1
    return cfg


def frames_per_update(cfg, num_actors):
    return cfg.unroll * num_actors
