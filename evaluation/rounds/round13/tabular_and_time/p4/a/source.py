import time

import numpy as np


class OrderWarehouse:
    """Stands for the warehouse query: returns (hour, amount) rows of one day."""

    HOLIDAYS = frozenset({21, 45})

    def __init__(self, seed=1, latency_s=0.01):
        self.seed, self.latency_s = seed, latency_s

    def orders(self, day):
        time.sleep(self.latency_s)
        if day in self.HOLIDAYS:
            return np.empty((0, 2))
        rng = np.random.default_rng([self.seed, day])
        n = int(rng.poisson(900 * (1.4 if day % 7 >= 5 else 1.0)))
        hours = np.clip(rng.normal(14, 4.5, n), 0, 23).astype(int)
        return np.stack([hours, rng.gamma(2.0, 15.0, n)], axis=1)
