"""Compilation and tuning of the Triton kernels before the first training step.

The first call of a kernel compiles it, and finding the fastest tile sizes takes several compilations. Within a step
this would look like a hang, and would take a different time on each rank. The warm-up runs one layer forward and
backward on random inputs without collectives; afterwards all ranks use the tile sizes that rank 0 measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from .attention import NSAttention
from .model import TinyLM
from .ops.dispatch import example_tensors, implementation_for
from .ops.packed import packed_layout
from .ops.rotary import rotary_cos_sin
from .tile_tuning import measure_tiles
from .world import World


def uses_fused_kernels(model: TinyLM, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the model's layers would use the Triton kernels on this device."""
    attention = getattr(model.blocks[0], "attn", None)
    if not isinstance(attention, NSAttention):
        return False
    _, used = implementation_for(attention.implementation, *example_tensors(model.config, device, dtype))
    return used.name == "triton"


def warm_up(
    model: TinyLM,
    world: World,
    *,
    batch: int,
    tokens: int,
    autocast: Callable[[], AbstractContextManager[object]],
    file: Path | None = None,
) -> str:
    """Compile and tune the kernels for a batch size and a sequence length, and return a summary line.

    Rank 0 stores the tile sizes in `file`, by default `tuning_file()`. If the file cannot be written, the summary says
    so. `autocast` creates the context in which the forward pass runs.
    """
    # Packed documents need another variant of the selection kernel, which is the same for all document lengths.
    result = measure_tiles(
        lambda: _run_one_layer(model, world.device, batch, tokens, autocast),
        lambda: _run_one_layer(model, world.device, batch, tokens, autocast, documents=True),
        world.device,
        file,
    )
    return f"warm-up: one layer forward and backward, {result}"


def _run_one_layer(
    model: TinyLM,
    device: torch.device,
    batch: int,
    tokens: int,
    autocast: Callable[[], AbstractContextManager[object]],
    *,
    documents: bool = False,
) -> None:
    """Run the first layer forward and backward on random inputs, and undo all side effects."""
    # At least block_len tokens are used, because fewer would skip some kernels. With `documents`, the batch becomes one
    # row of two packed documents.
    config, tokens = model.config, max(tokens, model.config.block_len)
    layout = None
    if documents:
        batch, tokens = 1, batch * tokens
        lengths = [length for length in (tokens // 2, tokens - tokens // 2) if length]
        layout = packed_layout(lengths, config.block_len, config.block_stride, device)
    block = model.blocks[0]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        dtype = model.embed.weight.dtype
        x_BTM = torch.randn(batch, tokens, config.dim, device=device, dtype=dtype, requires_grad=True)
    with autocast():
        cos_sin_2Tp = rotary_cos_sin(model.get_buffer("frequencies"), tokens)
        output = block(x_BTM, cos_sin_2Tp if layout is None else cos_sin_2Tp[:, layout.positions_T], layout)
    output.float().sum().backward()
    for parameter in block.parameters():
        parameter.grad = None
    for module in block.modules():
        if isinstance(runs := getattr(module, "runs", None), Counter):
            runs.clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
