"""Saves three checkpoints and keeps two; is killed by SIGKILL just before the nth thing that it does to the disk.

`python saves_until_killed.py DIRECTORY N`: N from 1. It ends well where it does fewer things.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn

from nsa_attention.checkpoints.save import open_saver
from nsa_attention.settings import read_settings
from nsa_attention.world import World

directory, last = sys.argv[1], int(sys.argv[2])
ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)
done = count(1)


def counted(real: Callable[..., Any]) -> Callable[..., Any]:
    def act(*arguments: Any, **options: Any) -> Any:
        if next(done) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    return act


model = nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
settings = read_settings(["--out-dir", directory, "--keep-last", "2"], {})
with open_saver(settings, ALONE, 0) as saver:
    for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    for step in range(1, 4):
        nn.init.constant_(model.weight, step)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        saver.save(step, model, optimizer, torch.amp.GradScaler("cpu", enabled=False), None)
        print(f"saved {step}", flush=True)
