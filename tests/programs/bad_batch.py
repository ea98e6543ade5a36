"""A program whose sixth batch raises an exception: --batches=4,5 are the batches that it gets."""

import sys

import torch

batches = [int(word) for word in sys.argv[1].partition("=")[2].split(",") if word]
for batch in batches:
    torch.ones(2) * batch
    if batch == 5:
        raise ValueError("batch 5 is damaged")
