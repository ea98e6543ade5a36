#!/usr/bin/env python
"""Finetune a small recurrent chat model on multi-turn conversations."""
import argparse
import contextlib
import logging
import math
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

log = logging.getLogger("chat")
VOCAB, PAD = 128, 0


# ----------------------------------------------------------------------------- data
def read_conversations(n, seed):
    """Conversations as they come from the export: oldest first, with several turns each."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        turns = int(rng.integers(1, 4)) if i % 3 else int(rng.integers(1, 9))
        if i >= n // 2:
            turns += 2
        text = [rng.integers(3, VOCAB, size=int(rng.integers(3, 9))).tolist() for _ in range(turns)]
        out.append({"id": i, "turns": text})
    return out


class ConversationDataset:
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        return self.records[i]

    def map(self, fn):
        return ConversationDataset([fn(r) for r in self.records])

    def filter(self, fn):
        return ConversationDataset([r for r in self.records if fn(r)])

    def shard(self, num_shards, index):
        """Contiguous shards of the same size, wrapping around at the end."""
        size = math.ceil(len(self.records) / num_shards)
        padded = self.records + self.records[: size * num_shards - len(self.records)]
        return ConversationDataset(padded[index * size: (index + 1) * size])


def tokenize(record):
    ids = [1]
    for k, turn in enumerate(record["turns"]):
        ids += turn + [2]
    return {"id": record["id"], "input_ids": ids, "length": len(ids)}


class LengthGroupedSampler(Sampler):
    """Shuffles, then sorts inside of mega-batches, so that a batch needs little padding."""

    def __init__(self, lengths, batch_size, seed=0, mega=8):
        self.lengths, self.batch_size, self.seed, self.mega = lengths, batch_size, seed, mega
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        chunk = self.batch_size * self.mega
        for i in range(0, len(order), chunk):
            yield from sorted(order[i: i + chunk], key=lambda j: -self.lengths[j])


def pad_batch(rows):
    width = max(r["length"] for r in rows)
    ids = torch.full((len(rows), width), PAD)
    for i, r in enumerate(rows):
        ids[i, : r["length"]] = torch.tensor(r["input_ids"])
    return ids


# ---------------------------------------------------------------------------- model
class ChatModel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids[:, :-1]))
        return F.cross_entropy(self.head(h).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


# ----------------------------------------------------------------------------- loop
class ChatTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.net = DistributedDataParallel(ChatModel(cfg.dim))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg.lr, weight_decay=0.01)
        self.train_loader = self.make_loader(read_conversations(cfg.num_train, 5), grouped=True)
        self.valid_loader = self.make_loader(read_conversations(cfg.num_valid, 6), grouped=False)
        self.best = math.inf

    def make_loader(self, records, grouped):
        data = ConversationDataset(records).map(tokenize)
        data = data.filter(lambda r: r["length"] <= self.cfg.max_length).shard(self.world, self.rank)
        if not grouped:
            return DataLoader(data, batch_size=self.cfg.batch_size, collate_fn=pad_batch)
        sampler = LengthGroupedSampler([r["length"] for r in data.records], self.cfg.batch_size, self.cfg.seed)
        return DataLoader(data, batch_size=self.cfg.batch_size, sampler=sampler, collate_fn=pad_batch)

    def accumulate(self, step, steps):
        if (step + 1) % self.cfg.accum and step + 1 != steps:
            return self.net.no_sync()
        return contextlib.nullcontext()

    def run_epoch(self, epoch):
        self.net.train()
        self.train_loader.sampler.set_epoch(epoch)
        steps, started, tokens = len(self.train_loader), time.time(), 0
        for step, ids in enumerate(self.train_loader):
            ctx = self.accumulate(step, steps)
            with ctx:
                loss = self.net(ids)
                (loss / self.cfg.accum).backward()
            tokens += int((ids != PAD).sum())
            if isinstance(ctx, contextlib.nullcontext):
                nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg.max_norm)
                self.opt.step()
                self.opt.zero_grad()
            if step % 10 == 0 and self.rank == 0:
                log.info("epoch %d step %d/%d loss %.3f  %.0f tok/s", epoch, step, steps, loss.item(),
                         tokens / (time.time() - started))

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for ids in self.valid_loader:
            n = int((ids[:, 1:] != PAD).sum())
            sums += torch.tensor([self.net.module(ids).item() * n, n], dtype=torch.float64)
        parts = [torch.zeros_like(sums) for _ in range(self.world)]
        dist.all_gather(parts, sums)
        total = torch.stack(parts).sum(0)
        return math.exp(total[0] / total[1])

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.run_epoch(epoch)
            ppl = self.validate()
            if self.rank == 0:
                log.info("epoch %d perplexity %.2f", epoch, ppl)
            if ppl < self.best:
                self.best = ppl
                if self.rank == 0:
                    os.makedirs(self.cfg.out, exist_ok=True)
                    torch.save({"model": self.net.module.state_dict(), "ppl": ppl}, f"{self.cfg.out}/best.pt")
        dist.barrier()
        dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), f"chat_{os.getppid()}"))
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--dim", type=int, default=48)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--max-length", type=int, default=48)
    ap.add_argument("--num-train", type=int, default=400)
    ap.add_argument("--num-valid", type=int, default=61)
    ap.add_argument("--seed", type=int, default=3)
    cfg = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    ChatTrainer(cfg).fit()


if __name__ == "__main__":
    main()
