"""Validation of the arguments of `nsa_func`, shared by all implementations.

The implementations do not check again. With invalid arguments, a kernel would read beyond the end of a tensor.

Dimensions: B batch, T tokens, H query heads, G key and value heads, S compressed blocks, D key width, E value width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..config import FORCED_BLOCKS, Implementation, type_mistakes
from . import NAMESPACE
from .packed import compressed_starts
from .table_cache import cached_table

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_KEYS_AND_VALUES = "[B, T, G, D]"
_IMPLEMENTATIONS = tuple(map(str, Implementation))  # torch.compile of torch 2.11 cannot trace an enumeration


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The length arguments of `nsa_func`. The fields have the names of its parameters."""

    block_size: int
    block_count: int
    compress_size: int
    compress_stride: int
    window: int


def validate_inputs(
    q: Tensor,
    keys_and_values: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
    lengths: Lengths,
    scale: float | None,
    cu_seqlens: Tensor | None,
    implementation: str,
) -> Tensor | None:
    """Check the arguments of `nsa_func`, and return the starts of packed sequences, or None if there are none.

    `keys_and_values` and `gates` map parameter names to tensors; the names of values begin with `v_`. Raises a
    ValueError that lists every mistake with the parameter, the expected and the actual value. Values of `cu_seqlens` on
    a CPU are checked as well. On a GPU, reading them would block the stream in each pass; instead the device checks
    them with torch._assert_async, once per tensor and version, and wrong values abort the process.
    """
    problems = _number_problems(lengths, scale, implementation)
    tensors = {"q": q, **keys_and_values, **gates} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    if missing := [
        f"{name}: expected a tensor, got {_kind(value)}"
        for name, value in tensors.items()
        if not isinstance(value, Tensor)
    ]:
        raise ValueError(_error_message(problems + missing))
    if q.dim() != 4 or q.dtype not in _FLOATS or 0 in q.shape[2:]:
        problems.append(f"q: expected floats [B, T, H, D] with a head and a width, got {_describe(q)}")
        problems += _rank_problems(keys_and_values, 4, _KEYS_AND_VALUES) + _rank_problems(gates, 3, "[B, T, H]")
        raise ValueError(_error_message(problems))
    blocks = keys_and_values["k_cmp"].shape[1] if keys_and_values["k_cmp"].dim() == 4 else 0
    problems += [*_key_value_problems(q, keys_and_values), *_gate_problems(q, gates)]
    if are_lengths_valid := not any(_length_problems(lengths)):
        problems += [] if cu_seqlens is not None else _block_count_problems(q, keys_and_values["k_cmp"], lengths)
    numbers = (q.shape[1], blocks, lengths.compress_size, lengths.compress_stride)
    if cu_seqlens is not None:
        problems += cu_seqlens_form_problems(cu_seqlens, q, "q")
        if are_lengths_valid and _is_readable_on_host(cu_seqlens):
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


def _number_problems(lengths: Lengths, scale: float | None, implementation: str) -> list[str]:
    problems = [*_length_problems(lengths), *_selection_problems(lengths)]
    if scale is not None and not math.isfinite(scale):
        problems.append(f"scale: expected a finite number, got {scale}")
    if implementation not in _IMPLEMENTATIONS:
        problems.append(f"implementation: expected {', '.join(_IMPLEMENTATIONS)}, got {implementation!r}")
    return problems


def _length_problems(lengths: Lengths) -> list[str]:
    return compression_problems(lengths.compress_size, lengths.compress_stride)


def _selection_problems(lengths: Lengths) -> list[str]:
    sizes = {"window": lengths.window, "block_size": lengths.block_size, "block_count": lengths.block_count}
    if wrong_types := type_mistakes(sizes):
        return wrong_types
    problems = []
    if lengths.window < 1:
        problems.append(f"window: expected at least 1, got {lengths.window}")
    if lengths.block_size < 1:
        problems.append(f"block_size: expected at least 1, got {lengths.block_size}")
    if lengths.block_count < FORCED_BLOCKS:
        problems.append(
            f"block_count: expected at least {FORCED_BLOCKS} (block 0, the current and the previous one are always "
            f"chosen), got {lengths.block_count}"
        )
    return problems


def compression_problems(compress_size: int, compress_stride: int) -> list[str]:
    """Return one message per error in the length and the stride of compressed blocks."""
    sizes = {"compress_size": compress_size, "compress_stride": compress_stride}
    if wrong_types := type_mistakes(sizes):
        return wrong_types
    problems = [f"{name}: expected at least 1, got {size}" for name, size in sizes.items() if size < 1]
    if compress_stride > compress_size:
        problems.append(
            f"compress_stride: expected at most compress_size ({compress_size}), got {compress_stride}: tokens between "
            "two blocks would belong to none"
        )
    return problems


def _rank_problems(tensors: Mapping[str, Tensor], dimensions: int, legend: str) -> list[str]:
    return [
        f"{name}: expected floats {legend}, got {_describe(tensor)}"
        for name, tensor in tensors.items()
        if tensor.dim() != dimensions or tensor.dtype not in _FLOATS
    ]


def _key_value_problems(q: Tensor, keys_and_values: Mapping[str, Tensor]) -> list[str]:
    problems = []
    (batch, tokens, heads, width), selected_values = q.shape, keys_and_values["v_slc"]
    groups, value_width = selected_values.shape[2:] if selected_values.dim() == 4 else (1, 1)
    if groups < 1 or heads % groups:
        problems.append(f"v_slc: expected a number of heads that divides the {heads} heads of q, got {groups}")
    if value_width < 1:
        problems.append(f"v_slc: expected values with a width, got {value_width}")
    k_cmp = keys_and_values["k_cmp"]
    for name, tensor in keys_and_values.items():
        # The number of compressed blocks is checked separately, because it depends on other arguments.
        length = k_cmp.shape[1] if name.endswith("_cmp") and k_cmp.dim() == 4 else tokens
        shape = (batch, length, groups, value_width if name.startswith("v_") else width)
        problems += _mismatches(name, tensor, shape, q)
    return problems


def _block_count_problems(q: Tensor, k_cmp: Tensor, lengths: Lengths) -> list[str]:
    size, stride, tokens = lengths.compress_size, lengths.compress_stride, q.shape[1]
    expected = (tokens - size) // stride + 1 if tokens >= size else 0
    if k_cmp.dim() != 4 or k_cmp.shape[1] == expected:
        return []
    return [
        f"k_cmp: expected the {expected} complete blocks of {tokens} tokens (compress_size {size}, compress_stride "
        f"{stride}), got {k_cmp.shape[1]}"
    ]


def _mismatches(name: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> list[str]:
    problems = []
    if tensor.shape != shape:
        is_heads_first = tensor.dim() == 4 and tensor.transpose(1, 2).shape == shape
        hint = "; did you mean .transpose(1, 2)?" if is_heads_first else ""
        problems.append(f"{name}: expected the shape {list(shape)}, got {list(tensor.shape)}{hint}")
    if tensor.dtype != q.dtype:
        problems.append(f"{name}: expected {q.dtype} as q, got {tensor.dtype}")
    if tensor.device != q.device:
        problems.append(f"{name}: expected {q.device} as q, got {tensor.device}")
    return problems


def _gate_problems(q: Tensor, gates: Mapping[str, Tensor]) -> list[str]:
    problems = []
    shape, dtype = q.shape[:3], gates["g_cmp"].dtype
    for name, gate in gates.items():
        if gate.shape != shape:
            problems.append(f"{name}: expected the shape {list(shape)}, got {list(gate.shape)}")
        if gate.dtype not in _FLOATS:
            problems.append(f"{name}: expected floats, got {gate.dtype}")
        elif gate.dtype != dtype and dtype in _FLOATS:
            problems.append(f"{name}: expected {dtype} as g_cmp, got {gate.dtype}")
        if gate.device != q.device:
            problems.append(f"{name}: expected {q.device} as q, got {gate.device}")
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
        problems.append(f"cu_seqlens: expected torch.int32 (cu_seqlens.int()), got {starts.dtype}")
    if starts.device != tensor.device:
        problems.append(f"cu_seqlens: expected {tensor.device} as {name}, got {starts.device}")
    if not starts.is_contiguous():
        problems.append(f"cu_seqlens: expected it contiguous, got a stride of {starts.stride(0)}")
    return problems


def cu_seqlens_problems(
    starts: list[int], tokens: int, blocks: int, compress_size: int, compress_stride: int
) -> list[str]:
    """Return one message per error in the values of `cu_seqlens` or in the number of compressed blocks."""
    problems = cu_seqlens_value_problems(starts, tokens)
    if not problems:
        lengths = (stop - start for start, stop in pairwise(starts))
        expected = sum(max(0, (length - compress_size) // compress_stride + 1) for length in lengths)
        if blocks != expected:
            problems.append(
                f"k_cmp: expected the {expected} complete blocks of all sequences of cu_seqlens (compress_size "
                f"{compress_size}, compress_stride {compress_stride}), got {blocks}"
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


def assert_cu_seqlens_async(starts: Tensor, tokens: int, blocks: int, compress_size: int, compress_stride: int) -> None:
    """Check `cu_seqlens` on its device, without waiting for the result. A wrong value aborts the process later."""
    fits = (starts[0] == 0) & (starts[-1] == tokens) & (starts.diff() >= 0).all()
    fits &= compressed_starts(starts, compress_size, compress_stride)[-1] == blocks
    torch._assert_async(
        fits,
        f"cu_seqlens: expected it ascending from 0 to T = {tokens} with {blocks} complete compressed blocks "
        f"(compress_size {compress_size}, compress_stride {compress_stride})",
    )


# While torch.compile traces there are no values, so an operator checks them when it runs. The pass computes with the
# operator's result, so the compiler cannot remove the check.
@torch.library.custom_op(f"{NAMESPACE}::checked_starts", mutates_args=())
def _validated_starts(starts: Tensor, tokens: int, blocks: int, compress_size: int, compress_stride: int) -> Tensor:
    numbers = (tokens, blocks, compress_size, compress_stride)
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


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _error_message(problems: Sequence[str]) -> str:
    return "nsa_func: " + "; ".join(problems)
