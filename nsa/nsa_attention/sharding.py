"""Sharded models: FSDP2 with one unit per block, and FSDP1 as the seeds wrote it; what a run must ask of them.

Imported by runs that shard only: what it needs from torch takes nearly a second to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from .model import Block, StockBlock, TinyLM
from .world import World


def shard_by_fsdp2(model: TinyLM, world: World, dtype: torch.dtype) -> nn.Module:
    """`fully_shard` on each block and on the rest; the model itself is returned, its parameters are DTensors."""
    options: dict[str, Any] = {"mesh": init_device_mesh(world.device.type, (world.size,))}
    if dtype is torch.bfloat16:
        # The rotary angles are an input of each block and must stay in float32: half of them would round to the same
        # position. Everything else is bfloat16 by itself, as it comes from bfloat16 weights.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def shard_by_fsdp1(model: TinyLM, world: World, dtype: torch.dtype) -> nn.Module:
    """The wrapper class, with `transformer_auto_wrap_policy` over the blocks."""
    precision = MixedPrecision(param_dtype=dtype, cast_forward_inputs=False, cast_root_forward_inputs=False)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, StockBlock}),
        mixed_precision=precision if dtype is torch.bfloat16 else None,
        # Without it FSDP1 insists on an accelerator.
        device_id=world.device,
        # The parameters keep their names and shapes for the optimizer and the traces.
        use_orig_params=True,
    )


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Gradients add up unreduced; the next backward pass outside of the block reduces them all."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before, of whole tensors."""
    if isinstance(model, FullyShardedDataParallel):
        return _clip_shards(model, limit)
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert isinstance(norm, DTensor)
    return norm.full_tensor()


def _clip_shards(model: FullyShardedDataParallel, limit: float) -> Tensor:
    """FSDP1's own method computes the norm in float32 and refuses float64."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients).to(model.compute_device)
    # Each rank holds a part of every tensor. A model of one rank is not sharded and its norm is whole.
    square = norm.square()
    dist.all_reduce(square, group=model.process_group)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm
