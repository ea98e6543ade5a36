import argparse
import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass
class Settings:
    rank: int = 0
    world_size: int = 1
    seed: int = 21
    corpus: int = 1200
    queries: int = 768
    dim: int = 40
    teacher_dim: int = 96
    negatives: int = 6
    batch: int = 16
    epochs: int = 4
    lr: float = 3e-3
    cache_dir: str = "cache"

    def fingerprint(self):
        """Names the artefacts on disk, so that a changed setting never reuses a stale index."""
        runtime = {"world_size", "cache_dir", "epochs", "lr", "batch"}
        wanted = {k: v for k, v in asdict(self).items() if k not in runtime}
        return hashlib.sha1(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]


def parse(rank, world_size):
    p = argparse.ArgumentParser()
    for name in ("corpus", "queries", "negatives", "batch", "epochs", "seed"):
        p.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    p.add_argument("--lr", type=float, default=Settings.lr)
    p.add_argument("--cache-dir", default=Settings.cache_dir)
    return Settings(rank=rank, world_size=world_size, **vars(p.parse_args()))
