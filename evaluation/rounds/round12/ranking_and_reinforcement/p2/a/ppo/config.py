from dataclasses import dataclass, field


@dataclass
class OptimConfig:
    lr: float = 8e-3
    clip: float = 0.2
    entropy: float = 0.01
    epochs: int = 5
    target_kl: float = 0.012


@dataclass
class PPOConfig:
    iterations: int = 8
    horizon: int = 32
    envs: int = 4
    gamma: float = 0.97
    seed: int = 5
    optim: OptimConfig = field(default_factory=OptimConfig)
