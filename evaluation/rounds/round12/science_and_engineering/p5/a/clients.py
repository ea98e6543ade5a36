"""Every rank is one plant with its own operating range and its own pump data."""
import numpy as np
import torch


def head_curve(flow, speed, wear):
    return speed ** 2 * (1.2 - 0.4 * wear) - 0.6 * flow ** 2 + 0.15 * np.sin(3 * flow * speed)


class Plant:
    def __init__(self, index, rows):
        rng = np.random.default_rng(900 + index)
        centre = 0.4 + 0.5 * index
        flow = rng.normal(centre, 0.25, rows)
        speed = rng.uniform(0.6, 1.4, rows)
        wear = rng.beta(2, 4 + index, rows)
        x = np.stack([flow, speed, wear], axis=1)
        y = head_curve(flow, speed, wear) + rng.normal(0, 0.02, rows)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1)
        self.rng = torch.Generator().manual_seed(index)

    def __len__(self):
        return len(self.x)

    def batches(self, size):
        for ids in torch.randperm(len(self), generator=self.rng).split(size):
            yield self.x[ids], self.y[ids]


def reference_set(rows=300):
    rng = np.random.default_rng(4)
    flow, speed, wear = rng.uniform(0, 1.8, rows), rng.uniform(0.6, 1.4, rows), rng.uniform(0, 1, rows)
    x = np.stack([flow, speed, wear], axis=1)
    return torch.from_numpy(x), torch.from_numpy(head_curve(flow, speed, wear)).unsqueeze(1)
