"""Packed sequences: several sequences concatenated in one row of tokens.

`starts` is what flash-attn calls cu_seqlens: int32 [sequences + 1], ascending from 0 to the number of tokens. Except
for `apply_per_sequence`, nothing here reads a value from the device.

Dimensions: T tokens of the row, S compressed blocks, l tokens of a block, D documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PackedLayout(NamedTuple):
    """The positions of the documents packed into one row."""

    lengths: tuple[int, ...]  # in tokens, on the host, so that no code has to read them from the device
    starts: Tensor  # [documents + 1] int32
    positions_T: Tensor  # position of each token in its document
    blocks_Sl: Tensor  # the tokens of each complete compressed block; a block never spans two documents

    @property
    def longest(self) -> int:
        """Return the length of the longest document, in tokens."""
        return max(self.lengths)


def packed_layout(lengths: Sequence[int], block_len: int, block_stride: int, device: torch.device) -> PackedLayout:
    """Return the layout of consecutive documents whose lengths in tokens are `lengths`."""
    lengths_D = torch.tensor(lengths)
    starts = torch.nn.functional.pad(lengths_D.cumsum(0), (1, 0))
    positions_T = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths_D)
    # A compressed block starts every d tokens of a document and must fit into it completely.
    remaining_T = lengths_D.repeat_interleave(lengths_D) - positions_T
    first_S = ((positions_T % block_stride == 0) & (remaining_T >= block_len)).nonzero().flatten()
    return PackedLayout(
        lengths=tuple(lengths),
        starts=starts.to(device, torch.int32),
        positions_T=positions_T.to(device),
        blocks_Sl=(first_S[:, None] + torch.arange(block_len)).to(device),
    )


def single_sequence_starts(tokens: int, device: torch.device) -> Tensor:
    """Return the start and end of a single sequence that fills the row, int32 [2]."""
    return torch.arange(2, dtype=torch.int32, device=device) * tokens


def sequence_numbers(starts: Tensor, count: int) -> Tensor:
    """Return the sequence number of each of the first `count` tokens, shape [count].

    `starts` may also count blocks instead of tokens.
    """
    position = torch.arange(count, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), position, right=True).clamp_max(starts.shape[0] - 2)


def compressed_starts(starts: Tensor, block_len: int, block_stride: int) -> Tensor:
    """Return the index at which each sequence starts in the row of compressed blocks."""
    lengths = starts.diff()
    counts = torch.div(lengths - block_len, block_stride, rounding_mode="floor") + 1
    return _cumulative_starts(torch.where(lengths < block_len, 0, counts), starts)


def selection_starts(starts: Tensor, select_len: int) -> Tensor:
    """Return the index at which each sequence starts in the row of selection blocks."""
    return _cumulative_starts(torch.div(starts.diff() + select_len - 1, select_len, rounding_mode="floor"), starts)


def _cumulative_starts(counts: Tensor, starts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(starts.dtype)


def apply_per_sequence(
    operation: Callable[..., tuple[Tensor, ...]], *packed_tensors: tuple[Tensor, Tensor | None]
) -> tuple[Any, ...]:
    """Apply `operation` to each sequence separately, and concatenate the results along dimension 2.

    `packed_tensors` are pairs of a tensor [1, *, rows, *] and the starts of the sequences in its rows. If the first
    starts are None, nothing is split. Reads the starts from the device.
    """
    if packed_tensors[0][1] is None:
        return operation(*(tensor for tensor, _ in packed_tensors))
    parts = [tensor.split(starts.diff().tolist(), 2) for tensor, starts in packed_tensors if starts is not None]
    results = [operation(*sequence) for sequence in zip(*parts, strict=True) if sequence[0].shape[2]]
    return tuple(torch.cat(tensors, 2) for tensors in zip(*results, strict=True))
