from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    users: int = 176
    items: int = 60
    dim: int = 16
    events_per_user: int = 6
    negatives: int = 5
    lr: float = 5e-3
    seed: int = 11
    log_every: int = 10
    root: str = "work"
