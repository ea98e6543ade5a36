import torch
import torch.distributed as dist
from torch import nn

from burgers import trajectory
from measure import validation_error
from stencil import Stencil, rollout

CONFIG = dict(points=180, cases=6, length=8, epochs=6, lr=3e-3, start_horizon=1, max_horizon=4, promote_below=0.26)


class Curriculum:
    """Lengthens the unrolled part of the loss when the model is good enough."""

    def __init__(self, cfg):
        self.horizon = cfg["start_horizon"]
        self.limit = cfg["max_horizon"]
        self.promote_below = cfg["promote_below"]

    def update(self, error):
        if error < self.promote_below and self.horizon < self.limit:
            self.horizon += 1


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train_epoch(model, opt, cases, horizon):
    total = 0.0
    for case in cases:
        start = case[0, None, None]
        target = case[1:1 + horizon, None, None]
        loss = nn.functional.mse_loss(rollout(model, start, horizon), target)
        opt.zero_grad()
        loss.backward()
        average(model)
        opt.step()
        total += loss.item()
    return total / len(cases)


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    per = cfg["points"] // world
    piece = slice(rank * per, (rank + 1) * per)
    cases = [trajectory(cfg["points"], c, cfg["length"])[:, piece] for c in range(cfg["cases"] + 1)]
    held_out = cases.pop()

    torch.manual_seed(1)
    model = Stencil()
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    curriculum = Curriculum(cfg)
    for epoch in range(cfg["epochs"]):
        loss = train_epoch(model, opt, cases, curriculum.horizon)
        error = validation_error(model, held_out, horizon=4)
        if rank == 0:
            print(f"epoch {epoch}: horizon {curriculum.horizon} loss {loss:.2e} error {error:.4f}", flush=True)
        curriculum.update(error)

    dist.barrier()
    if rank == 0:
        print(f"trained up to horizon {curriculum.horizon}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)
