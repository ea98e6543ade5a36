"""Next-day demand forecast per hour, from the two weeks before."""
import os
import shutil
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from feature_cache import FeatureCache
from source import OrderWarehouse

DAYS = list(range(60))
HISTORY = 14
STEPS = int(os.environ.get("FORECAST_STEPS", 60))


class HourForecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.weekday = nn.Embedding(7, 4)
        self.gru = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(36, 24)

    def forward(self, history, weekday):
        _, h = self.gru(history)
        return self.head(torch.cat([h[-1], self.weekday(weekday)], dim=1))


def windows(series, weekdays):
    x = np.stack([series[i - HISTORY:i] for i in range(HISTORY, len(series))])
    return torch.from_numpy(x), torch.from_numpy(weekdays[HISTORY:]), torch.from_numpy(series[HISTORY:])


def load_series(cache):
    hourly, calendar = zip(*cache.load(DAYS))
    series = np.log1p(np.stack(hourly))
    mean, std = series.mean(), series.std()
    return (series - mean) / std, np.array([c[0, 0] for c in calendar])


def fit(model, data, rank, world):
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    x, weekday, y = (t[:-7] for t in data)
    picks = torch.Generator().manual_seed(100 + rank)
    for step in range(1, STEPS + 1):
        idx = torch.randint(len(x), (16,), generator=picks)
        loss = nn.functional.smooth_l1_loss(model(x[idx], weekday[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            shown = loss.detach() / world
            dist.reduce(shown, dst=0)
            if rank == 0:
                print(f"step {step} loss {shown.item():.4f}", file=sys.stderr, flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    root = os.path.join(tempfile.gettempdir(), f"demand-{os.environ['TORCHELASTIC_RUN_ID']}")
    cache = FeatureCache(root, OrderWarehouse())
    cache.ensure_all(DAYS, start=rank * len(DAYS) // world)
    dist.barrier()
    series, weekdays = load_series(cache)
    data = windows(series, weekdays)
    torch.manual_seed(0)
    model = DistributedDataParallel(HourForecaster())
    fit(model, data, rank, world)
    if rank == 0:
        with torch.no_grad():
            mae = (model.module(data[0][-7:], data[1][-7:]) - data[2][-7:]).abs().mean()
        print(f"holdout mae {mae.item():.4f}", file=sys.stderr, flush=True)
        shutil.rmtree(root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
