#!/usr/bin/env python
"""
Continue the pretraining of a causal language model on a text corpus without a Trainer.

The corpus is tokenized once by the main process with a pool of workers; the result lies in a cache
directory under a fingerprint of everything that has an influence on it, so that a second run (and the
other processes of this one) read it from there.
"""
import argparse
import hashlib
import json
import logging
import math
import multiprocessing as mp
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

logger = logging.getLogger("run_clm")

WORDS = ("the of and to in a is that for it as was with be by on not he his but at are this have from or had "
         "an they which one you were all her she there would their we him been has when who will no more if out").split()
SPECIAL_TOKENS = {"<pad>", "<unk>", "<s>", "</s>", "<mask>", "<sep>", "<cls>", "<user>", "<assistant>", "<tool>"}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache_dir", type=Path, default=Path(tempfile.gettempdir()) / f"clm_cache_{os.getppid()}")
    parser.add_argument("--output_dir", type=Path, default=Path(tempfile.gettempdir()) / f"clm_out_{os.getppid()}")
    parser.add_argument("--num_documents", type=int, default=400)
    parser.add_argument("--preprocessing_num_workers", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--overwrite_cache", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class WordTokenizer:
    def __init__(self, words, special_tokens):
        self.special_tokens = special_tokens
        self.vocab = {t: i for i, t in enumerate(sorted(special_tokens) + sorted(words))}

    def __len__(self):
        return len(self.vocab)

    def to_dict(self):
        return {"type": "word", "vocab_size": len(self), "special_tokens": list(self.special_tokens)}

    def encode(self, text):
        unk = self.vocab["<unk>"]
        return [self.vocab["<s>"]] + [self.vocab.get(w, unk) for w in text.split()] + [self.vocab["</s>"]]


def load_raw_documents(n, seed):
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 90))) for _ in range(n)]


def fingerprint(args, tokenizer, documents):
    h = hashlib.sha256()
    h.update(json.dumps(tokenizer.to_dict(), sort_keys=True).encode())
    h.update(json.dumps({"block_size": args.block_size}).encode())
    for text in documents:
        h.update(text.encode())
    return h.hexdigest()[:16]


def group_texts(sequences, block_size):
    flat = np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences])
    n = len(flat) // block_size
    return flat[: n * block_size].reshape(n, block_size)


def tokenize_corpus(args, tokenizer, documents, target):
    logger.info("tokenizing %d documents with %d workers", len(documents), args.preprocessing_num_workers)
    with mp.get_context("fork").Pool(args.preprocessing_num_workers) as pool:
        sequences = pool.map(tokenizer.encode, documents, chunksize=50)
    blocks = group_texts(sequences, args.block_size)
    partial = target.with_suffix(".tmp.npy")
    np.save(partial, blocks)
    os.replace(partial, target)


def get_lm_blocks(args, tokenizer, documents, is_main_process):
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    target = args.cache_dir / f"blocks-{fingerprint(args, tokenizer, documents)}.npy"
    if is_main_process:
        if args.overwrite_cache or not target.exists():
            tokenize_corpus(args, tokenizer, documents, target)
        else:
            logger.info("reading the tokenized corpus from %s", target)
    while not target.exists():
        time.sleep(0.2)
    return torch.from_numpy(np.load(target))


class DecoderLM(nn.Module):
    def __init__(self, vocab_size, block_size, dim=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab_size, dim), nn.Embedding(block_size, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, ids):
        t = ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        h = self.layers(self.tok(ids) + self.pos.weight[:t], mask=mask, is_causal=True)
        return F.cross_entropy(self.head(h[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s")
    torch.manual_seed(args.seed)

    tokenizer = WordTokenizer(WORDS, SPECIAL_TOKENS)
    documents = load_raw_documents(args.num_documents, args.seed)
    blocks = get_lm_blocks(args, tokenizer, documents, is_main_process=rank == 0)
    n_eval = len(blocks) // 10
    train_blocks, eval_blocks = blocks[n_eval:], blocks[:n_eval]

    model = nn.parallel.DistributedDataParallel(DecoderLM(len(tokenizer), args.block_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    warmup = max(1, args.max_train_steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))
    total_batch = args.per_device_train_batch_size * world * args.gradient_accumulation_steps
    logger.info("***** Running training *****  blocks %d  total batch %d", len(train_blocks), total_batch)

    generator = torch.Generator().manual_seed(args.seed)
    for completed in range(1, args.max_train_steps + 1):
        picks = torch.randint(len(train_blocks), (total_batch,), generator=generator)[rank::world]
        model.train()
        for micro in picks.chunk(args.gradient_accumulation_steps):
            loss = model(train_blocks[micro])
            (loss / args.gradient_accumulation_steps).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if completed % 20 == 0:
            model.eval()
            with torch.no_grad():
                losses = [model.module(b) for b in eval_blocks[rank::world].split(16)]
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            logger.info("step %d  train %.3f  perplexity %.2f", completed, loss.item(), math.exp(mean.item() / world))

    dist.barrier()
    if rank == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), args.output_dir / "pytorch_model.bin")
        logger.info("saved to %s", args.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
