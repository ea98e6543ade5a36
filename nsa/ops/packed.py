"""Several sequences behind each other in one row of tokens: where each one's tokens and blocks begin.

`starts` is what the field calls cu_seqlens: [sequences + 1] int32, from 0 to the number of tokens, ascending. Nothing
here asks the device for a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alone(tokens: int, device: torch.device) -> Tensor:
    """The starts of one sequence that fills the row."""
    return torch.arange(2, dtype=torch.int32, device=device) * tokens


def sequence_of(starts: Tensor, places: int) -> Tensor:
    """The number of the sequence that each place [places] belongs to; an empty sequence has none."""
    place = torch.arange(places, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), place, right=True).clamp_max(starts.shape[0] - 2)


def compressed_starts(starts: Tensor, block_len: int, block_stride: int) -> Tensor:
    """The same for compressed blocks, of which a sequence has its complete ones."""
    lengths = starts.diff()
    counts = torch.div(lengths - block_len, block_stride, rounding_mode="floor") + 1
    return _summed(torch.where(lengths < block_len, 0, counts), starts)


def selection_starts(starts: Tensor, select_len: int) -> Tensor:
    """The same for selection blocks, of which the last of a sequence may be short."""
    return _summed(torch.div(starts.diff() + select_len - 1, select_len, rounding_mode="floor"), starts)


def _summed(counts: Tensor, starts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(starts.dtype)
