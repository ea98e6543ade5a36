"""Adagrad with one accumulator a row for tables, one a weight for the rest."""
import torch


class RowwiseAdagrad:
    def __init__(self, params, lr, rowwise):
        self.params, self.lr, self.rowwise = list(params), lr, rowwise
        self.acc = [torch.zeros(p.size(0), 1) if rowwise else torch.zeros_like(p) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, acc in zip(self.params, self.acc):
            square = p.grad.pow(2)
            acc += square.mean(1, keepdim=True) if self.rowwise else square
            p.addcdiv_(p.grad, acc.sqrt().add_(1e-8), value=-self.lr)
