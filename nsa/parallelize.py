"""From a model on one device to a model on all ranks: gradient checkpointing first, then the wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa.model import Recompute, TinyLM
from nsa.settings import Settings
from nsa.traces import BucketTrace, announce_and_reduce
from nsa.values import Wrapper
from nsa.world import CannotRunError, World


def freeze(model: nn.Module, pattern: str) -> list[str]:
    """Names of the parameters that match the pattern and take no gradient from here on."""
    matching = [(name, parameter) for name, parameter in model.named_parameters() if fnmatchcase(name, pattern)]
    if not matching:
        example = next(name for name, _ in model.named_parameters())
        raise CannotRunError(f'--freeze: no parameter matches "{pattern}"; parameters look like {example}')
    for _, parameter in matching:
        parameter.requires_grad_(False)
    return [name for name, _ in matching]


def parallelize(model: TinyLM, settings: Settings, world: World, buckets: BucketTrace | None) -> nn.Module:
    """The model as the optimizer's loop calls it. The bare model stays usable, with the same parameters."""
    checkpoint_layers(model, settings.gc.of(model.config.layers), Recompute(settings.gc_mode))
    if settings.wrapper is Wrapper.DDP:
        return _ddp(model, settings, world, buckets)
    if settings.wrapper in (Wrapper.FSDP, Wrapper.FSDP1):
        raise CannotRunError(f"--wrapper {settings.wrapper}: not in this version; available: none, ddp, manual")
    return model


def checkpoint_layers(model: TinyLM, layers: Iterable[int], mode: Recompute) -> None:
    """Gradient checkpointing in these layers and in no other."""
    chosen = set(layers)
    for number, block in enumerate(model.blocks):
        block.recompute = mode if number in chosen else None  # type: ignore[assignment]


def average_gradients(model: nn.Module, world: World) -> None:
    """What DDP does, by hand and after the backward pass: one all_reduce per parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size


def _ddp(model: TinyLM, settings: Settings, world: World, buckets: BucketTrace | None) -> nn.Module:
    # True is the default; torch 2.13 and later warn whoever passes the name.
    sync: dict[str, Any] = {} if settings.broadcast_buffers else {"broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        **sync,
    )
    if buckets is not None:
        wrapped.register_comm_hook(buckets, announce_and_reduce)
    return wrapped
