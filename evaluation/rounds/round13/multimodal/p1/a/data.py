"""Synthetic web-crawl manifest of image/caption pairs."""
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

SUBJECTS = ["dog", "cat", "tram", "boat", "guitar", "lamp", "bread", "kite", "bridge", "owl"]
STYLES = ["a photo of", "an oil painting of", "a blurry picture of", "a close-up of", "a sketch of"]
PLACES = ["indoors", "at night", "in the rain", "on a beach", "in a museum", "at dawn", "in snow"]
VOCAB = {w: i + 1 for i, w in enumerate(sorted({t for s in SUBJECTS + STYLES + PLACES for t in s.split()}))}


@dataclass(frozen=True)
class Record:
    url: str
    caption: str
    image_seed: int


def crawl_manifest(size, seed):
    rng = np.random.default_rng(seed)
    records = []
    for i in range(size):
        caption = " ".join([rng.choice(STYLES), rng.choice(SUBJECTS), rng.choice(PLACES)])
        if rng.random() < 0.3:
            caption = caption.capitalize()
        records.append(Record(f"https://img.example/{i:06d}.jpg", caption, int(rng.integers(1 << 30))))
    return records


def canonical(caption):
    return " ".join(caption.lower().split())


def drop_duplicate_captions(records):
    """Keep the first image of every caption; repeated captions are false negatives for InfoNCE."""
    seen, kept = set(), []
    for record in records:
        key = canonical(record.caption)
        if key not in seen:
            seen.add(key)
            kept.append(record)
    return kept


def split_for_rank(records, rank, world):
    usable = len(records) // world * world
    return records[rank:usable:world]


class CaptionedImages(Dataset):
    def __init__(self, manifest_size, seed, rank, world, max_tokens=8):
        records = crawl_manifest(manifest_size, seed)
        records = drop_duplicate_captions(records)
        self.records = split_for_rank(records, rank, world)
        self.max_tokens = max_tokens

    def __len__(self):
        return len(self.records)

    def tokens(self, caption):
        ids = [VOCAB[w] for w in canonical(caption).split()][: self.max_tokens]
        return torch.tensor(ids + [0] * (self.max_tokens - len(ids)))

    def __getitem__(self, i):
        record = self.records[i]
        ids = self.tokens(record.caption)
        gen = torch.Generator().manual_seed(record.image_seed)
        image = 0.4 * torch.randn(3, 16, 16, generator=gen)
        for j, token in enumerate(ids[ids > 0].tolist()):
            image[j % 3, token % 16] += 1.0
        return image, ids
