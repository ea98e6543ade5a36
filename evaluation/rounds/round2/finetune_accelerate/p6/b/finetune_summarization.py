# Sequence-to-sequence finetuning with generation at evaluation time.
from __future__ import annotations

import argparse
import collections
import logging
import os
import random
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

PAD, BOS, EOS, VOCAB = 0, 1, 2, 60
logger = logging.getLogger("summarization")


class Accelerator:
    def __init__(self):
        dist.init_process_group("gloo")
        self.process_index, self.num_processes = dist.get_rank(), dist.get_world_size()
        self.is_main_process = self.process_index == 0
        self.remainder = -1

    def prepare(self, model, *loaders):
        return (nn.parallel.DistributedDataParallel(model), *[self._shard(l) for l in loaders])

    def _shard(self, loader):
        loader.accelerator = self
        return loader

    def gather(self, tensor):
        out = [torch.zeros_like(tensor) for _ in range(self.num_processes)]
        dist.all_gather(out, tensor.contiguous())
        return torch.cat(out)

    def gather_for_metrics(self, *tensors):
        """Gathers and leaves out what was repeated to fill up the last batch."""
        whole = [self.gather(t) for t in tensors]
        return [t[: self.remainder] for t in whole] if self.remainder > 0 else whole

    def pad_across_processes(self, tensor, dim=1, pad_index=PAD):
        size = torch.tensor([tensor.shape[dim]])
        width = int(self.gather(size).max())
        if width == tensor.shape[dim]:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = width
        out = tensor.new_full(shape, pad_index)
        out.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return out

    def wait_for_everyone(self):
        dist.barrier()


class ShardedLoader:
    """Every process takes its slice of each global batch; the last one is filled up from the start."""

    def __init__(self, examples, batch_size, collator, shuffle_seed=None):
        self.examples, self.batch_size, self.collator, self.shuffle_seed = examples, batch_size, collator, shuffle_seed
        self.accelerator, self.epoch = None, 0

    def __len__(self):
        per = self.batch_size * self.accelerator.num_processes
        return -(-len(self.examples) // per)

    def __iter__(self):
        acc, order = self.accelerator, list(range(len(self.examples)))
        if self.shuffle_seed is not None:
            random.Random(self.shuffle_seed + self.epoch).shuffle(order)
        per = self.batch_size * acc.num_processes
        for k in range(len(self)):
            chunk = order[k * per: (k + 1) * per]
            acc.remainder = len(chunk) if len(chunk) < per else -1
            chunk = chunk + order[: per - len(chunk)]
            lo = acc.process_index * self.batch_size
            yield self.collator([self.examples[i] for i in chunk[lo: lo + self.batch_size]])
        acc.remainder = -1


class DataCollatorForSeq2Seq:
    def __init__(self, pad_to_multiple_of=1):
        self.multiple = pad_to_multiple_of

    def _pad(self, rows):
        width = -(-max(map(len, rows)) // self.multiple) * self.multiple
        return torch.tensor([r + [PAD] * (width - len(r)) for r in rows])

    def __call__(self, features):
        return {k: self._pad([f[k] for f in features]) for k in ("input_ids", "labels")}


def build_examples(n, seed):
    """The 'summary' of a document holds its repeated words in the order of their first appearance."""
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        doc = [rng.randrange(3, VOCAB) for _ in range(rng.randint(6, 30))]
        doc += rng.sample(doc, k=rng.randint(1, len(doc) // 2))
        counts = collections.Counter(doc)
        out.append({"input_ids": doc, "labels": [w for w in dict.fromkeys(doc) if counts[w] > 1] + [EOS]})
    return out


class Seq2Seq(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.enc, self.dec = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.proj = nn.Linear(dim, VOCAB)

    def forward(self, input_ids, labels):
        _, h = self.enc(self.emb(input_ids))
        shifted = torch.cat([torch.full((len(labels), 1), BOS), labels[:, :-1]], 1)
        y, _ = self.dec(self.emb(shifted), h)
        return nn.functional.cross_entropy(self.proj(y).flatten(0, 1), labels.flatten(), ignore_index=PAD)

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        _, h = self.enc(self.emb(input_ids))
        tok = torch.full((len(input_ids), 1), BOS)
        out = []
        for _ in range(max_new_tokens):
            y, h = self.dec(self.emb(tok), h)
            tok = self.proj(y).argmax(-1)
            out.append(tok)
        return torch.cat(out, 1)


def rouge_one(preds, refs):
    scores = []
    for p, r in zip(preds, refs):
        p, r = (collections.Counter(t for t in s.tolist() if t > EOS) for s in (p, r))
        hit = sum((p & r).values())
        scores.append(2 * hit / max(1, sum(p.values()) + sum(r.values())))
    return float(np.mean(scores))


def evaluate(accelerator, model, loader, max_new_tokens):
    model.eval()
    preds, refs = [], []
    for batch in loader:
        generated = model.module.generate(batch["input_ids"], max_new_tokens)
        labels = accelerator.pad_across_processes(batch["labels"])
        generated, labels = accelerator.gather_for_metrics(generated, labels)
        preds += list(generated)
        refs += list(labels)
    model.train()
    assert len(refs) == len(loader.examples)
    return rouge_one(preds, refs)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--output-dir", default=os.path.join(tempfile.gettempdir(), f"summ_{os.getppid()}"))
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--max-new-tokens", type=int, default=12)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    random.seed(0), np.random.seed(0), torch.manual_seed(0)

    accelerator = Accelerator()
    collator = DataCollatorForSeq2Seq()
    train = ShardedLoader(build_examples(420, 1), args.batch_size, collator, shuffle_seed=0)
    valid = ShardedLoader(build_examples(77, 2), args.batch_size, collator)
    model, train, valid = accelerator.prepare(Seq2Seq(), train, valid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    best = -1.0
    for epoch in range(args.epochs):
        train.epoch = epoch
        for step, batch in enumerate(train):
            loss = model(**batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        score = evaluate(accelerator, model, valid, args.max_new_tokens)
        if accelerator.is_main_process:
            logger.info("epoch %d: loss %.3f rouge1 %.4f", epoch, loss.item(), score)
            if score > best:
                os.makedirs(args.output_dir, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(args.output_dir, "pytorch_model.bin"))
        best = max(best, score)
    accelerator.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
