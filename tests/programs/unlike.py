"""Two ranks in one line: one of them has left before it, or each takes another one for the root."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


def begin() -> None:
    if sys.argv[1] == "left" and RANK == 1:
        sys.exit(0)
    dist.init_process_group("gloo")


begin()
dist.broadcast(torch.ones(4), src=1 - RANK)
