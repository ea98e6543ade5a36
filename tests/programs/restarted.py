"""Rank 1 raises when torchrun starts it for the first time, and ends well when it is started again."""

import os

import torch.distributed  # noqa: F401


def first_time() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the first start")


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    first_time()
