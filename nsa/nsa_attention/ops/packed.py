"""Several sequences behind each other in one row of tokens: where each one's tokens and blocks begin.

`starts` is what the field calls cu_seqlens: [sequences + 1] int32, from 0 to the number of tokens, ascending. Nothing
here asks the device for a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PackedLayout(NamedTuple):
    """The documents of one row, as a layer needs them. A plain tuple, so that any wrapper may carry it."""

    lengths: tuple[int, ...]  # known to the host, so that nobody has to ask the device
    starts: Tensor  # [documents + 1] int32
    positions_T: Tensor  # of each token in its own document
    blocks_Sl: Tensor  # the tokens of each complete compressed block, which lies in one document

    @property
    def longest(self) -> int:
        return max(self.lengths)


def packed_layout(lengths: Sequence[int], block_len: int, block_stride: int, device: torch.device) -> PackedLayout:
    """Documents of these lengths, each at least 1, behind each other."""
    lengths_D = torch.tensor(lengths)
    starts = torch.nn.functional.pad(lengths_D.cumsum(0), (1, 0))
    positions_T = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths_D)
    # A block begins every d tokens of its document, and lies in it whole.
    remaining_T = lengths_D.repeat_interleave(lengths_D) - positions_T
    first_S = ((positions_T % block_stride == 0) & (remaining_T >= block_len)).nonzero().flatten()
    return PackedLayout(
        lengths=tuple(lengths),
        starts=starts.to(device, torch.int32),
        positions_T=positions_T.to(device),
        blocks_Sl=(first_S[:, None] + torch.arange(block_len)).to(device),
    )


def single_sequence_starts(tokens: int, device: torch.device) -> Tensor:
    """The starts of one sequence that fills the row."""
    return torch.arange(2, dtype=torch.int32, device=device) * tokens


def sequence_numbers(starts: Tensor, count: int) -> Tensor:
    """The number of the sequence that each place [places] belongs to; an empty sequence has none."""
    position = torch.arange(count, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), position, right=True).clamp_max(starts.shape[0] - 2)


def compressed_starts(starts: Tensor, block_len: int, block_stride: int) -> Tensor:
    """The same for compressed blocks, of which a sequence has its complete ones."""
    lengths = starts.diff()
    counts = torch.div(lengths - block_len, block_stride, rounding_mode="floor") + 1
    return _cumulative_starts(torch.where(lengths < block_len, 0, counts), starts)


def selection_starts(starts: Tensor, select_len: int) -> Tensor:
    """The same for selection blocks, of which the last of a sequence may be short."""
    return _cumulative_starts(torch.div(starts.diff() + select_len - 1, select_len, rounding_mode="floor"), starts)


def _cumulative_starts(counts: Tensor, starts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(starts.dtype)


def apply_per_sequence(
    operation: Callable[..., tuple[Tensor, ...]], *packed_tensors: tuple[Tensor, Tensor]
) -> tuple[Any, ...]:
    """The operation on each sequence's part of the tensors [1, *, rows, *], each with its own starts."""
    parts = [tensor.split(starts.diff().tolist(), 2) for tensor, starts in packed_tensors]
    results = [operation(*sequence) for sequence in zip(*parts, strict=True) if sequence[0].shape[2]]
    return tuple(torch.cat(tensors, 2) for tensors in zip(*results, strict=True))
