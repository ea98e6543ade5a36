import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from vision.evaluate import run_eval
from vision.files import CLASSES, write_files
from vision.loaders import endless, make_loader

ROOT = os.environ.get("DATA_ROOT", "sessions")
STEPS, EVAL_INTERVAL, ACCUM = 40, 10, 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_files(ROOT, "train", [60, 90, 75, 50, 110, 85], seed=1)
        write_files(ROOT, "val", [64, 21, 13], seed=2)
    dist.barrier()

    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES)))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=STEPS)
    train, n_train = make_loader(ROOT, "train", rank, world, shuffle=True, drop_last=True)
    val, n_val = make_loader(ROOT, "val", rank, world)
    weight = torch.tensor([float(n_val)])
    dist.all_reduce(weight)
    share = n_val / weight.item()
    stream = endless(train)

    for step in range(1, STEPS + 1):
        for micro in range(ACCUM):
            model.require_backward_grad_sync = micro == ACCUM - 1
            x, y = next(stream)
            (F.cross_entropy(model(x), y) / ACCUM).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % EVAL_INTERVAL == 0:
            result = run_eval(model.module, val) * share
            dist.all_reduce(result)
            if rank == 0:
                print(f"step {step} val loss {result[0]:.4f} top1 {result[1]:.3f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(ROOT, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
