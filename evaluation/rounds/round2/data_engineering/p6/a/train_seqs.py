"""Masked-residue model. Sequences live in one flat file plus an offset table, mapped by the loader workers."""
import argparse
import os
import sys
import tempfile
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

ALPHABET = "ACDEFGHIKLMNPQRSTVWY"
PAD, MASK, N_TOKENS = 20, 21, 22


class Env(NamedTuple):
    rank: int
    world: int

    @property
    def chief(self):
        return self.rank == 0


def say(env, *words):
    if env.chief:
        print(*words, file=sys.stderr, flush=True)


class SeqFile:
    """seqs.bin: residues as uint8, one after another; seqs.idx: int64 starts, with the end as last entry."""

    def __init__(self, folder):
        self.folder = folder
        self._bin = None
        self._idx = None

    @staticmethod
    def write(folder, sequences):
        starts = [0]
        with open(os.path.join(folder, "seqs.bin"), "wb") as f:
            for s in sequences:
                f.write(s.tobytes())
                starts.append(starts[-1] + len(s))
        np.asarray(starts, dtype=np.int64).tofile(os.path.join(folder, "seqs.idx"))

    def _open(self):
        if self._idx is None:
            self._idx = np.memmap(os.path.join(self.folder, "seqs.idx"), dtype=np.int64, mode="r")
            self._bin = np.memmap(os.path.join(self.folder, "seqs.bin"), dtype=np.uint8, mode="r")

    def __len__(self):
        return os.path.getsize(os.path.join(self.folder, "seqs.idx")) // 8 - 1

    def __getitem__(self, i):
        self._open()
        return np.array(self._bin[self._idx[i]:self._idx[i + 1]])

    def __getstate__(self):
        return {"folder": self.folder, "_bin": None, "_idx": None}


class Residues(Dataset):
    def __init__(self, folder, crop):
        self.file = SeqFile(folder)
        self.crop = crop

    def __len__(self):
        return len(self.file)

    def __getitem__(self, i):
        seq = self.file[i]
        if len(seq) > self.crop:
            at = (i * 7919) % (len(seq) - self.crop)
            seq = seq[at:at + self.crop]
        out = torch.full((self.crop,), PAD)
        out[:len(seq)] = torch.from_numpy(seq.astype(np.int64))
        return out


class BlockSampler(Sampler):
    """Gives each process a contiguous block of the file (good for the page cache), shuffled inside."""

    def __init__(self, total, env, seed):
        size = total // env.world
        self.low = env.rank * size
        self.size = size
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return self.size

    def __iter__(self):
        rng = np.random.default_rng([self.seed, self.epoch])
        self.epoch += 1
        return iter((self.low + rng.permutation(self.size)).tolist())


def mask_batch(seqs, gen, p=0.15):
    chosen = (torch.rand(seqs.shape, generator=gen) < p) & (seqs != PAD)
    return seqs.masked_fill(chosen, MASK), chosen


class Net(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.emb = nn.Embedding(N_TOKENS, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 5, padding=2) for _ in range(3))
        self.out = nn.Linear(dim, N_TOKENS)

    def forward(self, x):
        h = self.emb(x).transpose(1, 2)
        for c in self.convs:
            h = h + F.gelu(c(h))
        return self.out(h.transpose(1, 2))


def build_file(args, env):
    slot = [None]
    if env.chief:
        slot[0] = tempfile.mkdtemp(prefix="seqs-")
        rng = np.random.default_rng(args.seed)
        SeqFile.write(slot[0], (rng.choice(20, size=rng.integers(20, 90), p=rng.dirichlet(np.ones(20))).astype(np.uint8)
                                for _ in range(args.sequences)))
    dist.broadcast_object_list(slot, src=0)
    return slot[0]


def train(args, env):
    folder = build_file(args, env)
    data = Residues(folder, args.crop)
    loader = DataLoader(data, batch_size=args.batch, sampler=BlockSampler(len(data), env, args.seed),
                        num_workers=1, persistent_workers=True, prefetch_factor=2)
    say(env, f"{len(data)} sequences, {len(loader)} batches an epoch")
    torch.manual_seed(args.seed)
    net = nn.parallel.DistributedDataParallel(Net(args.dim))
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(args.seed + env.rank)
    for epoch in range(args.epochs):
        sums = torch.zeros(2)
        for seqs in loader:
            x, chosen = mask_batch(seqs, gen)
            loss_each = F.cross_entropy(net(x).transpose(1, 2), seqs, reduction="none")
            loss = (loss_each * chosen).sum() / chosen.sum().clamp(min=1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sums += torch.stack([loss.detach(), torch.ones(())])
        dist.all_reduce(sums)
        say(env, f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
        if env.chief:
            torch.save(net.module.state_dict(), os.path.join(folder, f"net.{epoch}.pt"))
        dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--crop", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dim", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=2)
    cli = parser.parse_args()
    dist.init_process_group("gloo")
    train(cli, Env(dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()
