"""Token shards on disk: uint16 ids, documents end with EOT."""
import os
import random
import tempfile

import numpy as np
import torch

EOT = 0
VOCAB = 128


def _write_split(root, split, n_shards, n_docs, rng):
    for s in range(n_shards):
        docs = []
        # web, code, chat, ...: each source has its own typical length
        mean_len = 60 if s % 2 == 0 else 24
        for _ in range(n_docs * 60 // mean_len):
            n = max(2, int(rng.exponential(mean_len)))
            start = int(rng.integers(1, VOCAB))
            docs.append((start + 3 * np.arange(n)) % (VOCAB - 1) + 1)
            docs.append([EOT])
        np.concatenate(docs).astype(np.uint16).tofile(os.path.join(root, f"{split}_{s:03d}.bin"))


def build_shards(root, n_shards):
    root = root or tempfile.mkdtemp(prefix="shards_")
    rng = np.random.default_rng(11)
    _write_split(root, "train", n_shards, 60, rng)
    _write_split(root, "val", n_shards, 20, rng)
    return root


class ShardReader:
    def __init__(self, root, split, rank, world, block, batch, min_doc):
        names = sorted(n for n in os.listdir(root) if n.startswith(split + "_"))
        self.paths = [os.path.join(root, n) for n in names[rank::world]]
        self.block, self.batch, self.min_doc = block, batch, min_doc

    def _documents(self, path):
        ids = np.fromfile(path, dtype=np.uint16)
        ends = np.flatnonzero(ids == EOT)
        start = 0
        for end in ends:
            yield ids[start:end + 1]
            start = end + 1

    def _kept(self, path):
        """Documents long enough to be worth a place in a block."""
        return (d for d in self._documents(path) if len(d) >= self.min_doc)

    def num_batches(self):
        blocks = sum(sum(len(d) for d in self._kept(p)) // (self.block + 1) for p in self.paths)
        return blocks // self.batch

    def _blocks(self, path):
        buf = np.concatenate(list(self._kept(path)))
        n = len(buf) // (self.block + 1)
        yield from buf[: n * (self.block + 1)].reshape(n, self.block + 1).astype(np.int64)

    def batches(self, epoch=0):
        order = list(self.paths)
        random.Random(epoch).shuffle(order)
        group = []
        for path in order:
            for blk in self._blocks(path):
                group.append(torch.from_numpy(blk))
                if len(group) == self.batch:
                    t = torch.stack(group)
                    group = []
                    yield t[:, :-1].contiguous(), t[:, 1:].contiguous()
