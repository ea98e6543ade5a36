import logging
import random
from dataclasses import dataclass
from typing import List

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


@dataclass
class Cut:
    id: str
    num_frames: int
    tokens: List[int]

    @property
    def duration(self):
        return self.num_frames * 0.01


def synthetic_cuts(prefix, n, vocab_size, seed):
    rng = random.Random(seed)
    cuts = []
    for i in range(n):
        frames = rng.randint(40, 190)
        # two-channel calls: caller and agent in turn, and the agents read out long texts
        if i % 2 == 1 and rng.random() < 0.35:
            frames = rng.randint(230, 320)
        tokens = [rng.randrange(1, vocab_size) for _ in range(max(2, frames // 14))]
        cuts.append(Cut(f"{prefix}-{i:05d}", frames, tokens))
    return cuts


class CutDataset(Dataset):
    """Takes a whole batch (a list of cuts) as the index, as the samplers below yield them."""

    def __init__(self, num_features):
        self.num_features = num_features

    def __getitem__(self, cuts):
        cuts = sorted(cuts, key=lambda c: -c.num_frames)
        feats = torch.zeros(len(cuts), cuts[0].num_frames, self.num_features)
        for i, c in enumerate(cuts):
            rng = np.random.RandomState(int(c.id.split("-")[1]))
            feats[i, : c.num_frames] = torch.from_numpy(rng.randn(c.num_frames, self.num_features).astype(np.float32))
        return {
            "inputs": feats,
            "num_frames": torch.tensor([c.num_frames for c in cuts]),
            "tokens": torch.tensor([t for c in cuts for t in c.tokens]),
            "token_lens": torch.tensor([len(c.tokens) for c in cuts]),
        }


class DynamicBucketingSampler(Sampler):
    """Batches of about max_duration seconds each, from buckets of similar durations."""

    def __init__(self, cuts, max_duration, num_buckets, rank, world_size, cut_filter=None, shuffle=True, seed=0):
        self.max_duration = max_duration
        self.num_buckets = num_buckets
        self.rank, self.world_size = rank, world_size
        self.cut_filter = cut_filter
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.cuts = list(cuts)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _bucketed(self, cuts, rng):
        cuts = sorted(cuts, key=lambda c: c.num_frames)
        per = (len(cuts) + self.num_buckets - 1) // self.num_buckets
        batches = []
        for b in range(0, len(cuts), per):
            bucket = cuts[b : b + per]
            if self.shuffle:
                rng.shuffle(bucket)
            cur, longest = [], 0.0
            for c in bucket:
                if cur and max(longest, c.duration) * (len(cur) + 1) > self.max_duration:
                    batches.append(cur)
                    cur, longest = [], 0.0
                cur.append(c)
                longest = max(longest, c.duration)
            if cur:
                batches.append(cur)
        if self.shuffle:
            rng.shuffle(batches)
        return batches

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        usable = len(self.cuts) - len(self.cuts) % self.world_size
        cuts = self.cuts[self.rank : usable : self.world_size]
        if self.cut_filter is not None:
            cuts = [c for c in cuts if self.cut_filter(c)]
        return iter(self._bucketed(cuts, rng))


class AsrDataModule:
    def __init__(self, params, rank, world_size):
        self.params, self.rank, self.world_size = params, rank, world_size

    def _loader(self, sampler):
        return DataLoader(CutDataset(self.params.num_features), batch_size=None, sampler=sampler, num_workers=0)

    def train_dataloader(self):
        p = self.params
        cuts = synthetic_cuts("train", p.num_train_cuts, p.vocab_size, p.seed)
        logging.info("train cuts: %d", len(cuts))

        def remove_long_utt(c):
            return p.min_duration <= c.duration <= p.max_utt_duration

        return self._loader(
            DynamicBucketingSampler(
                cuts, p.max_duration, p.num_buckets, self.rank, self.world_size, remove_long_utt, True, p.seed
            )
        )

    def valid_dataloader(self):
        p = self.params
        cuts = synthetic_cuts("dev", 24, p.vocab_size, p.seed + 1)
        return self._loader(
            DynamicBucketingSampler(cuts, p.max_duration, p.num_buckets, self.rank, self.world_size, None, False)
        )
