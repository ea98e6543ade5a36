import hashlib
import json
import random
from dataclasses import asdict, dataclass

import numpy as np
import torch


@dataclass
class HarnessConfig:
    vocab: int = 48
    hidden: int = 40
    seq_len: int = 20
    batch: int = 8
    steps: int = 36
    eval_every: int = 12
    lr: float = 4e-3
    num_fewshot: int = 2
    docs_per_task: int = 60
    tasks: tuple = ("copy", "shift", "mirror")
    seed: int = 1234

    def fingerprint(self):
        """Identifies the evaluation requests that these settings produce."""
        keys = ("vocab", "num_fewshot", "docs_per_task", "tasks", "seed")
        text = json.dumps({k: asdict(self)[k] for k in keys}, sort_keys=True)
        return hashlib.sha1(text.encode()).hexdigest()[:12]


def seed_everything(cfg, rank):
    """Every rank draws its own training data; returns the seed that was set."""
    seed = cfg.seed + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed
