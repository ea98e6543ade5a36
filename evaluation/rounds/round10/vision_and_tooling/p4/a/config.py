from dataclasses import dataclass, field


@dataclass
class Stage:
    name: str
    steps: int
    lr: float
    resume: bool = False


@dataclass
class Config:
    seed: int = 3
    dim: int = 8
    hidden: int = 32
    timesteps: int = 50
    batch: int = 32
    ema_decay: float = 0.98
    save_every: int = 20
    sample_every: int = 25
    workdir: str = "work"
    stages: list = field(default_factory=lambda: [
        Stage("base", 40, 2e-3),
        Stage("finetune", 100, 5e-4, resume=True),
    ])
