import argparse
from dataclasses import asdict, dataclass, fields


@dataclass
class Config:
    seed: int = 0
    clips: int = 240
    samples: int = 800
    n_fft: int = 64
    hop: int = 32
    classes: int = 6
    width: int = 16
    batch: int = 16
    epochs: int = 3
    lr: float = 3e-3
    cache_dir: str = "cache"

    @classmethod
    def from_args(cls):
        p = argparse.ArgumentParser()
        for f in fields(cls):
            p.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
        return cls(**vars(p.parse_args()))

    def dict(self):
        return asdict(self)
