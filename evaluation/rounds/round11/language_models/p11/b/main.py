"""Trains a small FSDP2 language model on task examples, with evaluations in between."""
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from harness import runner, tasks

VOCAB, DIM, BATCH, STEPS, EVAL_AT = 32, 40, 8, 40, (20, 40)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.ff(self.n2(x))


class TaskLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM, padding_idx=tasks.PAD)
        self.pos = nn.Embedding(tasks.CONTEXT + 8, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(x) * 1.0


def training_rows(pool, rng):
    rows = []
    for prompt, answer in rng.sample(pool, BATCH):
        row = (prompt + answer)[: tasks.CONTEXT + 1]
        rows.append([tasks.PAD] * (tasks.CONTEXT + 1 - len(row)) + row)
    return torch.tensor(rows)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    model = TaskLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    pool = [r for t in tasks.suite(120, VOCAB) for r in t.requests]
    tests = tasks.suite(24, VOCAB)
    rng = random.Random(700 + rank)
    for step in range(1, STEPS + 1):
        rows = training_rows(pool, rng)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=tasks.PAD)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step in EVAL_AT:
            report = runner.evaluate(model, tests, batch_size=6)
            if rank == 0:
                shown = " ".join(f"{k} {v:.2f}" for k, v in report.items())
                print(f"step {step} loss {loss.item():.3f} {shown}", flush=True)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
