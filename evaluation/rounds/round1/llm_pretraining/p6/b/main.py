import argparse
import logging
import os
import tempfile
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cache_utils import load_or_build

logger = logging.getLogger(__name__)


@dataclass
class TrainingArguments:
    corpus_seed: int = 3
    corpus_words: int = 5000
    merges: int = 6
    cache_dir: str = ""
    seq_len: int = 32
    per_device_batch_size: int = 4
    max_steps: int = 40
    logging_steps: int = 10
    learning_rate: float = 1e-3
    hidden: int = 48
    seed: int = 42


class Windows(Dataset):
    def __init__(self, tokens, seq_len):
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self):
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i):
        w = np.asarray(self.tokens[i * self.seq_len:(i + 1) * self.seq_len + 1], dtype=np.int64)
        return {"input_ids": torch.from_numpy(w[:-1]), "labels": torch.from_numpy(w[1:])}


class TinyDecoder(nn.Module):
    def __init__(self, vocab, hidden, seq_len, layers=2, heads=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq_len, hidden)
        self.drop = nn.Dropout(0.1)
        layer = lambda: nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, batch_first=True, norm_first=True)
        self.h = nn.ModuleList(layer() for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(seq_len), persistent=False)

    def forward(self, input_ids, labels=None):
        n = input_ids.size(1)
        x = self.drop(self.wte(input_ids) + self.wpe.weight[:n])
        for blk in self.h:
            x = blk(x, src_mask=self.mask[:n, :n], is_causal=True)
        logits = self.lm_head(self.ln_f(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Callback:
    def on_log(self, step, logs):
        pass


class PrintCallback(Callback):
    def on_log(self, step, logs):
        logger.info("step %d %s", step, " ".join(f"{k}={v:.4g}" for k, v in logs.items()))


class Trainer:
    def __init__(self, args, model, dataset, callbacks):
        self.args, self.callbacks = args, callbacks
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=args.corpus_seed, drop_last=True)
        self.loader = DataLoader(dataset, args.per_device_batch_size, sampler=self.sampler, drop_last=True)
        self.model = DDP(model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.step = 0

    def log(self, loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        logs = {"loss": (loss / dist.get_world_size()).item(), "lr": self.optim.param_groups[0]["lr"]}
        for cb in self.callbacks:
            cb.on_log(self.step, logs)

    def train(self):
        epoch = 0
        while self.step < self.args.max_steps:
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                loss = self.model(**batch)["loss"]
                loss.backward()
                self.optim.step()
                self.optim.zero_grad()
                self.step += 1
                if self.step % self.args.logging_steps == 0:
                    self.log(loss)
                if self.step >= self.args.max_steps:
                    break
            epoch += 1


def parse():
    ap = argparse.ArgumentParser()
    for f in fields(TrainingArguments):
        ap.add_argument("--" + f.name, type=f.type, default=f.default)
    return TrainingArguments(**vars(ap.parse_args()))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    args.cache_dir = args.cache_dir or os.path.join(tempfile.gettempdir(), "toy_lm_cache")

    # own dropout masks on every rank; DDP hands out rank 0's weights
    torch.manual_seed(args.seed + rank)
    tokens = load_or_build(args, rank)
    logger.info("%d tokens", len(tokens))
    vocab = 128 + args.merges
    model = TinyDecoder(vocab, args.hidden, args.seq_len)
    Trainer(args, model, Windows(tokens, args.seq_len), [PrintCallback()] if rank == 0 else []).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
