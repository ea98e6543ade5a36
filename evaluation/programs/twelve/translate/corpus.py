"""Sentence pairs, and the part of them that a rank reads."""

import torch

WORDS = 50


def pairs(count):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, WORDS, (2, 6), generator=generator) for _ in range(count)]


def shard(items, rank, world_size, even=True):
    """`even` drops what is left over, so that every rank has as many."""
    usable = len(items) // world_size * world_size if even else len(items)
    return items[:usable][rank::world_size]
