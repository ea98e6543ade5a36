"""Host-side code that all Triton kernels share.

Importing this module imports Triton. If TRITON_INTERPRET=1 is set before, Triton's interpreter runs the kernels on a
CPU, statement by statement, for tests.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from . import MAX_HEADS_PER_GROUP, MAX_WIDTH
from .device import LOG2_E

# The minimum size of the inner dimension of tl.dot on tensor cores.
MIN_DOT_WIDTH = 16

launches: Counter[str] = Counter()
"""How often each kernel ran in this process, by its name."""


class CannotLaunchError(Exception):
    """Raised if a kernel does not support the given tensors. The message says which tensor, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile size of a kernel, with the number of warps and pipeline stages."""

    rows: int  # query rows: queries x heads of a group, with the heads padded to a power of two
    keys: int
    warps: int = 4
    stages: int = 2


def for_any_length(function: Callable[..., None]) -> Any:
    """Decorate a kernel with `triton.jit`, so that it is compiled only once for all sequence lengths."""
    # By default Triton compiles a separate kernel for each integer argument that is 1 or divisible by 16. Sizes change
    # from step to step, so they are excluded from this specialization, as are the strides of gates (`s_g?`), which are
    # read element by element. Row strides stay specialized: if 16 divides the row width, it always divides the stride,
    # and only with this knowledge are loads 16 bytes wide. Addresses stay specialized as well: a view whose address is
    # no multiple of 16 bytes has its own compiled kernel.
    return triton.jit(function, do_not_specialize=[name for name in _number_parameters(function) if _is_size(name)])


def _number_parameters(function: Callable[..., None]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if not parameter.name.startswith("p_") and "constexpr" not in str(parameter.annotation)
    ]


def _is_size(name: str) -> bool:
    return not name.startswith("s_") or name.startswith("s_g")


@cache
def _for_any_stride(kernel: Any) -> Any:
    """Return a version of `kernel` without specialized integers, for rows whose width is not divisible by 16."""
    # Whether 16 divides their strides depends on the sequence length.
    return triton.jit(kernel.fn, do_not_specialize=_number_parameters(kernel.fn))


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    row_stride: int = 0,
    **constants: Any,
) -> None:
    """Launch `kernel` on a one-dimensional grid of `programs` programs, and count the launch.

    `row_stride` is a common divisor of the strides of rows, for rows that are not as far apart as they are wide.
    """
    if not programs:
        return
    launches[kernel.__name__] += 1
    if any(number % MIN_DOT_WIDTH for number in (row_stride, constants.get("D", 0), constants.get("E", 0))):
        kernel = _for_any_stride(kernel)
    # Only the first axis of a grid may have more than 65535 programs.
    kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages, **constants)


@cache
def compute_capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, times ten: 90 means 9.0. Return 0 for a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_interpreted(kernel: Any) -> bool:
    """Return whether `kernel` runs in Triton's interpreter."""
    return not isinstance(kernel, JITFunction)  # Triton's interpreter has its own class, whose module needs NumPy


def is_interpreting() -> bool:
    """Return whether Triton was imported with TRITON_INTERPRET=1."""
    return is_interpreted(tl.sort)


def check_dtypes(kernel: Any, *tensors: Tensor) -> None:
    """Raise CannotLaunchError if the dtypes differ, or are bfloat16 while the kernel runs in Triton's interpreter."""
    # The interpreter silently multiplies the bit patterns of bfloat16 (triton #11584).
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise CannotLaunchError(f"queries, keys and values are {', '.join(sorted(map(str, dtypes)))}: cast them to one")
    if torch.bfloat16 in dtypes and is_interpreted(kernel):
        raise CannotLaunchError("Triton's interpreter cannot compute in bfloat16: use float32 or float16")


def check_attention(kernel: Any, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> None:
    """Raise CannotLaunchError if the attention kernels do not support these tensors."""
    check_dtypes(kernel, q_BHTD, k_BGSD, v_BGSE)
    heads, groups, width, value_width = q_BHTD.shape[1], k_BGSD.shape[1], q_BHTD.shape[3], v_BGSE.shape[3]
    if heads % groups or heads // groups > MAX_HEADS_PER_GROUP:
        raise CannotLaunchError(
            f"{heads} query heads for {groups} groups: each takes the same number, 1 to {MAX_HEADS_PER_GROUP}"
        )
    if max(width, value_width) > MAX_WIDTH:
        raise CannotLaunchError(f"keys of width {width}, values of width {value_width}: the widest is {MAX_WIDTH}")


def triton_accumulator_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype for sums: float64 for float64 tensors, otherwise float32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float64 for float64 tensors, otherwise float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def next_power_of_two(width: int, least: int = MIN_DOT_WIDTH) -> int:
    """Return the smallest power of two that is at least `width` and at least `least`."""
    # Triton's own function is meant for kernels and takes fifty times as long on the host.
    return max(least, 1 << max(0, width - 1).bit_length())


def with_strides(tensor: Tensor) -> tuple[Any, ...]:
    """Return `tensor` [B, H, T, D], made contiguous along D, and its first three strides as kernel arguments."""
    # Dimensions of size 1 get stride 0. So a single row does not need a separately compiled kernel, and the batch
    # stride of a single long sequence does not exceed 32 bits.
    dense = tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
    return dense, *(dense.stride(axis) if dense.shape[axis] > 1 else 0 for axis in range(3))


def kernel_constants(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, scale: float) -> dict[str, Any]:
    """Return the compile-time constants that every attention kernel takes."""
    heads = q_BHTD.shape[1] // k_BGSD.shape[1]
    width, value_width = q_BHTD.shape[-1], v_BGSE.shape[-1]
    exact = q_BHTD.dtype in (torch.float32, torch.float64)
    return {
        "SCALE": scale,
        "EXPONENT": scale if exact else scale * LOG2_E,
        "EXACT": exact,
        "HEADS": heads,
        "HEADS_PADDED": next_power_of_two(heads, least=1),
        "D": width,
        "D_PADDED": next_power_of_two(width),
        "E": value_width,
        "E_PADDED": next_power_of_two(value_width),
        "ACC": triton_accumulator_dtype(q_BHTD.dtype),
    }


def empty_outputs(q_BHTD: Tensor, v_BGSE: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for the output [B, H, T, E] and the log-sum-exp [B, H, T]."""
    lse_BHT = q_BHTD.new_empty(q_BHTD.shape[:3], dtype=accumulator_dtype(q_BHTD.dtype))
    return empty_token_major(q_BHTD, v_BGSE.shape[-1]), lse_BHT


def empty_token_major(q_BHTD: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor [B, H, T, width] in which the heads of a token are adjacent in memory.

    `dtype` is by default that of `q_BHTD`.
    """
    batch, heads, tokens, _ = q_BHTD.shape
    return q_BHTD.new_empty((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)
