"""Random search over optimiser settings of the airfoil surrogate."""
import numpy as np

SPACE = {
    "lr": ("log", 1e-3, 2e-2),
    "weight_decay": ("log", 1e-6, 1e-3),
    "passes": ("choice", (2, 3, 4, 5)),
    "batch": ("choice", (16, 32)),
    "dropout": ("uniform", 0.0, 0.2),
}


class RandomSearch:
    def __init__(self, seed, stream):
        self.rng = np.random.default_rng([seed, stream])
        self.history = []

    def ask(self):
        trial = {}
        for name, spec in SPACE.items():
            if spec[0] == "log":
                trial[name] = float(np.exp(self.rng.uniform(np.log(spec[1]), np.log(spec[2]))))
            elif spec[0] == "uniform":
                trial[name] = float(self.rng.uniform(spec[1], spec[2]))
            else:
                trial[name] = int(self.rng.choice(spec[1]))
        return trial

    def tell(self, trial, score):
        self.history.append((score, trial))

    def best(self):
        return min(self.history, key=lambda item: item[0])
