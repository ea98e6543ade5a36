import math

import torch


class Cosine:
    def __init__(self, steps=100):
        t = torch.arange(steps + 1) / steps
        abar = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        self.abar = (abar / abar[0]).clamp(min=1e-4)
        self.steps = steps

    def noisy(self, x0, t, eps):
        a = self.abar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * eps
