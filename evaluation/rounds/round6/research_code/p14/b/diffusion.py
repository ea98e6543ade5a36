import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    """Predicts the noise of a noisy 2-d point at a time step; holds its own schedule."""

    def __init__(self, steps=50, hidden=64):
        super().__init__()
        self.steps = steps
        beta = torch.linspace(1e-4, 0.08, steps)
        self.register_buffer("beta", beta)
        self.register_buffer("abar", torch.cumprod(1 - beta, 0))
        self.net = nn.Sequential(
            nn.Linear(2 + 8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )

    def embed(self, t):
        freq = torch.exp(-math.log(100.0) * torch.arange(4) / 3)
        arg = t[:, None].float() * freq
        return torch.cat([arg.sin(), arg.cos()], 1)

    def predict(self, x, t):
        return self.net(torch.cat([x, self.embed(t)], 1))

    def p_losses(self, x0, t, noise):
        a = self.abar[t][:, None]
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return F.mse_loss(self.predict(xt, t), noise)

    def forward(self, x0, t, noise):
        return self.p_losses(x0, t, noise)

    @torch.no_grad()
    def sample(self, n, gen):
        x = torch.randn(n, 2, generator=gen)
        for i in reversed(range(self.steps)):
            t = torch.full((n,), i)
            beta, abar = self.beta[i], self.abar[i]
            x = (x - beta / (1 - abar).sqrt() * self.predict(x, t)) / (1 - beta).sqrt()
            if i:
                x = x + beta.sqrt() * torch.randn(n, 2, generator=gen)
        return x
