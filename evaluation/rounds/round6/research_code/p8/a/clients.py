import numpy as np
import torch


class ClientData:
    """Non-iid clients: each client holds a few of the classes, sizes differ."""

    def __init__(self, clients, classes, dim, seed):
        rng = np.random.default_rng(seed)
        self.centres = rng.normal(size=(classes, dim)) * 1.5
        self.x, self.y = [], []
        for _ in range(clients):
            own = rng.choice(classes, size=2, replace=False)
            n = int(rng.integers(24, 80))
            y = rng.choice(own, size=n)
            x = self.centres[y] + rng.normal(size=(n, dim))
            self.x.append(torch.tensor(x, dtype=torch.float32))
            self.y.append(torch.tensor(y))

    def __len__(self):
        return len(self.x)

    def size(self, c):
        return len(self.y[c])


class CohortSampler:
    """The clients of each round; drawn the same on every rank from the shared seed."""

    def __init__(self, clients, per_round, seed):
        self.clients = clients
        self.per_round = per_round
        self.rng = np.random.default_rng(seed)

    def cohort(self):
        return np.sort(self.rng.choice(self.clients, self.per_round, replace=False)).tolist()

    def example(self, data, c, n=3):
        """A few rows of a client, for the log."""
        idx = self.rng.choice(data.size(c), n, replace=False)
        return data.y[c][torch.as_tensor(idx)].tolist()
