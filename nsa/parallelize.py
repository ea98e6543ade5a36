"""From a model on one device to a model on all ranks: gradient checkpointing, then compilation, then the wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nsa.comm_hooks import hook_named
from nsa.model import Recompute, TinyLM
from nsa.settings import Settings
from nsa.traces import BucketTrace, announce_and_reduce
from nsa.values import SHARDED, Wrapper
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
    """The model as the optimizer's loop calls it. The bare model stays usable, with the same parameters.

    The order matters: a layer runs again as it was compiled, and the wrapper sees the layers as they will run.
    """
    checkpoint_layers(model, settings.gc.of(model.config.layers), Recompute(settings.gc_mode))
    if settings.compile:
        compile_layers(model)
    if settings.wrapper is Wrapper.DDP:
        return _ddp(model, settings, world, buckets)
    if settings.wrapper in SHARDED:
        from nsa import sharding

        shard = sharding.shard_by_fsdp2 if settings.wrapper is Wrapper.FSDP else sharding.shard_by_fsdp1
        return shard(model, world, compute_dtype(settings, world))
    return model


def checkpoint_layers(model: TinyLM, layers: Iterable[int], mode: Recompute) -> None:
    """Gradient checkpointing in these layers and in no other."""
    chosen = set(layers)
    for number, block in enumerate(model.blocks):
        block.recompute = mode if number in chosen else None  # type: ignore[assignment]


def compile_layers(model: TinyLM, backend: str = "inductor") -> None:
    """torch.compile for what each layer computes. All layers share the compiled code."""
    for block in model.blocks:
        block.compiled = torch.compile(block.run, backend=backend)  # type: ignore[assignment, arg-type]


def compute_dtype(settings: Settings, world: World) -> torch.dtype:
    """`auto` is the shape's dtype on a GPU. A CPU has no fast half type, so there it is float32."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return getattr(torch, settings.model.dtype) if world.device.type == "cuda" else torch.float32


def without_reduction(model: nn.Module, wrapper: Wrapper) -> AbstractContextManager[object]:
    """Backward passes in this context leave their gradients to the next one outside of it."""
    if isinstance(model, DistributedDataParallel):
        # With a static graph, a backward pass without reduction fails in the first step and is wrong in later ones
        # (pytorch #143580, #187732). Reducing in each pass gives the same sum, as averages are the same on every rank.
        return nullcontext() if model.static_graph else model.no_sync()
    if wrapper in SHARDED:
        from nsa import sharding

        return sharding.without_reduction(model)
    return nullcontext()


def clip_gradients(model: nn.Module, wrapper: Wrapper, limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before."""
    if wrapper in SHARDED:
        from nsa import sharding

        return sharding.clip_gradients(model, limit)
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def average_gradients(model: nn.Module, world: World) -> None:
    """What DDP does, by hand and after the backward pass: one all_reduce per parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size


def _ddp(model: TinyLM, settings: Settings, world: World, buckets: BucketTrace | None) -> nn.Module:
    # torch 2.13 renames it and warns whoever uses the old name.
    known = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync: settings.broadcast_buffers}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        **options,
    )
    hook = hook_named(settings.comm_hook, world.backend)
    if buckets is not None:
        buckets.reduce = hook
        wrapped.register_comm_hook(buckets, announce_and_reduce)
    elif settings.comm_hook != "none":
        wrapped.register_comm_hook(None, hook)
    return wrapped
