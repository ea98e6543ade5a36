import numpy as np
import torch

PAD = 0


def write_corpus(path, cfg):
    rng = np.random.default_rng(cfg["seed"])
    docs = []
    for i in range(cfg["docs"]):
        n = int(np.clip(rng.lognormal(2.9, 0.6), 4, cfg["seq_len"]))
        start = rng.integers(1, cfg["vocab"])
        step = rng.integers(1, 5)
        docs.append(((start + step * np.arange(n)) % (cfg["vocab"] - 1) + 1).astype(np.int64))
    offsets = np.cumsum([0] + [len(d) for d in docs])
    np.savez(path, tokens=np.concatenate(docs), offsets=offsets)


def load_docs(path, rank, world):
    blob = np.load(path)
    off = blob["offsets"]
    return [blob["tokens"][off[i]:off[i + 1]] for i in range(rank, len(off) - 1, world)]


def first_fit(docs, seq_len, open_bins=4):
    """Greedy packing with a few open rows; whatever does not fit any more is padded."""
    bins = []
    for doc in docs:
        for b in bins:
            if sum(map(len, b)) + len(doc) <= seq_len:
                b.append(doc)
                break
        else:
            bins.append([doc])
            if len(bins) > open_bins:
                yield bins.pop(0)
    yield from bins


class PackedStream:
    """Endless stream of packed batches for one rank."""

    def __init__(self, docs, seq_len, batch, seed):
        self.docs, self.seq_len, self.batch = docs, seq_len, batch
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        rows = []
        while True:
            order = self.rng.permutation(len(self.docs))
            for group in first_fit([self.docs[i] for i in order], self.seq_len):
                row = np.full(self.seq_len, PAD, dtype=np.int64)
                flat = np.concatenate(group)
                row[:len(flat)] = flat
                rows.append(row)
                if len(rows) == self.batch:
                    yield torch.from_numpy(np.stack(rows))
                    rows = []
