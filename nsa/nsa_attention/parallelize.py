"""From a model on one device to a model on all ranks: gradient checkpointing, then compilation, then the wrapper.

And what DDP does with a bucket of gradients between the ranks: its communication hooks.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of a communication hook as types.
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from .model import Recompute, TinyLM
from .observe import say
from .settings import Settings
from .values import SHARDED, Wrapper
from .world import CannotRunError, World

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


@dataclass
class BucketTrace:
    """State of the hook below: whose buckets these are, what is in them, and whether they are still spoken about.

    Two steps are enough. In the first one DDP has a single bucket while it learns the order of the gradients; the
    buckets of the second stay.
    """

    STEPS: ClassVar[int] = 2

    rank: int
    reduce: Hook = allreduce_hook
    speaking: bool = True
    held: dict[int, list[Tensor]] = field(default_factory=dict)  # the parameters of each bucket, in this step

    def taken(self) -> dict[int, list[Tensor]]:
        """What the buckets of the step held, which is then over."""
        held, self.held = self.held, {}
        return held


def announce_and_reduce(trace: BucketTrace, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook: a line per bucket while the trace speaks, then the hook that it stands in front of."""
    trace.held[bucket.index()] = bucket.parameters()
    if trace.speaking:
        buffer = bucket.buffer()
        say(f"[DDP] rank={trace.rank} bucket_elems={buffer.numel()} dtype={buffer.dtype}")
    return trace.reduce(None, bucket)


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
        from . import sharding

        shard = sharding.shard_by_fsdp2 if settings.wrapper is Wrapper.FSDP else sharding.shard_by_fsdp1
        return shard(model, world, compute_dtype(settings, world))
    return model


def checkpoint_layers(model: TinyLM, layers: Iterable[int], mode: Recompute) -> None:
    """Gradient checkpointing in these layers and in no other."""
    recomputed = set(layers)
    for number, block in enumerate(model.blocks):
        block.recompute = mode if number in recomputed else None


def compile_layers(model: TinyLM, backend: str = "inductor") -> None:
    """torch.compile for what each layer computes. All layers share the compiled code."""
    for block in model.blocks:
        block.compiled = torch.compile(block.run, backend=backend)


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
        from . import sharding

        return sharding.without_reduction(model)
    return nullcontext()


def clip_gradients(model: nn.Module, wrapper: Wrapper, limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before."""
    if wrapper in SHARDED:
        from . import sharding

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
