import torch
import torch.nn as nn
import torch.nn.functional as F

from .registry import task


class Task(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.head = nn.Linear(dim, 1)

    def make_labels(self, x, gen):
        raise NotImplementedError

    def loss(self, h, y):
        return F.binary_cross_entropy_with_logits(self.head(h).squeeze(-1), y)


@task("ctr", weight=5)
class Click(Task):
    def make_labels(self, x, gen):
        return (x[:, 0] + 0.3 * torch.randn(len(x), generator=gen) > 0).float()


@task("cvr", weight=2)
class Conversion(Task):
    def make_labels(self, x, gen):
        return (x[:, 1] * x[:, 0] > 0.5).float()


@task("dwell", weight=3)
class Dwell(Task):
    def make_labels(self, x, gen):
        return x[:, 2].abs() + 0.1 * torch.rand(len(x), generator=gen)

    def loss(self, h, y):
        return F.mse_loss(self.head(h).squeeze(-1), y)
