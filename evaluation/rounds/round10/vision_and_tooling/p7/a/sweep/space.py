"""Search space of the sweep and the sampler that walks through it."""
import random

SPACE = {
    "lr": [0.3, 0.1, 0.03],
    "hidden": [8, 16],
    "mixup": [0.0, 0.4],
}


def key_of(params):
    return ",".join(f"{k}={params[k]}" for k in sorted(params))


class RandomSearch:
    def __init__(self, seed):
        self.rng = random.Random(seed)

    def ask(self):
        return {k: self.rng.choice(v) for k, v in SPACE.items()}
