import math

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim + 2, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, dim))

    def forward(self, x, t):
        emb = torch.stack([torch.sin(t * math.pi), torch.cos(t * math.pi)], -1)
        return self.net(torch.cat([x, emb], -1))


class Schedule:
    def __init__(self, timesteps):
        self.T = timesteps
        beta = torch.linspace(1e-3, 0.12, timesteps)
        self.beta = beta
        self.alpha_bar = torch.cumprod(1 - beta, 0)

    def noise(self, x, generator):
        t = torch.randint(0, self.T, (len(x),), generator=generator)
        eps = torch.randn(x.shape, generator=generator)
        ab = self.alpha_bar[t][:, None]
        return ab.sqrt() * x + (1 - ab).sqrt() * eps, t / self.T, eps

    @torch.no_grad()
    def sample(self, net, n, dim, generator):
        x = torch.randn(n, dim, generator=generator)
        for i in reversed(range(self.T)):
            eps = net(x, torch.full((n,), i / self.T))
            b, ab = self.beta[i], self.alpha_bar[i]
            x = (x - b / (1 - ab).sqrt() * eps) / (1 - b).sqrt()
            if i:
                x = x + b.sqrt() * torch.randn(x.shape, generator=generator)
        return x


class EMA:
    def __init__(self, net, decay):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in net.state_dict().items()}

    def update(self, net):
        for k, v in net.state_dict().items():
            self.shadow[k].lerp_(v.detach(), 1 - self.decay)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, sd):
        for k in self.shadow:
            self.shadow[k].copy_(sd[k])
