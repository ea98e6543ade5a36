"""Computes checksums and statistics of a tensor from its bytes in host memory, without any torch operator."""

from __future__ import annotations

import array
import ctypes
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

CHUNKS = 4  # evenly spaced pieces that are read from a tensor that is too large
ZEROS_BYTES = 64 << 20  # all gradients together are read completely up to this size, if the start of each is zero
ALIGNMENT_BYTES = 16  # pieces begin at multiples of it, so no element is cut in two
PARAMETERS_LIMIT = 512  # per optimizer

# The top byte of a value that is not finite has all these bits set. Few finite values have them set as well, and each
# of these is checked with math.isfinite.
_EXPONENTS = {"torch.float32": 0x7F, "torch.float64": 0x7F, "torch.bfloat16": 0x7F, "torch.float16": 0x7C}
_SIZES = {"torch.float32": 4, "torch.float64": 8, "torch.bfloat16": 2, "torch.float16": 2}
_FINITE_TOPS = {
    bits: bytes(top for top in range(256) if top & bits != bits) for bits in sorted(set(_EXPONENTS.values()))
}


class Unreadable(Exception):
    """Raised if the values of a tensor are not in contiguous host memory."""


def sample_bytes(tensor: Any, limit_bytes: int) -> bytes:
    """Return a tensor's bytes, or pieces of them above `limit_bytes`. Raise Unreadable if they are not contiguous."""
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
    piece = max(ALIGNMENT_BYTES, limit_bytes // CHUNKS // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    last = (size - piece) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    begins = [last * chunk // (CHUNKS - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES for chunk in range(CHUNKS)]
    return b"".join(ctypes.string_at(at + begin, piece) for begin in begins)


def not_finite(data: bytes, dtype: str) -> str | None:
    """Return "nan" or "inf" if `data` contains a NaN or infinite value, or None if all values are finite."""
    bits = _EXPONENTS.get(dtype)
    if bits is None:
        return None
    size = _SIZES[dtype]
    if not data[size - 1 :: size].translate(None, _FINITE_TOPS[bits]):
        return None
    wrong = [value for value in values_of(data, dtype) if not math.isfinite(value)]
    if not wrong:
        return None
    return "nan" if any(map(math.isnan, wrong)) else "inf"


def values_of(data: bytes, dtype: str) -> Sequence[float]:
    """Return the values stored in `data`, or () if `dtype` is not supported."""
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
    """Return whether every number stored in the bytes `data` is zero."""
    return not data.strip(b"\0") or not (data.translate(None, b"\0\x80") or any(values_of(data, dtype)))


def all_zero(gradients: list[Any]) -> int:
    """Return the number of gradients if all of them are zero, otherwise 0."""
    if sum(gradient.numel() * gradient.element_size() for gradient in gradients) > ZEROS_BYTES:
        return 0
    for limit_bytes in (256, ZEROS_BYTES):
        for gradient in gradients:
            local = getattr(gradient, "_local_tensor", gradient)
            try:
                if not is_zero(sample_bytes(local, limit_bytes), str(local.dtype)):
                    return 0
            except Unreadable:
                return 0
    return len(gradients)


def largest(data: bytes, dtype: str) -> float:
    """Return the largest absolute value in `data`, 0 if it is empty, or NaN if it contains a NaN."""
    values = values_of(data, dtype)
    if any(map(math.isnan, values)):
        return math.nan
    return max(map(abs, values), default=0.0)


def checksum(data: bytes, before: int = 0) -> int:
    return zlib.crc32(data, before)


def size_and_sum(values: Sequence[float]) -> tuple[float, float]:
    """Return the Euclidean norm and the sum of the values."""
    return math.hypot(*values), sum(values)


def trained_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains, or a sample of them if there are too many."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    return every[:: -(-len(every) // PARAMETERS_LIMIT) or 1]
