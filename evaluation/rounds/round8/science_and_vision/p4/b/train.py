"""Fourier neural operator for 1-d Burgers-like fields: channels split over a
tensor-parallel group, samples over a data-parallel group."""
import tomllib
import pathlib

import torch
import torch.distributed as dist

from fno.fields import FieldSampler
from fno.layers import Operator
from fno.parallel import Layout

HERE = pathlib.Path(__file__).resolve().parent


def average_gradients(model, layout):
    """Sharded parameters: mean over the data group. Replicated ones have equal
    gradients inside a tensor group and need the same mean."""
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat, group=layout.dp_group)
    flat /= layout.dp
    at = 0
    for p in model.parameters():
        n = p.numel()
        p.grad.copy_(flat[at:at + n].view_as(p))
        at += n


def relative_error(pred, target):
    return (pred - target).norm() / target.norm()


def train(cfg, layout):
    torch.manual_seed(cfg["seed"])
    model = Operator(cfg["width"], cfg["modes"], cfg["depth"], layout)
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.StepLR(opt, cfg["decay_every"], 0.5)
    sampler = FieldSampler(cfg["grid"], seed=cfg["seed"] + 100 * layout.dp_rank)
    for step in range(cfg["steps"]):
        u0, u1 = sampler.pairs(cfg["batch"])
        pred = model(u0)
        loss = (pred - u1).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(model, layout)
        opt.step()
        sched.step()
        if (step + 1) % cfg["report"] == 0:
            err = relative_error(pred.detach(), u1)
            dist.all_reduce(err)
            if dist.get_rank() == 0:
                print(f"step {step + 1} rel.err {err.item() / dist.get_world_size():.3f}", flush=True)


def main():
    cfg = tomllib.loads((HERE / "burgers.toml").read_text())
    dist.init_process_group("gloo")
    layout = Layout(tp=cfg["parallel"]["tp"])
    train(cfg["train"], layout)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
