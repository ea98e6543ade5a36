import math
import random


def candidates(n, seed):
    rng = random.Random(seed)
    return [
        {
            "lr": 10 ** rng.uniform(-3.5, -0.7),
            "hidden": rng.choice([8, 16, 32]),
            "decay": 10 ** rng.uniform(-6, -2),
        }
        for _ in range(n)
    ]


def ladder(n, keep):
    """Sizes of the rungs of successive halving."""
    sizes = [n]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] * keep))
    return sizes
