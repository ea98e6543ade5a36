from dataclasses import dataclass, field


@dataclass
class TowerSpec:
    in_dim: int
    hidden: int


@dataclass
class Config:
    towers: dict = field(default_factory=lambda: {
        "waveform": TowerSpec(64, 96),
        "logmel": TowerSpec(40, 80),
        "chroma": TowerSpec(12, 24),
        "speaker": TowerSpec(16, 32),
        "transcript": TowerSpec(48, 72),
        "lips": TowerSpec(30, 56),
        "scene": TowerSpec(20, 44),
    })
    frozen: tuple = ("speaker",)
    embed: int = 32
    classes: int = 6
    clips: int = 640
    batch: int = 16
    epochs: int = 5
    lr: float = 3e-3
    tower_lr_scale: float = 0.5
    seed: int = 5
