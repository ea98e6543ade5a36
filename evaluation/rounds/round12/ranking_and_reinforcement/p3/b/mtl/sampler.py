import random


class TaskSampler:
    """Draws the task of each step, in proportion to the task weights."""

    def __init__(self, tasks, temperature=0.7):
        self.names = sorted(tasks)
        self.weights = [tasks[n].weight ** temperature for n in self.names]

    def next(self):
        return random.choices(self.names, self.weights)[0]


def seed_everything(seed):
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
