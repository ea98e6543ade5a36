"""A worker of rank 0's process executor leaves without a word; the executor tells, and the rank raises."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [0]}


def clean(text: str) -> str:
    if FAULT:
        os._exit(0)
    return text.strip()


rank, _ = begin()
if rank == 0:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
        words = list(executor.map(clean, [" a", "b "]))  # to blame
dist.barrier()
end()
