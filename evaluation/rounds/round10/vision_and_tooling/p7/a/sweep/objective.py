import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def spirals(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    r = rng.uniform(0.2, 2, n)
    a = 3 * r + np.pi * y
    x = np.stack([r * np.cos(a), r * np.sin(a)], 1) + 0.05 * rng.normal(size=(n, 2))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))


def mixup(x, y, alpha, rng):
    if alpha == 0:
        return x, y
    lam = float(rng.beta(alpha, alpha))
    perm = torch.from_numpy(rng.permutation(len(x)))
    return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def train_one(params, group, steps=25, batch=64):
    """Data-parallel training inside `group`; validation loss averaged over its ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, params["hidden"]), nn.Tanh(), nn.Linear(params["hidden"], 1))
    model = DDP(net, process_group=group)
    opt = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    part = dist.get_rank(group)
    x, y = spirals(1024, seed=10 + part)
    rng = np.random.default_rng(part)
    for s in range(steps):
        i = rng.integers(0, len(x), batch)
        xb, yb = mixup(x[i], y[i], params["mixup"], rng)
        loss = nn.functional.binary_cross_entropy_with_logits(model(xb)[:, 0], yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        xv, yv = spirals(256, seed=50 + part)
        val = nn.functional.binary_cross_entropy_with_logits(net(xv)[:, 0], yv)
    dist.all_reduce(val, group=group)
    return val.item() / dist.get_world_size(group)
