"""Models sharded with FSDP2 or FSDP1.

Only runs that shard import this module, because the modules it needs from torch take nearly a second to load.
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
    """Shard the model in place with FSDP2, and return it.

    Afterwards the parameters are DTensors. For `dtype` bfloat16, blocks compute in bfloat16 and gradients are reduced
    in float32.
    """
    options: dict[str, Any] = {"mesh": init_device_mesh(world.device.type, (world.size,))}
    if dtype is torch.bfloat16:
        # Rotary cosines and sines are inputs of each block and must stay in float32: in bfloat16 neighbouring positions
        # would round to the same values. All other inputs come from bfloat16 weights and are bfloat16 already.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def shard_by_fsdp1(model: TinyLM, world: World, dtype: torch.dtype) -> nn.Module:
    """Return the model wrapped in FullyShardedDataParallel."""
    precision = MixedPrecision(param_dtype=dtype, cast_forward_inputs=False, cast_root_forward_inputs=False)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, StockBlock}),
        mixed_precision=precision if dtype is torch.bfloat16 else None,
        # Without a device FSDP1 requires an accelerator.
        device_id=world.device,
        # Keep names and shapes of the parameters for the optimizer and the gradient traces.
        use_orig_params=True,
    )


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """In the `with` block, accumulate gradients without reducing them across ranks.

    The first backward pass after the `with` block reduces the accumulated gradients.
    """
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
    """Scale all gradients to a global norm of at most `limit`, and return the norm before scaling."""
    if isinstance(model, FullyShardedDataParallel):
        return _clip_shards(model, limit)
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert isinstance(norm, DTensor)
    return norm.full_tensor()


def _clip_shards(model: FullyShardedDataParallel, limit: float) -> Tensor:
    """Clip the gradients of an FSDP1 model, and return their norm before clipping."""
    # FSDP1's own `clip_grad_norm_` computes the norm in float32 and does not accept float64 gradients.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients).to(model.compute_device)
    # Each rank has a shard of every tensor. With one rank the model is not sharded, and the sum changes nothing.
    square = norm.square()
    dist.all_reduce(square, group=model.process_group)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm
