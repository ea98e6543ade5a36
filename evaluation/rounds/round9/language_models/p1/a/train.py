import json
import os
import tempfile

import torch
import torch.distributed as dist

from budget import TokenBudget
from data import PAD, PackedStream, load_docs, write_corpus
from model import build, lm_loss


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo")
    cfg = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.json")))

    where = [tempfile.mkdtemp(prefix="pretrain_") if rank == 0 else None]
    dist.broadcast_object_list(where, src=0)
    corpus = os.path.join(where[0], "corpus.npz")
    if rank == 0:
        write_corpus(corpus, cfg)
    dist.barrier()

    docs = load_docs(corpus, rank, world)
    held_out, docs = docs[:40], docs[40:]
    stream = iter(PackedStream(docs, cfg["seq_len"], cfg["batch"], cfg["seed"] + rank))
    valid = iter(PackedStream(held_out, cfg["seq_len"], cfg["batch"], 0))

    model = build(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    budget = TokenBudget(cfg["token_budget"], control)
    step = 0
    while not budget.exhausted:
        ids = next(stream)
        for group in opt.param_groups:
            group["lr"] = cfg["lr"] * min(1.0, (step + 1) / cfg["warmup"]) * (1 - 0.9 * budget.progress())
        loss = lm_loss(model(ids), ids, PAD)
        loss.backward()
        opt.step()
        opt.zero_grad()
        budget.consume(ids, PAD)
        step += 1
        if rank == 0 and step % cfg["log_every"] == 0:
            print(f"step {step} loss {loss.item():.3f} budget {budget.progress():.0%}", flush=True)

    dist.barrier(group=control)
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for _ in range(cfg["eval_batches"]):
            ids = next(valid)
            total += torch.tensor([lm_loss(model(ids), ids, PAD).item(), 1.0])
    dist.all_reduce(total)
    if rank == 0:
        print(f"done: {step} steps, validation loss {total[0] / total[1]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
