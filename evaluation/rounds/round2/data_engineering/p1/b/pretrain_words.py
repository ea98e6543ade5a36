"""Word-level causal LM. Text is encoded once into flat uint16 files, then read through memory maps."""
import argparse
import contextlib
import logging
import math
import multiprocessing as mp
import os
import random
import shutil
import tempfile
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

logger = logging.getLogger("pretrain")


class Lexicon:
    """word -> id. Grows while `growing`; ids are shared by all files of a corpus."""

    UNK = 0

    def __init__(self, max_size):
        self.max_size = max_size
        self.ids = {"<unk>": self.UNK, "<eos>": 1}
        self.growing = True
        self._mutex = threading.Lock()

    def __len__(self):
        return len(self.ids)

    def id_of(self, word):
        with self._mutex:
            found = self.ids.get(word)
            if found is None and self.growing and len(self.ids) < self.max_size:
                found = self.ids[word] = len(self.ids)
        return self.UNK if found is None else found

    @contextlib.contextmanager
    def frozen(self):
        """No new ids are handed out inside."""
        with self._mutex:
            self.growing = False
            try:
                yield self
            finally:
                self.growing = True


def write_raw_corpus(folder, n_files, seed):
    rng = random.Random(seed)
    stems = [a + b for a in ("ka", "lo", "mi", "ter", "su", "ven") for b in ("", "ra", "do", "ne", "s", "ling")]
    for k in range(n_files):
        with open(os.path.join(folder, f"part-{k:03d}.txt"), "w") as f:
            for _ in range(120):
                f.write(" ".join(rng.choice(stems) for _ in range(rng.randint(5, 25))) + "\n")


_lexicon = None


def _encode_file(job):
    src, dst = job
    ids = []
    with open(src) as f:
        for line in f:
            ids.extend(_lexicon.id_of(w) for w in line.split())
            ids.append(1)
    np.asarray(ids, dtype=np.uint16).tofile(dst)
    return os.path.basename(dst), len(ids)


def encode_corpus(raw_dir, cache_dir, max_vocab, procs):
    """Returns the vocabulary size; leaves one .bin for each .txt."""
    global _lexicon
    _lexicon = Lexicon(max_vocab)
    names = sorted(n for n in os.listdir(raw_dir) if n.endswith(".txt"))
    for name in names[:2]:  # the first files decide on the vocabulary
        with open(os.path.join(raw_dir, name)) as f:
            for word in f.read().split():
                _lexicon.id_of(word)
    jobs = [(os.path.join(raw_dir, n), os.path.join(cache_dir, n.replace(".txt", ".bin"))) for n in names]
    began = time.time()
    with _lexicon.frozen():
        with mp.get_context("fork").Pool(procs) as pool:
            for name, count in pool.imap_unordered(_encode_file, jobs):
                logger.info("encoded %s: %d tokens", name, count)
    logger.info("encoded %d files in %.1fs", len(jobs), time.time() - began)
    return len(_lexicon)


class Windows:
    def __init__(self, cache_dir, block, batch, rank, world, seed):
        files = sorted(os.path.join(cache_dir, n) for n in os.listdir(cache_dir) if n.endswith(".bin"))
        self.maps = [np.memmap(f, dtype=np.uint16, mode="r") for f in files]
        self.block, self.batch = block, batch
        self.rng = np.random.default_rng(seed * 1000 + rank)

    def next(self):
        xs = []
        for _ in range(self.batch):
            m = self.maps[self.rng.integers(len(self.maps))]
            at = self.rng.integers(len(m) - self.block - 1)
            xs.append(m[at:at + self.block + 1].astype(np.int64))
        t = torch.from_numpy(np.stack(xs))
        return t[:, :-1], t[:, 1:]


class TinyLM(nn.Module):
    def __init__(self, vocab, dim, block):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(block, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, dim * 4, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)
        self.register_buffer("mask", torch.triu(torch.full((block, block), float("-inf")), 1))

    def forward(self, x):
        n = x.size(1)
        return self.head(self.body(self.tok(x) + self.pos[:n], mask=self.mask[:n, :n]))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--block", type=int, default=32)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--dim", type=int, default=32)
    ap.add_argument("--max-vocab", type=int, default=4000)
    ap.add_argument("--encode-procs", type=int, default=2)
    ap.add_argument("--files", type=int, default=6)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{rank}] %(message)s")
    torch.manual_seed(args.seed)

    meta = [None]
    if rank == 0:
        root = tempfile.mkdtemp(prefix="words_")
        raw, cache = os.path.join(root, "raw"), os.path.join(root, "cache")
        os.makedirs(raw)
        os.makedirs(cache)
        write_raw_corpus(raw, args.files, args.seed)
        vocab = encode_corpus(raw, cache, args.max_vocab, args.encode_procs)
        meta = [{"root": root, "cache": cache, "vocab": vocab}]
    dist.broadcast_object_list(meta, src=0)
    meta = meta[0]

    windows = Windows(meta["cache"], args.block, args.batch, rank, world, args.seed)
    model = DDP(TinyLM(meta["vocab"], args.dim, args.block))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        x, y = windows.next()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if (step + 1) % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean /= world
            if rank == 0:
                logger.info("step %d loss %.3f ppl %.1f", step + 1, mean.item(), math.exp(mean.item()))
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(meta["root"], "last.pt"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(meta["root"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
