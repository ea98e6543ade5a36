"""What the bytes of a tensor in host memory say: a checksum, two numbers, whether all is finite. No operator of torch.

The memory is read as it lies there, so nothing is dispatched, no device is asked and no autograd sees it.
"""

from __future__ import annotations

import array
import ctypes
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

CHUNKS = 4  # pieces of a tensor that is too large to be read whole, evenly spaced
ZEROS_BYTES = 64 << 20  # of gradients that are read whole, because all that was read of them is zero
ALIGNED = 16  # bytes; no element is cut in two
PARAMETERS_LIMIT = 512  # of an optimizer

# The top byte of what is not finite has these bits set. Few finite numbers have: they are looked at one by one.
_EXPONENTS = {"torch.float32": 0x7F, "torch.float64": 0x7F, "torch.bfloat16": 0x7F, "torch.float16": 0x7C}
_SIZES = {"torch.float32": 4, "torch.float64": 8, "torch.bfloat16": 2, "torch.float16": 2}
_FINITE_TOPS = {
    bits: bytes(top for top in range(256) if top & bits != bits) for bits in sorted(set(_EXPONENTS.values()))
}


class Unreadable(Exception):
    """The tensor has no plain memory on the host; the text says what it has."""


def sample(tensor: Any, limit_bytes: int) -> bytes:
    """The tensor's memory, or evenly spaced pieces of it. Raises Unreadable."""
    if tensor.device.type != "cpu":
        raise Unreadable(f"on {tensor.device.type}")
    if "strided" not in str(tensor.layout) or not tensor.is_contiguous():
        raise Unreadable("not contiguous")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return b""
    at = tensor.data_ptr()
    if not at:
        raise Unreadable("without memory")
    if size <= limit_bytes:
        return ctypes.string_at(at, size)
    piece = max(ALIGNED, limit_bytes // CHUNKS // ALIGNED * ALIGNED)
    last = (size - piece) // ALIGNED * ALIGNED
    begins = [last * chunk // (CHUNKS - 1) // ALIGNED * ALIGNED for chunk in range(CHUNKS)]
    return b"".join(ctypes.string_at(at + begin, piece) for begin in begins)


def broken(data: bytes, dtype: str) -> str | None:
    """ "nan" or "inf" where one of these numbers is not finite. About a nanosecond a number."""
    bits = _EXPONENTS.get(dtype)
    if bits is None:
        return None
    size = _SIZES[dtype]
    if not data[size - 1 :: size].translate(None, _FINITE_TOPS[bits]):
        return None
    wrong = [value for value in numbers(data, dtype) if not math.isfinite(value)]
    if not wrong:
        return None
    return "nan" if any(map(math.isnan, wrong)) else "inf"


def numbers(data: bytes, dtype: str) -> Sequence[float]:
    """The numbers; none of a type that holds no floating point numbers."""
    if dtype in ("torch.float32", "torch.float64"):
        return array.array("f" if dtype == "torch.float32" else "d", data)
    if dtype == "torch.bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return array.array("f", bytes(wide))
    if dtype == "torch.float16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    return ()


def is_zero(data: bytes, dtype: str) -> bool:
    """Every number is zero, of either sign. Less than a nanosecond a byte, unless there are zeros below zero."""
    return not data.strip(b"\0") or not (data.translate(None, b"\0\x80") or any(numbers(data, dtype)))


def all_zero(gradients: list[Any]) -> int:
    """How many there are, if all their numbers are zero; else 0, as where that cannot be read or is too much to read.

    Where training goes well, the beginning of the first one says so.
    """
    if sum(one.numel() * one.element_size() for one in gradients) > ZEROS_BYTES:
        return 0
    for limit_bytes in (256, ZEROS_BYTES):
        for one in gradients:
            local = getattr(one, "_local_tensor", one)
            try:
                if not is_zero(sample(local, limit_bytes), str(local.dtype)):
                    return 0
            except Unreadable:
                return 0
    return len(gradients)


def largest(data: bytes, dtype: str) -> float:
    """The largest size of a number; nan where one is none, 0 where there is none."""
    values = numbers(data, dtype)
    if any(map(math.isnan, values)):
        return math.nan
    return max(map(abs, values), default=0.0)


def checksum(data: bytes, before: int = 0) -> int:
    return zlib.crc32(data, before)


def size_and_sum(values: Sequence[float]) -> tuple[float, float]:
    """The root of the sum of squares, and the sum: two tensors of which both agree are hardly different."""
    return math.hypot(*values), sum(values)


def trained(optimizer: Any) -> list[Any]:
    """What an optimizer is to train; of very many parameters every so many."""
    every = list(_wanted(optimizer.param_groups))
    return every[:: -(-len(every) // PARAMETERS_LIMIT) or 1]


def _wanted(groups: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return (parameter for group in groups for parameter in group["params"] if parameter.requires_grad)
