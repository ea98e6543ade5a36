"""Two ranks with torch.distributed.debug's servers of their own, of which the second never comes to the collective."""

from __future__ import annotations

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server


def wait_for_the_others(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def train() -> None:
    dist.init_process_group("gloo")
    with contextlib.suppress(ImportError):  # its page, on rank 0, needs packages that need not be there
        start_debug_server()
    wait_for_the_others(torch.ones(3))
    if os.environ["RANK"] == "1":
        time.sleep(600)
    wait_for_the_others(torch.ones(5))


if __name__ == "__main__":
    train()
