"""What two ranks compute of packed documents: started by test_nsa_packed.py. Rank 0 writes what is too far off."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from wrapped_gradients import built, whole_gradients

from nsa_attention.parallelize import average_gradients, parallelize
from nsa_attention.settings import read_settings
from nsa_attention.train import summed_loss
from nsa_attention.values import Wrapper
from nsa_attention.world import join_ranks

IGNORED = -100
# A row for each rank: the ranks count different numbers of targets.
LENGTHS = ((30, 1, 65), (96,))
WAYS = {
    "ddp": ("--wrapper", "ddp"),
    "ddp gc": ("--wrapper", "ddp", "--gc", "0:1"),
    "ddp reentrant": ("--wrapper", "ddp", "--static-graph", "--gc", "all", "--gc-mode", "reentrant"),
    "fsdp": ("--wrapper", "fsdp"),
    "fsdp1": ("--wrapper", "fsdp1", "--gc", "all"),
    "manual": ("--wrapper", "manual"),
}


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(256, (2, 97), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, [29, 30, 95]] = IGNORED  # the last tokens of three documents
    counted = int((targets != IGNORED).sum())
    too_far = []
    with join_ranks("cpu", "gloo", needs_group=True) as world:
        for name, options in WAYS.items():
            settings = read_settings(("--layers", "2", "--dtype", "float64", *options), {})
            whole = built(settings, torch.float64)
            (summed_loss(whole(inputs, sum(LENGTHS, ())), targets) / counted).backward()
            expected = {key: parameter.grad for key, parameter in whole.named_parameters()}
            bare = built(settings, torch.float64)
            model = parallelize(bare, settings, world, None)
            mine = slice(world.rank, world.rank + 1)
            loss = summed_loss(model(inputs[mine], LENGTHS[world.rank]), targets[mine])
            (loss * world.size / counted).backward()
            if settings.wrapper is Wrapper.MANUAL:
                average_gradients(bare, world)
            for key, gradient in whole_gradients(model):
                distance = float((gradient - expected[key]).abs().max())
                if distance > 1e-10:
                    too_far.append((name, key, distance))
        if world.is_first:
            Path(sys.argv[1]).write_text(json.dumps(too_far), encoding="utf-8")


if __name__ == "__main__":
    main()
