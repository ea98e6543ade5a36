"""Fit a small surrogate by SGD to the tours that annealing found."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from anneal import propose
from problem import tour_length


def fit_surrogate(annealer, steps):
    n = len(annealer.cities)
    torch.manual_seed(annealer.cfg.seed)
    model = DDP(nn.Sequential(nn.Linear(2 * n, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss = None
    for _ in range(steps):
        tours = [propose(annealer.tour, annealer.rng) for _ in range(16)]
        x = torch.tensor([annealer.cities[t].reshape(-1).tolist() for t in tours])
        y = torch.tensor([tour_length(annealer.cities, t) for t in tours])
        loss = F.mse_loss(model(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
