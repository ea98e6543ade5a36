"""Validation of the arguments of `sparse_attention`, shared by all implementations.

The code behind it does not check again. With invalid arguments, a kernel would read beyond the end of a tensor.

Dimensions: c branches, B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, E value width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..config import FORCED_BLOCKS
from . import NAMESPACE
from .packed import compressed_starts
from .selection import Selection
from .table_cache import cached_table

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BRANCHES = ("compressed", "selected", "sliding")
Pair = tuple[Tensor, Tensor]


def validate_inputs(
    q_BHTD: Tensor,
    pairs: Sequence[Pair],
    gates_cBHT: Tensor,
    selection: Selection,
    window: int,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """Check the arguments of `sparse_attention`, and return the starts of packed sequences, or None if there are none.

    Raises ValueError that lists every mistake with the parameter, the expected and the actual value. Values of
    `cu_seqlens` on a CPU are checked as well. On a GPU, reading them would block the stream in each pass; instead the
    device checks them with torch._assert_async, once per tensor and version, and wrong values end the process.
    """
    problems = _selection_problems(selection, window)
    if q_BHTD.dim() != 4 or q_BHTD.dtype not in _FLOATS or 0 in (q_BHTD.shape[1], q_BHTD.shape[-1]):
        problems.append(f"q_BHTD: expected floats [B, H, T, D] with a head and a width, got {_describe(q_BHTD)}")
        raise ValueError(_error_message(problems))
    blocks = pairs[0][0].shape[2] if pairs[0][0].dim() == 4 else 0
    problems += [*_pair_problems(q_BHTD, pairs), *_gate_problems(q_BHTD, gates_cBHT)]
    problems += (
        _block_count_problems(q_BHTD, blocks, selection)
        if cu_seqlens is None
        else cu_seqlens_form_problems(cu_seqlens, q_BHTD, "q_BHTD")
    )
    numbers = (q_BHTD.shape[2], blocks, selection.block_len, max(1, selection.block_stride))
    if cu_seqlens is not None and _is_readable_on_host(cu_seqlens):
        problems += cu_seqlens_problems(cu_seqlens.tolist(), *numbers)
    if problems:
        raise ValueError(_error_message(problems))
    if cu_seqlens is None:
        return None
    if torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor:
        return _validated_starts(cu_seqlens, *numbers)
    if cu_seqlens.is_cuda:
        cached_table(
            cu_seqlens, cu_seqlens.device, ("asserted", *numbers), lambda: assert_cu_seqlens_async(cu_seqlens, *numbers)
        )
    return cu_seqlens


def _is_readable_on_host(starts: Tensor) -> bool:
    """Return whether `starts` is an integer tensor on the CPU, which can be read without waiting for a device."""
    if torch.compiler.is_compiling() or type(starts) is not Tensor:
        return False
    return starts.device.type == "cpu" and starts.dim() == 1 and starts.shape[0] > 1 and not starts.is_floating_point()


def _selection_problems(selection: Selection, window: int) -> list[str]:
    sizes = {f"selection.{name}": getattr(selection, name) for name in ("block_len", "block_stride", "select_len")}
    sizes["window"] = window
    problems = [f"{name}: expected at least 1, got {size}" for name, size in sizes.items() if size < 1]
    if selection.block_stride > selection.block_len:
        problems.append(
            f"selection.block_stride: expected at most block_len ({selection.block_len}), "
            f"got {selection.block_stride}: tokens between two blocks would belong to none"
        )
    if selection.select_count < FORCED_BLOCKS:
        problems.append(
            f"selection.select_count: expected at least {FORCED_BLOCKS} (block 0, the current and the previous one are "
            f"always chosen), got {selection.select_count}"
        )
    if not math.isfinite(selection.scale):
        problems.append(f"selection.scale: expected a finite number, got {selection.scale}")
    return problems


def _pair_problems(q_BHTD: Tensor, pairs: Sequence[Pair]) -> list[str]:
    problems = []
    (batch, heads, tokens, width), (_, selected_values) = q_BHTD.shape, pairs[1]
    groups, value_width = (selected_values.shape[1], selected_values.shape[3]) if selected_values.dim() == 4 else (1, 1)
    if groups < 1 or heads % groups:
        problems.append(f"branches.selected: expected groups that share {heads} query heads evenly, got {groups}")
    if value_width < 1:
        problems.append(f"branches.selected: expected values with a width, got {value_width}")
    for name, (k, v) in zip(BRANCHES, pairs, strict=True):
        # The number of compressed blocks is checked separately, because it depends on block_len and block_stride.
        length = k.shape[2] if name == "compressed" and k.dim() == 4 else tokens
        problems += _mismatches(f"branches.{name} keys", k, (batch, groups, length, width), q_BHTD)
        problems += _mismatches(f"branches.{name} values", v, (batch, groups, length, value_width), q_BHTD)
    return problems


def _block_count_problems(q_BHTD: Tensor, blocks: int, selection: Selection) -> list[str]:
    length, stride, tokens = selection.block_len, max(1, selection.block_stride), q_BHTD.shape[2]
    expected = (tokens - length) // stride + 1 if tokens >= length else 0
    if blocks == expected:
        return []
    return [
        f"branches.compressed: expected the {expected} complete blocks of {tokens} tokens (block_len {length}, "
        f"block_stride {stride}), got {blocks}"
    ]


def _mismatches(name: str, tensor: Tensor, shape: tuple[int, ...], q_BHTD: Tensor) -> list[str]:
    problems = []
    if tensor.shape != shape:
        problems.append(f"{name}: expected the shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != q_BHTD.dtype:
        problems.append(f"{name}: expected {q_BHTD.dtype} as q_BHTD, got {tensor.dtype}")
    if tensor.device != q_BHTD.device:
        problems.append(f"{name}: expected {q_BHTD.device} as q_BHTD, got {tensor.device}")
    return problems


def _gate_problems(q_BHTD: Tensor, gates_cBHT: Tensor) -> list[str]:
    problems = []
    shape = (len(BRANCHES), *q_BHTD.shape[:3])
    if gates_cBHT.shape != shape:
        problems.append(f"gates_cBHT: expected the shape {list(shape)}, got {list(gates_cBHT.shape)}")
    if gates_cBHT.dtype not in _FLOATS:
        problems.append(f"gates_cBHT: expected floats, got {gates_cBHT.dtype}")
    if gates_cBHT.device != q_BHTD.device:
        problems.append(f"gates_cBHT: expected {q_BHTD.device} as q_BHTD, got {gates_cBHT.device}")
    return problems


def cu_seqlens_form_problems(starts: Tensor, tensor: Tensor, name: str) -> list[str]:
    """Return one message per error in the shape, dtype and device of `cu_seqlens`.

    `tensor`, an argument called `name`, has the batch as its first dimension and must be on the same device.
    """
    problems = []
    if tensor.shape[0] != 1:
        problems.append(f"cu_seqlens: expected a batch of 1, all sequences in one row, got {tensor.shape[0]}")
    if starts.dim() != 1 or starts.shape[0] < 2:
        problems.append(f"cu_seqlens: expected [sequences + 1], two numbers at least, got {list(starts.shape)}")
    if starts.dtype != torch.int32:
        problems.append(f"cu_seqlens: expected torch.int32, got {starts.dtype}")
    if starts.device != tensor.device:
        problems.append(f"cu_seqlens: expected {tensor.device} as {name}, got {starts.device}")
    if not starts.is_contiguous():
        problems.append(f"cu_seqlens: expected it contiguous, got a stride of {starts.stride(0)}")
    return problems


def cu_seqlens_problems(starts: list[int], tokens: int, blocks: int, block_len: int, block_stride: int) -> list[str]:
    """Return one message per error in the values of `cu_seqlens`, with the number of compressed blocks."""
    problems = cu_seqlens_value_problems(starts, tokens)
    if not problems:
        lengths = (stop - start for start, stop in pairwise(starts))
        expected = sum(max(0, (length - block_len) // block_stride + 1) for length in lengths)
        if blocks != expected:
            problems.append(
                f"branches.compressed: expected the {expected} complete blocks of all sequences of cu_seqlens "
                f"(block_len {block_len}, block_stride {block_stride}), got {blocks}"
            )
    return problems


def cu_seqlens_value_problems(starts: list[int], tokens: int) -> list[str]:
    """Return one message per error in the values of `cu_seqlens` for a row of `tokens` tokens."""
    problems = []
    if starts[0] != 0 or starts[-1] != tokens:
        problems.append(f"cu_seqlens: expected it from 0 to T = {tokens}, got {starts[0]} to {starts[-1]}")
    if falls := [place for place, (start, stop) in enumerate(pairwise(starts)) if stop < start]:
        first = falls[0]
        problems.append(
            f"cu_seqlens: expected it ascending, got {starts[first]} before {starts[first + 1]} at place {first}"
        )
    return problems


def assert_cu_seqlens_async(starts: Tensor, tokens: int, blocks: int, block_len: int, block_stride: int) -> None:
    """Check `cu_seqlens` on its device, without waiting for the result. If a value is wrong, the process ends later."""
    fits = (starts[0] == 0) & (starts[-1] == tokens) & (starts.diff() >= 0).all()
    fits &= compressed_starts(starts, block_len, block_stride)[-1] == blocks
    torch._assert_async(
        fits,
        f"cu_seqlens: expected it ascending from 0 to T = {tokens} with {blocks} complete compressed blocks "
        f"(block_len {block_len}, block_stride {block_stride})",
    )


# While torch.compile traces there are no values, so an operator checks them when it runs. The pass computes with the
# operator's result, so the compiler cannot remove the check.
@torch.library.custom_op(f"{NAMESPACE}::checked_starts", mutates_args=())
def _validated_starts(starts: Tensor, tokens: int, blocks: int, block_len: int, block_stride: int) -> Tensor:
    numbers = (tokens, blocks, block_len, block_stride)
    if starts.device.type != "cpu":
        assert_cu_seqlens_async(starts, *numbers)
    elif problems := cu_seqlens_problems(starts.tolist(), *numbers):
        raise ValueError(_error_message(problems))
    return starts.clone()


@_validated_starts.register_fake
def _(starts: Tensor, *_: int) -> Tensor:
    return torch.empty_like(starts)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _error_message(problems: Sequence[str]) -> str:
    return "sparse_attention: " + "; ".join(problems)
