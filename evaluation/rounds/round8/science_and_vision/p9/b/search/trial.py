"""One trial: train in rungs; give up when a rung's ceiling is exceeded."""
import torch
import torch.nn as nn


class Pruned(Exception):
    def __init__(self, rung, loss):
        super().__init__(f"rung {rung} loss {loss:.3f}")
        self.loss = loss


def dataset(seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.rand(256, 3, generator=gen) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:] * 2
    return x, y


def fit(params, cfg):
    torch.manual_seed(cfg["seed"])
    x, y = dataset(cfg["seed"])
    net = nn.Sequential(nn.Linear(3, params["width"]), nn.Tanh(), nn.Linear(params["width"], 1))
    opt = torch.optim.Adam(net.parameters(), lr=params["lr"], weight_decay=params["l2"])
    step = 0
    for rung, (until, ceiling) in enumerate(zip(cfg["rungs"], cfg["ceiling"])):
        while step < until:
            loss = (net(x) - y).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        if loss.item() > ceiling:
            raise Pruned(rung, loss.item())
    return loss.item()


def run_trial(trial, cfg, board):
    try:
        loss = fit(trial.params, cfg)
    except Pruned as why:
        print(f"trial {trial.number} pruned: {why}", flush=True)
        return
    board.publish(trial.number, state="complete", loss=loss, params=trial.params)
