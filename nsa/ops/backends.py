"""What an implementation of the branches offers, and the one that runs on every device: tiles of plain torch.

`starts` packs several sequences into one row (nsa/ops/packed.py); it needs a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa.ops.compressed import compressed_attention
from nsa.ops.packed import compressed_starts
from nsa.ops.selected import selected_attention
from nsa.ops.sliding import sliding_attention
from nsa.ops.tiles import Kernel
from nsa.ops.topk import Selection, choose_blocks

Attended = tuple[Tensor, Tensor]
Starts = Tensor | None


class Backend(Protocol):
    """Outputs are [B, H, T, E] with log-sum-exp [B, H, T]; what a query sees is told in nsa/README.md."""

    name: str

    def compressed(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_len: int, block_stride: int, scale: float, starts: Starts = None
    ) -> Attended:
        """Keys and values [B, G, S, *] of the complete blocks."""

    def selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> Attended:
        """Indices [B, G, T, n] int32."""

    def sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> Attended: ...

    def chosen(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        selection: Selection,
        memo_number: Tensor | None = None,
        starts: Starts = None,
    ) -> Tensor:
        """Indices [B, G, T, n] of the blocks that the compressed keys rank highest, as nsa/ops/topk.py tells."""

    def mixed(self, outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
        """Sum of gate times output over the branches, [B, T, H, E] (paper, eq. 5)."""


class Sliding(Protocol):
    """What computes the sliding branch: any backend, or the flash attention of others, without log-sum-exp."""

    def sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class TiledBackend:
    """Query tiles in plain torch; packed sequences one after the other."""

    kernel: Kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def compressed(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_len: int, block_stride: int, scale: float, starts: Starts = None
    ) -> Attended:
        def alone(q: Tensor, k: Tensor, v: Tensor) -> Attended:
            return compressed_attention(
                q, k, v, block_len=block_len, block_stride=block_stride, scale=scale, kernel=self.kernel
            )

        if starts is None:
            return alone(q, k, v)
        blocks = compressed_starts(starts, block_len, block_stride)
        return one_by_one(alone, (q, starts), (k, blocks), (v, blocks))

    def selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> Attended:
        def alone(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Attended:
            return selected_attention(q, k, v, indices, select_len=select_len, scale=scale, kernel=self.kernel)

        if starts is None:
            return alone(q, k, v, indices)
        return one_by_one(alone, (q, starts), (k, starts), (v, starts), (indices, starts))

    def sliding(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None) -> Attended:
        def alone(q: Tensor, k: Tensor, v: Tensor) -> Attended:
            return sliding_attention(q, k, v, window=window, scale=scale, kernel=self.kernel)

        return alone(q, k, v) if starts is None else one_by_one(alone, (q, starts), (k, starts), (v, starts))

    def chosen(
        self,
        q: Tensor,
        k: Tensor,
        _lse: Tensor | None,
        selection: Selection,
        memo_number: Tensor | None = None,
        starts: Starts = None,
    ) -> Tensor:
        if starts is None:
            return choose_blocks(q, k, selection, memo_number)
        blocks = compressed_starts(starts, selection.block_len, selection.block_stride)
        (indices,) = one_by_one(lambda q, k: (choose_blocks(q, k, selection),), (q, starts), (k, blocks))
        return indices

    def mixed(self, outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
        gates = gates_cBHT.unsqueeze(-1)
        mixed = outputs[0] * gates[0]
        for output, gate in zip(outputs[1:], gates[1:], strict=True):
            mixed = torch.addcmul(mixed, output, gate)
        return mixed.transpose(1, 2)


@dataclass(frozen=True)
class SlidingBackend:
    """The flash attention of another project: a window is all that it knows of ours, and it keeps its log-sum-exp."""

    attend: Callable[..., Tensor]

    def sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, None]:
        return self.attend(q, k, v, window=window, scale=scale, starts=starts), None


def one_by_one(operation: Callable[..., tuple[Tensor, ...]], *packed: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    """The operation on each sequence's part of the tensors [1, *, rows, *], each with its own starts."""
    parts = [tensor.split(starts.diff().tolist(), 2) for tensor, starts in packed]
    results = [operation(*sequence) for sequence in zip(*parts, strict=True) if sequence[0].shape[2]]
    return tuple(torch.cat(tensors, 2) for tensors in zip(*results, strict=True))
