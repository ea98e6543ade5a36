"""Instruction data: chat template, loss mask on the prompt, sequence packing."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

BOS, EOS, USER, ASSISTANT = 0, 1, 2, 3
IGNORE = -100


def make_conversations(n, vocab, seed):
    rng = np.random.default_rng(seed)
    sources = [("short_qa", 6, 10), ("summaries", 30, 12), ("code", 18, 34)]
    rows = []
    for i in range(n):
        name, p_mean, a_mean = sources[(i * len(sources)) // n]
        start = int(rng.integers(4, vocab))
        p_len, a_len = 2 + int(rng.poisson(p_mean)), 2 + int(rng.poisson(a_mean))
        prompt = [(start + k) % (vocab - 4) + 4 for k in range(p_len)]
        answer = [(start + 2 * k) % (vocab - 4) + 4 for k in range(a_len)]
        rows.append({"source": name, "prompt": prompt, "answer": answer})
    return rows


def apply_template(row):
    head = [BOS, USER] + row["prompt"] + [ASSISTANT]
    ids = head + row["answer"] + [EOS]
    labels = [IGNORE] * len(head) + row["answer"] + [EOS]
    return ids, labels


def pack(rows, block_size):
    """Concatenate templated rows and cut them into full blocks; the tail is dropped."""
    ids, labels = [], []
    for row in rows:
        i, l = apply_template(row)
        ids.extend(i)
        labels.extend(l)
    n = len(ids) // block_size
    ids = torch.tensor(ids[: n * block_size]).view(n, block_size)
    labels = torch.tensor(labels[: n * block_size]).view(n, block_size)
    return ids, labels


def shard(items, rank, world):
    per_rank = len(items) // world
    return items[rank * per_rank:(rank + 1) * per_rank]


class PackedDataset(Dataset):
    def __init__(self, rows, block_size, rank, world):
        self.ids, self.labels = pack(shard(rows, rank, world), block_size)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


def build_loader(cfg, rank, world):
    rows = make_conversations(cfg.conversations, cfg.vocab_size, cfg.seed)
    dataset = PackedDataset(rows, cfg.block_size, rank, world)
    gen = torch.Generator().manual_seed(cfg.seed)
    return DataLoader(dataset, batch_size=cfg.micro_batch, shuffle=True, drop_last=True, generator=gen)
