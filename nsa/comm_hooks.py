"""DDP communication hooks: what happens to a bucket of gradients between the ranks."""

# No `from __future__ import annotations` here: DDP reads the annotations of a communication hook as types.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn import functional

# torch 2.13 renames it and warns whoever uses the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def hook_named(name: str, backend: str | None) -> Hook:
    """The hook for `--comm-hook`: plain averaging, or averaging of gradients that travel as bfloat16.

    torch's own bfloat16 hook sums in bfloat16, which gloo refuses to do.
    """
    if name == "none":
        return allreduce_hook
    return bf16_compress_hook if backend == "nccl" else gloo_bf16_hook


def gloo_bf16_hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average with half of the traffic: each rank sums one share of the bucket in float32 and sends it to all.

    It waits for both exchanges before it returns. A second exchange started from the callback of the first would run
    on one of gloo's threads, and no two ranks need to start theirs in the same order.
    """
    buffer = bucket.buffer()
    buffer.copy_(averaged_as_bf16(buffer))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def averaged_as_bf16(values: Tensor) -> Tensor:
    """The mean of a flat tensor over all ranks, rounded to bfloat16 on each of its two ways.

    gloo knows no bfloat16 and moves bytes as they are.
    """
    ranks = dist.get_world_size()
    padded = functional.pad(values, (0, -values.numel() % ranks)).to(torch.bfloat16)
    received = torch.empty_like(padded)
    dist.all_to_all_single(received.view(torch.uint8), padded.view(torch.uint8))
    share = received.view(ranks, -1).float().mean(0).to(torch.bfloat16)
    _all_gather(padded.view(torch.uint8), share.view(torch.uint8))
    return padded[: values.numel()].to(values.dtype)
