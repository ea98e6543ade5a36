from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    rounds: int = 24
    publish_every: int = 4
    horizon: int = 20
    arms: int = 6
    context: int = 5
    lr: float = 0.4
    seed: int = 8
