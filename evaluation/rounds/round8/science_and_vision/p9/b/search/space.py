import math
import random
from dataclasses import dataclass


@dataclass
class Trial:
    number: int
    params: dict


def draw_trials(cfg):
    rng = random.Random(cfg["seed"])
    lo, hi = (math.log(v) for v in cfg["lr"])
    return [
        Trial(i, {"lr": math.exp(rng.uniform(lo, hi)), "width": rng.choice(cfg["width"]), "l2": rng.choice(cfg["l2"])})
        for i in range(cfg["trials"])
    ]
