# torchrun --standalone --nproc-per-node=3 pipe_train.py
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist

from data import make_loader
from stages import Stage

CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.json")


class Ramp:
    def __init__(self, spec):
        self.a, self.b, self.n = spec["from"], spec["to"], spec["steps"]

    def __call__(self, step):
        t = min(1.0, step / self.n)
        return self.a + t * (self.b - self.a)


@torch.no_grad()
def clip_global(params, limit):
    """Gradient norm over all the stages together."""
    sq = sum((p.grad.pow(2).sum() for p in params), torch.zeros(()))
    dist.all_reduce(sq)
    norm = sq.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(scale)
    return norm.item()


def save_stage(folder, stage, opt, step):
    path = os.path.join(folder, f"stage{stage.index}.pt")
    torch.save({"module": stage.module.state_dict(), "opt": opt.state_dict(), "step": step}, path + ".new")
    os.replace(path + ".new", path)


def train(cfg, folder):
    torch.manual_seed(cfg["seed"] + dist.get_rank())
    stage = Stage(cfg)
    params = list(stage.parameters())
    opt = torch.optim.AdamW(params, lr=cfg["lr"])
    smoothing = Ramp(cfg["label_smoothing"])
    step, began = 0, time.perf_counter()
    for epoch in range(cfg["epochs"]):
        for batch in make_loader(cfg, epoch):
            loss = torch.tensor(stage.run_batch(batch, smoothing(step)))
            norm = clip_global(params, cfg["clip"])
            opt.step()
            opt.zero_grad()
            step += 1
            if step % cfg["log_every"] == 0:
                # only the last stage knows the loss
                dist.broadcast(loss, src=stage.count - 1)
                if stage.first:
                    rate = step / (time.perf_counter() - began)
                    print(f"epoch {epoch} step {step} loss {loss.item():.4f} norm {norm:.3f} {rate:.1f} it/s",
                          flush=True)
        save_stage(folder, stage, opt, step)
        dist.barrier()
    return step


def main():
    with open(CONFIG) as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    if dist.get_world_size() != len(cfg["blocks"]):
        raise SystemExit(f"needs {len(cfg['blocks'])} ranks")
    with tempfile.TemporaryDirectory(prefix="pipe-") as folder:
        steps = train(cfg, folder)
        print(f"stage {dist.get_rank()} finished {steps} steps, wrote {os.listdir(folder)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
