import argparse
from dataclasses import dataclass, field, fields


@dataclass
class Training:
    steps: int = 80
    local_batch_size: int = 8
    seq_len: int = 32
    max_norm: float = 1.0
    seed: int = 0


@dataclass
class Optimizer:
    lr: float = 3e-3
    warmup_steps: int = 10


@dataclass
class Metrics:
    log_freq: int = 10
    generate_freq: int = 20


@dataclass
class Checkpoint:
    interval: int = 40
    folder: str = "outputs/checkpoint"


@dataclass
class JobConfig:
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def parse_config(argv=None) -> JobConfig:
    cfg = JobConfig()
    ap = argparse.ArgumentParser()
    for section in fields(cfg):
        part = getattr(cfg, section.name)
        for f in fields(part):
            ap.add_argument(f"--{section.name}.{f.name}", type=type(getattr(part, f.name)),
                            default=getattr(part, f.name))
    for key, value in vars(ap.parse_args(argv)).items():
        section, name = key.split(".")
        setattr(getattr(cfg, section), name, value)
    return cfg
