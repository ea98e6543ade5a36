"""A program: what Triton would compile of the fused kernels in steps of many lengths; one line of JSON a length.

    python tests/nsa/fused/variants.py WAY WIDTH DTYPE

WAY: all branches `at_once`, as one operator, the same with `atomics`, or `apart`; before them the rotary embeddings of
a layer. No GPU is needed: Triton decides by the arguments of a launch whether it has that kernel already, and what it
decides by is asked of Triton itself. What the kernels would have written stays as it is, so that nothing is computed.
The first two lines are the warm-up, of one sequence a row and of a packed row; then come the steps, each with the
kernels that are new in it, and last one with queries at an address that 16 does not divide.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from nsa_attention.ops import rotary  # noqa: E402
from nsa_attention.ops.fused import descriptors, spanned, tuning  # noqa: E402
from nsa_attention.ops.fused.backend import FusedBackend  # noqa: E402
from nsa_attention.ops.fused.gated_attention import gated_attention  # noqa: E402
from nsa_attention.ops.mixing import gated_sum  # noqa: E402
from nsa_attention.ops.packed import compressed_starts  # noqa: E402
from nsa_attention.ops.selection import Selection  # noqa: E402

L, D_STRIDE, SELECT_LEN, PLACES, WINDOW = 6, 3, 5, 4, 7
WARM = 37
# All residues of 16, sequences shorter than every block, and longer ones around powers of two.
LENGTHS = [*range(1, 50), 63, 64, 65, 127, 128, 129, 200, 256, 257, 1000]
ROWS = (1, 2)
# So few programs that one launch is not shared out any more: of a real GPU it takes some thousand tokens.
FEW_PROGRAMS = 16

compiled: set[str] = set()
new: list[str] = []


@cache
def binder(kernel: JITFunction) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))


def look(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001
    """In place of a launch: is this one that Triton would compile?"""
    _, specialization, rest = binder(kernel)(*arguments, **options)
    key = f"{kernel.__name__} {specialization} {rest}"
    if key not in compiled:
        compiled.add(key)
        new.append(kernel.__name__)


def tensors(heads: int, rows: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """As a projection makes them: a token's heads side by side."""
    return torch.zeros(rows, length, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()


def step(way: str, rows: int, tokens: int, width: int, dtype: torch.dtype, starts: Tensor | None, off: int = 0) -> None:
    """Forward and backward of the whole operation; `off`: how many elements off an even address the queries begin."""
    scale = 0.25
    blocks = max(0, (tokens - L) // D_STRIDE + 1) if starts is None else int(compressed_starts(starts, L, D_STRIDE)[-1])
    selection = Selection(block_len=L, block_stride=D_STRIDE, select_len=SELECT_LEN, select_count=PLACES, scale=scale)
    room = torch.zeros(rows * tokens * 4 * width + off, dtype=dtype)[off:]
    q = room.view(rows, tokens, 4, width).transpose(1, 2).requires_grad_()
    k_cmp, v_cmp = (tensors(2, rows, blocks, width, dtype).contiguous() for _ in range(2))
    k, v = (tensors(2, rows, tokens, width, dtype) for _ in range(2))
    gates = torch.zeros(rows, tokens, 3, 4, dtype=dtype).permute(2, 0, 3, 1).requires_grad_()
    pairs = ((k_cmp, v_cmp), (k, v), (k.contiguous(), v))
    run = apart if way == "apart" else partial(at_once, deterministic=way != "atomics")
    run(q, pairs, gates, selection, starts).sum().backward()


def rotation(
    values: int, rows: int, tokens: int, width: int, dtype: torch.dtype, starts: Tensor | None, off: int = 0
) -> None:
    """Forward and backward of the rotary embeddings of a layer, whose joint projection begins `off` an even address.

    `values` columns of the projection are not rotated.
    """
    heads = (4, 2, 2)
    rotated, columns = sum(heads) * width, sum(heads) * width + values
    joint = torch.zeros(rows * tokens * columns + off, dtype=dtype)[off:].requires_grad_()
    parts = joint.view(rows, tokens, columns)[..., :rotated].split([count * width for count in heads], -1)
    angles = torch.zeros(2, tokens, width // 2, dtype=dtype)
    if starts is None:
        of_blocks = angles[:, L - 1 :: D_STRIDE]
    else:
        of_blocks = angles[:, torch.arange(int(compressed_starts(starts, L, D_STRIDE)[-1]))]
    blocks = torch.zeros(rows, 2, of_blocks.shape[1], width, dtype=dtype, requires_grad=True)
    tensors = [*(part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts), blocks]
    outputs = rotary._rotate(tensors, [*[angles] * 3, of_blocks], 1.0, [True, *[False] * 3], "triton")
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])


def at_once(
    q: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    gates: Tensor,
    selection: Selection,
    starts: Tensor | None,
    *,
    deterministic: bool,
) -> Tensor:
    return gated_attention(q, pairs, gates, selection, window=WINDOW, starts=starts, deterministic=deterministic)[0]


def apart(
    q: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], gates: Tensor, selection: Selection, starts: Tensor | None
) -> Tensor:
    backend, scale, (of_blocks, chosen, last) = FusedBackend(), selection.scale, pairs
    output, lse = backend.attend_compressed(
        q, *of_blocks, block_len=L, block_stride=D_STRIDE, scale=scale, starts=starts
    )
    indices = backend.select(q.detach(), of_blocks[0].detach(), lse, selection, starts=starts)
    selected, _ = backend.attend_selected(q, *chosen, indices, select_len=SELECT_LEN, scale=scale, starts=starts)
    sliding, _ = backend.attend_sliding(q, *last, window=WINDOW, scale=scale, starts=starts)
    return gated_sum((output, selected, sliding), gates)


def main(words: list[str]) -> None:
    way, width, dtype = words[0], int(words[1]), getattr(torch, words[2])
    JITFunction.run = look
    spanned.MIN_PROGRAMS = FEW_PROGRAMS
    # As a GPU of capability 9.0 takes them.
    descriptors.supports_descriptors = lambda tensor: tensor.element_size() == 2

    def tell(rows: int, tokens: int, starts: Tensor | None = None, off: int = 0) -> None:
        new.clear()
        for values in (16, 5):
            rotation(values, rows, tokens, width, dtype, starts, off)
        step(way, rows, tokens, width, dtype, starts, off)
        print(
            json.dumps({"rows": rows, "tokens": tokens, "packed": starts is not None, "new": sorted(new)}), flush=True
        )

    with tuning.measuring():
        tell(2, WARM)
    for lengths in ([WARM, WARM], *([one, 20, 3] for one in LENGTHS[:16])):
        tell(1, sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int())
    for tokens in LENGTHS:
        for rows in ROWS:
            tell(rows, tokens)
    tell(1, WARM, off=1)


if __name__ == "__main__":
    main(sys.argv[1:])
