import itertools
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from accumulate import Accumulator
from dataset import Progressions
from lm import LM, next_token_loss

MICRO, BATCH, EPOCHS = 4, 8, 3


def chunks(loader, size):
    it = iter(loader)
    while chunk := list(itertools.islice(it, size)):
        if len(chunk) == size:
            yield chunk


@torch.no_grad()
def validate(model, data):
    loss = next_token_loss(model.module, data.rows[dist.get_rank()::dist.get_world_size()])
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(LM())
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * 8)
    train, held_out = Progressions(512, 14), Progressions(64, 14, seed=60)
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    accumulator = Accumulator(model, MICRO)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batches in chunks(loader, MICRO):
            opt.zero_grad()
            loss = accumulator.backward(batches, next_token_loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
        val = validate(model, held_out)
        if rank == 0:
            print(f"epoch {epoch} train {loss:.3f} validation {val:.3f}", flush=True)
    if rank == 0:
        path = os.path.join(tempfile.mkdtemp(prefix="accum_"), "final.pt")
        torch.save(model.module.state_dict(), path)
        print("saved", os.path.getsize(path), "bytes", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
