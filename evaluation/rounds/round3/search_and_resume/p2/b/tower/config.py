from dataclasses import dataclass
from pathlib import Path


@dataclass
class Config:
    out: str = str(Path(__file__).resolve().parent.parent / "scratch")
    max_steps: int = 120
    save_every: int = 20
    keep: int = 3
    batch: int = 32
    dim: int = 48
    vocab: int = 600
    lr: float = 3e-3
    seed: int = 5
    max_attempts: int = 3
    # the spot market gives notice after this many steps of the first attempt
    notice_after: int = 73
    grace_s: float = 2.0
    disk_mb_per_s: float = 0.1
