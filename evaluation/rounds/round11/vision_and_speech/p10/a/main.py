import gc
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from clip.loss import contrastive
from clip.model import DualEncoder
from clip.pairs import pairs
from clip.topology import Topology


@torch.no_grad()
def retrieval(model, rank, world):
    img, tok = pairs(10_000, rank, 16)
    a, b, _ = model.module(img, tok)
    top = (a / a.norm(dim=1, keepdim=True)) @ (b / b.norm(dim=1, keepdim=True)).t()
    hit = (top.argmax(1) == torch.arange(16)).float().mean()
    dist.all_reduce(hit)
    return hit.item() / world


def main():
    steps = int(os.environ.get("STEPS", "45"))
    block = int(os.environ.get("NEGATIVE_BLOCK", "2"))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    topo = Topology(block)
    model = DDP(DualEncoder())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        img, tok = pairs(step, rank, 6)
        loss = contrastive(*model(img, tok), topo)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            model.module.scale.clamp_(0.0, 4.0)
        if (step + 1) % 15 == 0:
            r1 = retrieval(model, rank, world)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.3f} r@1 {r1:.3f}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
