"""Reward model finetuning on preference pairs, tokenized on the fly by the loader's workers."""
import json
import logging
import os
import random
import tempfile
import threading
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from subwords import SubwordTokenizer

logger = logging.getLogger("reward")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ai", "or", "un")]
POLITE = ["please", "thanks", "gladly", "indeed"]


def synthesize(n, seed):
    rng = random.Random(seed)
    sentence = lambda k: ["".join(rng.choices(SYLLABLES, k=rng.randint(2, 4))) for _ in range(k)]
    rows = []
    for _ in range(n):
        body = sentence(rng.randint(4, 9))
        good = body + sentence(2) + rng.sample(POLITE, 2)
        bad = body + sentence(4)
        rng.shuffle(good)
        rows.append({"chosen": " ".join(good), "rejected": " ".join(bad)})
    return rows


class PreferenceDataset(Dataset):
    def __init__(self, rows, tokenizer, max_tokens):
        self.rows, self.tokenizer, self.max_tokens = rows, tokenizer, max_tokens

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return [torch.tensor(self.tokenizer.encode(row[k])[: self.max_tokens]) for k in ("chosen", "rejected")]


def collate(pairs):
    flat = [c for c, _ in pairs] + [r for _, r in pairs]
    return nn.utils.rnn.pad_sequence(flat, batch_first=True, padding_value=SubwordTokenizer.PAD)


class RewardModel(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1)
        h = self.body(self.embed(ids)) * mask
        return self.score(h.sum(1) / mask.sum(1)).squeeze(-1)


class Engine:
    def __init__(self, hp):
        self.hp = hp
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.workdir = Path(hp.workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        train, valid = synthesize(hp.train_pairs, 1), synthesize(hp.valid_pairs, 2)
        texts = [t for row in train for t in row.values()]
        self.tokenizer = SubwordTokenizer().train(texts, hp.vocab)
        self.train_loader = self.loader(train, shuffle=True)
        self.valid_loader = self.loader(valid, shuffle=False)
        torch.manual_seed(hp.seed)
        self.model = DistributedDataParallel(RewardModel(len(self.tokenizer), hp.dim))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=hp.lr)
        self.epoch, self.report = 0, None

    def loader(self, rows, shuffle):
        data = PreferenceDataset(rows, self.tokenizer, self.hp.max_tokens)
        sampler = DistributedSampler(data, shuffle=shuffle, seed=self.hp.seed)
        return DataLoader(data, self.hp.batch, sampler=sampler, collate_fn=collate,
                          num_workers=self.hp.workers, multiprocessing_context="fork")

    def start_report(self):
        if self.rank == 0:
            path = self.workdir / "frequencies.tsv"
            self.report = threading.Thread(target=self.tokenizer.write_frequencies, args=(path,), name="report")
            self.report.start()

    def resume(self):
        last = self.workdir / "last.pt"
        if last.exists():
            state = torch.load(last)
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch = state["epoch"] + 1
        dist.barrier()

    def checkpoint(self, metrics):
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}
            torch.save(state, self.workdir / "last.tmp")
            os.replace(self.workdir / "last.tmp", self.workdir / "last.pt")
            with open(self.workdir / "metrics.jsonl", "a") as f:
                f.write(json.dumps({"epoch": self.epoch, **metrics}) + "\n")
        dist.barrier()

    def fit(self):
        self.start_report()
        self.resume()
        while self.epoch < self.hp.epochs:
            self.train_loader.sampler.set_epoch(self.epoch)
            for ids in self.train_loader:
                chosen, rejected = self.model(ids).chunk(2)
                loss = -F.logsigmoid(chosen - rejected).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            metrics = {"loss": loss.item(), "accuracy": self.validate()}
            if self.rank == 0:
                logger.info("epoch %d %s", self.epoch, metrics)
            self.checkpoint(metrics)
            self.epoch += 1
        if self.report is not None:
            self.report.join()

    @torch.no_grad()
    def validate(self):
        hits = torch.zeros(2)
        for ids in self.valid_loader:
            chosen, rejected = self.model.module(ids).chunk(2)
            hits += torch.tensor([(chosen > rejected).sum().item(), len(chosen)])
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()


def main():
    p = ArgumentParser(description=__doc__)
    p.add_argument("--workdir", default=f"{tempfile.gettempdir()}/reward_{os.getppid()}")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--vocab", type=int, default=4000)
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--train-pairs", type=int, default=480)
    p.add_argument("--valid-pairs", type=int, default=90)
    p.add_argument("--seed", type=int, default=13)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(message)s")
    dist.init_process_group("gloo")
    engine = Engine(p.parse_args())
    if engine.rank == 0:
        logger.info("vocabulary of %d pieces, %d batches an epoch", len(engine.tokenizer), len(engine.train_loader))
    engine.fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
