import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from checkpoints import CheckpointManager
from reference import Reference
from settings import Settings


def make_model(s):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(s.vocab, s.dim), nn.Flatten(), nn.Linear(s.dim * s.context, 64), nn.Tanh(), nn.Linear(64, s.vocab)
    )


def batches(s, rank):
    g = torch.Generator().manual_seed(100 + rank)
    table = torch.randint(0, s.vocab, (s.vocab,), generator=torch.Generator().manual_seed(1))
    while True:
        ids = torch.randint(0, s.vocab, (s.batch, s.context), generator=g)
        yield ids, table[ids[:, -1]]


def main():
    dist.init_process_group("gloo")
    s, rank = Settings(), dist.get_rank()
    root = [tempfile.mkdtemp(prefix="finetune_") if rank == 0 else None]
    dist.broadcast_object_list(root, src=0)

    model = make_model(s)
    reference = Reference(model)
    ddp = DDP(model)
    opt = torch.optim.AdamW(ddp.parameters(), lr=s.lr)
    manager = CheckpointManager(root[0], s.keep)

    stream = batches(s, rank)
    for step in range(1, s.steps + 1):
        ids, target = next(stream)
        logits = ddp(ids)
        loss = F.cross_entropy(logits, target) + s.kl_weight * reference.kl(logits, ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % s.save_every == 0:
            manager.save(step, model, opt)
            refreshed = reference.refresh(manager.wait_for(step))
            report = loss.detach().clone()
            dist.all_reduce(report)
            if rank == 0:
                print(f"step {step}: loss {report / dist.get_world_size():.3f}, reference from {refreshed}", flush=True)
    if rank == 0:
        print("kept", manager._files(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
