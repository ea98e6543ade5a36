from dataclasses import dataclass


@dataclass
class Settings:
    vocab: int = 50
    dim: int = 24
    context: int = 8
    batch: int = 8
    steps: int = 20
    save_every: int = 4
    keep: int = 2
    lr: float = 3e-3
    kl_weight: float = 0.02
