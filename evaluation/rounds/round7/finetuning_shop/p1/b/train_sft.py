import json
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from corpus import read_corpus, write_corpus
from model import TinyLM
from packing import PAD, rows_for_rank, to_tensor


def lm_loss(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)


def epoch_batches(rows, batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows.shape[0], generator=g)
    for s in range(0, rows.shape[0], batch_size):
        yield rows[order[s:s + batch_size]]


@torch.no_grad()
def held_out_ppl(model, rows):
    model.eval()
    loss = lm_loss(model.module, rows)
    model.train()
    return math.exp(min(loss.item(), 20))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with open("config.json") as f:
        cfg = json.load(f)
    torch.manual_seed(0)

    if rank == 0:
        write_corpus(cfg["corpus"], cfg["docs"], cfg["vocab"])
    dist.barrier()
    docs = read_corpus(cfg["corpus"])
    held_out, docs = docs[:12], docs[12:]

    rows = to_tensor(rows_for_rank(docs, cfg["seq_len"], rank, world), cfg["seq_len"])
    val_rows = to_tensor(rows_for_rank(held_out, cfg["seq_len"], 0, 1), cfg["seq_len"])

    model = DDP(TinyLM(cfg["vocab"], cfg["seq_len"]))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cfg["epochs"] * 20)

    for epoch in range(cfg["epochs"]):
        total = 0.0
        steps = 0
        for batch in epoch_batches(rows, cfg["batch_size"], seed=100 * epoch + rank):
            loss = lm_loss(model, batch)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            total += loss.item()
            steps += 1
        dist.barrier()
        ppl = held_out_ppl(model, val_rows)
        if rank == 0:
            print(f"epoch {epoch} steps {steps} loss {total / steps:.3f} ppl {ppl:.1f}", flush=True)
            torch.save(model.module.state_dict(), "sft.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
