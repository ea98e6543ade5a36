"""Preparation of a model for training on all ranks.

This includes gradient checkpointing, compilation, the wrapper, and the communication hooks that reduce DDP's gradient
buckets.
"""

# No `from __future__ import annotations` in this module, because DDP checks the annotations of communication hooks.
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

# torch 2.13 renames all_gather_into_tensor, and warns if the old name is used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def comm_hook_for(name: str, backend: str | None) -> Hook:
    """Return the DDP communication hook for `name`, a value of the option `--comm-hook`."""
    # The hook for the name "bf16" sends gradients as bfloat16. With `backend` "nccl" it is PyTorch's hook. gloo cannot
    # add bfloat16, so other backends use `gloo_bf16_hook`.
    if name == "none":
        return allreduce_hook
    return bf16_compress_hook if backend == "nccl" else gloo_bf16_hook


def gloo_bf16_hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook for gloo: average a gradient bucket over all ranks in bfloat16."""
    # The hook waits for both collectives of `mean_as_bf16` before it returns. If a callback of the first started the
    # second, it would run in one of gloo's threads, and the ranks might start collectives in different orders.
    buffer = bucket.buffer()
    buffer.copy_(mean_as_bf16(buffer))
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    result.set_result(buffer)
    return result


def mean_as_bf16(values: Tensor) -> Tensor:
    """Return the mean of a flat tensor over all ranks, communicated as bfloat16."""
    # Each rank receives one part of the tensor from all ranks, averages it in float32, and sends the mean to all ranks.
    # Values are rounded to bfloat16 before each of the two collectives. They are sent as bytes, because gloo does not
    # support bfloat16.
    ranks = dist.get_world_size()
    sent = functional.pad(values, (0, -values.numel() % ranks)).to(torch.bfloat16)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8))
    share = received.view(ranks, -1).float().mean(0).to(torch.bfloat16)
    _all_gather(sent.view(torch.uint8), share.view(torch.uint8))
    return sent[: values.numel()].to(values.dtype)


@dataclass
class BucketTrace:
    """A record of the gradient buckets that DDP has reduced in a step.

    Printing STEPS steps is enough. In the first step, DDP uses a single bucket while it records the order of the
    gradients. The buckets of the second step are final.
    """

    STEPS: ClassVar[int] = 2

    rank: int
    reduce: Hook = allreduce_hook
    is_printing: bool = True
    parameters_by_bucket: dict[int, list[Tensor]] = field(default_factory=dict)  # buckets reduced in this step

    def take_parameters(self) -> dict[int, list[Tensor]]:
        """Return the parameters of each recorded bucket, by bucket number, and clear the record."""
        parameters_by_bucket, self.parameters_by_bucket = self.parameters_by_bucket, {}
        return parameters_by_bucket


def announce_and_reduce(trace: BucketTrace, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: record a gradient bucket, print a line about it, and all-reduce it."""
    trace.parameters_by_bucket[bucket.index()] = bucket.parameters()
    if trace.is_printing:
        buffer = bucket.buffer()
        say(f"[DDP] rank={trace.rank} bucket_elems={buffer.numel()} dtype={buffer.dtype}")
    return trace.reduce(None, bucket)


def freeze(model: nn.Module, pattern: str) -> list[str]:
    """Freeze the parameters whose names match the glob `pattern`, and return their names.

    Raises CannotRunError if no parameter matches.
    """
    matching = [(name, parameter) for name, parameter in model.named_parameters() if fnmatchcase(name, pattern)]
    if not matching:
        example = next(name for name, _ in model.named_parameters())
        raise CannotRunError(f'--freeze: no parameter matches "{pattern}"; parameter names look like {example}')
    for _, parameter in matching:
        parameter.requires_grad_(False)
    return [name for name, _ in matching]


def parallelize(model: TinyLM, settings: Settings, world: World, buckets: BucketTrace | None) -> nn.Module:
    """Apply gradient checkpointing, compilation and a distributed wrapper, and return the wrapped model.

    `model` itself is changed and stays usable, with the same parameters. `buckets` records DDP's buckets; None if they
    are not traced. A checkpointed layer also runs its compiled code when it is recomputed.
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
    """Enable gradient checkpointing for the layers whose numbers are in `layers`, and disable it for all others."""
    numbers = set(layers)
    for number, block in enumerate(model.blocks):
        block.recompute = mode if number in numbers else None


def compile_layers(model: TinyLM, backend: str = "inductor") -> None:
    """Compile each layer with torch.compile. All layers share the compiled code."""
    for block in model.blocks:
        block.compiled = torch.compile(block.run, backend=backend)


def compute_dtype(settings: Settings, world: World) -> torch.dtype:
    """Return the dtype in which the layers compute."""
    # For `--dtype auto`, this is the dtype of the model's configuration on a GPU, and float32 on a CPU, because CPUs
    # have no fast half-precision dtype.
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return getattr(torch, settings.model.dtype) if world.device.type == "cuda" else torch.float32


def without_reduction(model: nn.Module, wrapper: Wrapper) -> AbstractContextManager[object]:
    """Return a context manager in which gradients accumulate without being reduced across ranks.

    The next backward pass outside the context reduces the accumulated gradients.
    """
    if isinstance(model, DistributedDataParallel):
        # With a static graph, a backward pass without reduction fails in the first step and is wrong in later ones
        # (pytorch #143580, #187732). Reducing in each pass gives the same sum, because the mean is linear.
        return nullcontext() if model.static_graph else model.no_sync()
    if wrapper in SHARDED:
        from . import sharding

        return sharding.without_reduction(model)
    return nullcontext()


def clip_gradients(model: nn.Module, wrapper: Wrapper, limit: float) -> Tensor:
    """Scale all gradients to a joint norm of at most `limit`, and return the norm before scaling."""
    if wrapper in SHARDED:
        from . import sharding

        return sharding.clip_gradients(model, limit)
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def average_gradients(model: nn.Module, world: World) -> None:
    """Average the gradients over all ranks, with one all_reduce per parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size


def _ddp(model: TinyLM, settings: Settings, world: World, buckets: BucketTrace | None) -> nn.Module:
    # torch 2.13 renames the parameter broadcast_buffers, and warns if the old name is used.
    parameters = inspect.signature(DistributedDataParallel).parameters
    sync_option = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    options: dict[str, Any] = {sync_option: settings.broadcast_buffers}
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        **options,
    )
    hook = comm_hook_for(settings.comm_hook, world.backend)
    if buckets is not None:
        buckets.reduce = hook
        ddp.register_comm_hook(buckets, announce_and_reduce)
    elif settings.comm_hook != "none":
        ddp.register_comm_hook(None, hook)
    return ddp
