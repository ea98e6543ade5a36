"""What all fused kernels share on the host's side: a counted launch, tile sizes, and the numbers a kernel needs.

Importing this module imports Triton. With TRITON_INTERPRET=1 set before that, the kernels run on a CPU, statement by
statement: for tests.
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
from triton.runtime.interpreter import InterpretedFunction

from . import MAX_HEADS_PER_GROUP, MAX_WIDTH
from .device import LOG2_E

# A dot product on tensor cores is at least this wide in its inner dimension.
MIN_DOT_WIDTH = 16

launches: Counter[str] = Counter()
"""How often each kernel ran in this process, by its name."""


class CannotLaunchError(Exception):
    """The kernel cannot take these tensors; the text names the tensor, its value and what to do."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of one program's work, and how the compiler spreads it."""

    rows: int  # query rows: queries x heads of a group, the heads padded to a power of two
    keys: int
    warps: int = 4
    stages: int = 2


def for_any_length(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that the host launches: compiled once, whatever the lengths of a step are.

    Triton compiles a kernel anew for a number that is 1, and for one that 16 divides. Sizes change from step to step
    and are kept out of that; so are the strides of gates, `s_g?`, which are read one by one. Strides of rows stay in:
    of rows whose width 16 divides they always are multiples of 16, and without knowing it no load is 16 bytes wide.
    So do the addresses of tensors: a view that begins off a multiple of 16 bytes has a kernel of its own.
    """
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
    """The same for rows whose width 16 does not divide: which strides it divides changes with the length."""
    return triton.jit(kernel.fn, do_not_specialize=_number_parameters(kernel.fn))


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 4, stages: int = 2, **constants: Any) -> None:
    """Run `kernel` on a grid of one axis, the only one without a limit of 65535, and count it."""
    if not programs:
        return
    launches[kernel.__name__] += 1
    if any(constants.get(width, 0) % MIN_DOT_WIDTH for width in ("D", "E")):
        kernel = _for_any_stride(kernel)
    kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages, **constants)


def is_interpreted(kernel: Any) -> bool:
    return isinstance(kernel, InterpretedFunction)


def is_interpreting() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: its own functions show it."""
    return is_interpreted(tl.sort)


def check_dtypes(kernel: Any, *tensors: Tensor) -> None:
    """Raises CannotLaunchError for tensors that differ in dtype, and for bfloat16 under the interpreter.

    The interpreter multiplies the bit patterns of bfloat16 without a word (triton #11584).
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise CannotLaunchError(f"queries, keys and values are {', '.join(sorted(map(str, dtypes)))}: cast them to one")
    if torch.bfloat16 in dtypes and is_interpreted(kernel):
        raise CannotLaunchError("Triton's interpreter cannot compute in bfloat16: use float32 or float16")


def check_attention(kernel: Any, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> None:
    """Raises CannotLaunchError for dtypes, widths or heads that no attention kernel takes."""
    check_dtypes(kernel, q_BHTD, k_BGSD, v_BGSE)
    heads, groups, width, value_width = q_BHTD.shape[1], k_BGSD.shape[1], q_BHTD.shape[3], v_BGSE.shape[3]
    if heads % groups or heads // groups > MAX_HEADS_PER_GROUP:
        raise CannotLaunchError(
            f"{heads} query heads for {groups} groups: each takes the same number, 1 to {MAX_HEADS_PER_GROUP}"
        )
    if max(width, value_width) > MAX_WIDTH:
        raise CannotLaunchError(f"keys of width {width}, values of width {value_width}: the widest is {MAX_WIDTH}")


def triton_accumulator_dtype(dtype: torch.dtype) -> tl.dtype:
    """Sums of float64 are kept in float64, which tests need; those of anything else in float32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same, as a dtype of torch."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def next_power_of_two(width: int, least: int = MIN_DOT_WIDTH) -> int:
    """The power of two that holds `width`: tiles have no other sizes."""
    # Triton's own function is made for kernels, and takes the host fifty times as long.
    return max(least, 1 << max(0, width - 1).bit_length())


def with_strides(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor [B, H, T, D] for a kernel: itself, with its strides but the last, which is 1.

    A dimension of one has the stride 0, of any that it may say: one row is no other kernel than several, and of one
    sequence no stride is beyond 32 bits for the length of the sequence.
    """
    dense = tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
    return dense, *(dense.stride(axis) if dense.shape[axis] > 1 else 0 for axis in range(3))


def kernel_constants(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, scale: float) -> dict[str, Any]:
    """The constants that every attention kernel is compiled for."""
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
    """Room for output and log-sum-exp."""
    lse_BHT = q_BHTD.new_empty(q_BHTD.shape[:3], dtype=accumulator_dtype(q_BHTD.dtype))
    return empty_token_major(q_BHTD, v_BGSE.shape[-1]), lse_BHT


def empty_token_major(q_BHTD: Tensor, width: int) -> Tensor:
    """[B, H, T, width] with the heads of a token side by side, as a tile of queries x heads writes them."""
    batch, heads, tokens, _ = q_BHTD.shape
    return q_BHTD.new_empty((batch, tokens, heads, width)).transpose(1, 2)
