"""What two ranks compute on the fused kernels, compared with one process on plain torch.

Started by test_fused_model.py under torchrun. Rank 0 writes a JSON object to the file named by the first argument.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from wrapped_gradients import MICRO_BATCHES, joint, wrapped

from nsa_attention.config import Implementation
from nsa_attention.settings import read_settings
from nsa_attention.world import World, join_ranks

WAYS = {
    "ddp": ("--wrapper", "ddp"),
    "ddp gc": ("--wrapper", "ddp", "--gc", "all", "--static-graph"),
    "fsdp": ("--wrapper", "fsdp"),
    "fsdp gc": ("--wrapper", "fsdp", "--gc", "all"),
}


def distance(world: World, *options: str) -> float:
    """Largest difference of any gradient, relative to the largest gradient."""
    settings = replace(read_settings(("--layers", "1", *options), {}), dtype="float64")
    shape = replace(settings.model, dim=16, heads=2, groups=1, d_k=4, d_v=4, block_len=4, block_stride=2, select_len=4)
    plain = replace(settings, model=replace(shape, select_count=3, window=5, vocab=11), impl=Implementation.EAGER)
    tokens = torch.randint(11, (world.size * MICRO_BATCHES, 18), generator=torch.Generator().manual_seed(7))
    expected, _ = joint(plain, torch.float64, tokens)
    found = wrapped(replace(plain, impl=Implementation.TRITON), world, torch.float64, tokens, None)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest


def main() -> None:
    torch.set_num_threads(1)
    with join_ranks("cpu", "gloo", needs_group=True) as world:
        found = {name: distance(world, *options) for name, options in WAYS.items()}
        if world.is_first:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
