import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from vlm.curriculum import Curriculum
from vlm.data import ImageSource, TextSource
from vlm.model import VLM, shard
from vlm.seeding import seed_everything

CFG = {
    "seed": 21,
    "steps": 28,
    "batch": 16,
    "lr": 4e-3,
    "log_every": 7,
    # until, share of image batches, share of text batches
    "stages": [(5, 1.0, 0.0), (16, 0.6, 0.4), (28, 0.5, 0.5)],
}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(CFG["seed"])
    model = shard(VLM())
    opt = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])

    seed_everything(CFG["seed"], rank)
    curriculum = Curriculum(CFG["stages"])
    sources = {"image": ImageSource(), "text": TextSource()}

    t0 = time.perf_counter()
    for step in range(CFG["steps"]):
        kind = curriculum.next_kind(step)
        x, y = sources[kind].batch(CFG["batch"])
        loss = F.cross_entropy(model(kind, x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (step + 1) % CFG["log_every"] == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                rate = (step + 1) * CFG["batch"] * world / (time.perf_counter() - t0)
                print(f"step {step + 1} loss {mean.item() / world:.4f} {rate:.0f} samples/s", flush=True)

    if rank == 0:
        print("batches by kind", curriculum.counts, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
