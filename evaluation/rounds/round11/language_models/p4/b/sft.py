"""Supervised fine-tuning on packed chats; runs in two legs, the second resumes the first."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import packing
import state

VOCAB, LENGTH, BATCH, SHARDS = 64, 48, 2, (70, 62, 44)


class ChatModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(LENGTH, dim)
        self.rnn = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids, pos):
        x, _ = self.rnn(self.tok(ids) + self.pos(pos))
        return self.head(x)


def build(rank):
    torch.manual_seed(5)
    model = DDP(ChatModel())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, total_iters=50)
    chats = packing.make_chats(SHARDS[rank], VOCAB, seed=40 + rank)
    rows = packing.pack(chats, LENGTH)
    loader = packing.PackedLoader(rows, BATCH, seed=rank)
    return model, opt, sched, loader


def train_step(model, opt, sched, batch):
    ids, labels, pos = batch.unbind(1)
    logits = model(ids, pos)
    loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=packing.IGNORE
    )
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    return loss.item()


def leg(rank, path, until, log_every):
    model, opt, sched, loader = build(rank)
    step = 0
    if os.path.exists(path):
        step = state.restore(path, model, opt, sched, loader)
    while step < until:
        loss = train_step(model, opt, sched, loader.next_batch())
        step += 1
        if rank == 0 and step % log_every == 0:
            print(f"step {step} loss {loss:.3f} epoch {loader.epoch}", flush=True)
    state.save(path, step, model, opt, sched, loader)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--legs", type=int, nargs="+", default=[8, 42])
    args.add_argument("--log-every", type=int, default=6)
    args = args.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp(prefix="sft_") if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    path = os.path.join(folder[0], "last.pt")
    for until in args.legs:
        leg(rank, path, until, args.log_every)
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])
        print("done")
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
