import torch


class Adagrad:
    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.acc = [torch.full_like(p, 0.1) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, a in zip(self.params, self.acc):
            a.addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, a.sqrt(), value=-self.lr)
