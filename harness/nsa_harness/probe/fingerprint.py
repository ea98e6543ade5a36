"""Facts about a tensor in host memory, read from its bytes: a checksum, size and sum, whether all values are finite.

No operator of torch runs, so nothing is dispatched, no device is asked, and autograd does not notice.
"""

from __future__ import annotations

import array
import ctypes
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

CHUNKS = 4  # evenly spaced pieces of a tensor that is too large to be read whole
ZEROS_BYTES = 64 << 20  # gradients up to this size are read whole, if a first piece of each is zero
ALIGNED = 16  # bytes; so that no element is cut in two
PARAMETERS_LIMIT = 512  # per optimizer

# The top byte of a value that is not finite has these bits set. So have few finite values, which are checked each.
_EXPONENTS = {"torch.float32": 0x7F, "torch.float64": 0x7F, "torch.bfloat16": 0x7F, "torch.float16": 0x7C}
_SIZES = {"torch.float32": 4, "torch.float64": 8, "torch.bfloat16": 2, "torch.float16": 2}
_FINITE_TOPS = {
    bits: bytes(top for top in range(256) if top & bits != bits) for bits in sorted(set(_EXPONENTS.values()))
}


class Unreadable(Exception):
    """The tensor has no plain memory on the host; the text says why."""


def sample(tensor: Any, limit_bytes: int) -> bytes:
    """Return the tensor's memory, or evenly spaced pieces of it. Raises Unreadable."""
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
    """Return "nan" or "inf" if a value is not finite, else None. Costs about a nanosecond per value."""
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
    """Return the values, or none for a dtype that is not floating point."""
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
    """Whether every value is zero, of either sign. Costs less than a nanosecond per byte, unless zeros are negative."""
    return not data.strip(b"\0") or not (data.translate(None, b"\0\x80") or any(numbers(data, dtype)))


def all_zero(gradients: list[Any]) -> int:
    """Return the number of gradients if all their values are zero; 0 if not, or if they cannot be read.

    In healthy training, the beginning of the first gradient decides.
    """
    if sum(gradient.numel() * gradient.element_size() for gradient in gradients) > ZEROS_BYTES:
        return 0
    for limit_bytes in (256, ZEROS_BYTES):
        for gradient in gradients:
            local = getattr(gradient, "_local_tensor", gradient)
            try:
                if not is_zero(sample(local, limit_bytes), str(local.dtype)):
                    return 0
            except Unreadable:
                return 0
    return len(gradients)


def largest(data: bytes, dtype: str) -> float:
    """Return the largest absolute value; nan if a value is nan, 0 without values."""
    values = numbers(data, dtype)
    if any(map(math.isnan, values)):
        return math.nan
    return max(map(abs, values), default=0.0)


def checksum(data: bytes, before: int = 0) -> int:
    return zlib.crc32(data, before)


def size_and_sum(values: Sequence[float]) -> tuple[float, float]:
    """Return the Euclidean norm and the sum. Two tensors that agree in both are hardly different."""
    return math.hypot(*values), sum(values)


def trained(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains; of more than PARAMETERS_LIMIT, an evenly spaced part."""
    every = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    return every[:: -(-len(every) // PARAMETERS_LIMIT) or 1]
