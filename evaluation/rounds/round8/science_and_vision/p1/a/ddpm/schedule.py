import math

import torch


class CosineSchedule:
    def __init__(self, timesteps):
        s = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
        f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        self.abar = (f[1:] / f[0]).clamp(min=1e-4).float()

    def _at(self, t):
        return self.abar[t].view(-1, 1, 1, 1)

    def diffuse(self, x, t, noise):
        a = self._at(t)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def predict_x0(self, x_t, t, eps):
        a = self._at(t)
        return (x_t - (1 - a).sqrt() * eps) / a.sqrt()
