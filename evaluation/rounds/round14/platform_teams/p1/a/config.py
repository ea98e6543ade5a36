from dataclasses import dataclass, field


@dataclass
class PlannerConfig:
    token_budget: int = 256
    bucket_width: int = 12
    min_rows: int = 3
    seed: int = 17


@dataclass
class TrainConfig:
    vocab: int = 96
    dim: int = 32
    samples: int = 1400
    max_len: int = 112
    epochs: int = 3
    lr: float = 3e-3
    log_every: int = 10
    planner: PlannerConfig = field(default_factory=PlannerConfig)
