import torch
import torch.nn as nn
import torch.nn.functional as F


def task(seed=77, n=240, dim=6):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=gen)
    y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] * 0.5 + 0.1 * torch.randn(n, generator=gen)
    return (x[:180], y[:180]), (x[180:], y[180:])


def build(params, dim=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, params["hidden"]), nn.Tanh(), nn.Linear(params["hidden"], 1))


def fit(model, params, steps, seed):
    (x, y), (vx, vy) = task()
    opt = torch.optim.AdamW(model.parameters(), lr=params["lr"], weight_decay=params["decay"])
    gen = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        i = torch.randint(len(x), (32,), generator=gen)
        loss = F.mse_loss(model(x[i]).squeeze(1), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        return F.mse_loss(model(vx).squeeze(1), vy).item()
