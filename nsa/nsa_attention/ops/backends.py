"""Implementations of the attention branches in plain PyTorch, and the interface of all implementations.

TiledBackend runs on every device. SlidingBackend wraps flash-attn or PyTorch's flash attention, which support only the
sliding branch. `starts` packs several sequences into one row (ops/packed.py) and needs a batch of 1.

Dimensions: c branches, B batch, H query heads, G groups, T tokens, S compressed blocks, N tokens of all sequences in
one row, D key width, E value width, n selected blocks per query.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from .attend import (
    compressed_attention,
    packed_compressed_attention,
    packed_selected_attention,
    packed_sliding_attention,
    selected_attention,
    sliding_attention,
)
from .kernels import BlockwiseKernel, Kernel
from .packed import apply_per_sequence
from .selection import Selection, select_blocks

OutputAndLse = tuple[Tensor, Tensor]
Starts: TypeAlias = Tensor | None


class Backend(Protocol):
    """An implementation of all attention branches and of block selection.

    Queries are [B, H, T, D]. Each branch returns its output [B, H, T, E] and log-sum-exp [B, H, T].
    docs/internals/nsa/mathematics.md defines which keys a query attends to.
    """

    @property
    def name(self) -> str:
        """Return the backend's name for reports and error messages."""

    def attend_compressed(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_len: int, block_stride: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        """Return the output and log-sum-exp of attention to compressed blocks (NSA paper, eq. 7)."""

    def attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        """Return the output and log-sum-exp of attention to the blocks selected by `indices` [B, G, T, n]."""

    def attend_sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        """Return the output and log-sum-exp of attention to the last `window` tokens."""

    def select(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        selection: Selection,
        memo_number: Tensor | None = None,
        starts: Starts = None,
    ) -> Tensor:
        """Return the indices of the most important blocks, int32, shape [B, G, T, n].

        `k` are the compressed keys, `lse` the log-sum-exp of the compressed branch, or None.
        """


class SlidingAttention(Protocol):
    """An implementation of sliding-window attention: a backend or an external flash attention function."""

    def attend_sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, T, E] and, if it is computed, the log-sum-exp [B, H, T]."""


class SelectedAttention(Protocol):
    """An implementation of attention to the selected blocks: a backend, or a loop over the tokens."""

    @property
    def name(self) -> str:
        """Return the implementation's name for reports and error messages."""

    def attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, T, E] and, if it is computed, the log-sum-exp [B, H, T]."""


@dataclass(frozen=True)
class TiledBackend:
    """A backend in plain PyTorch that processes one tile of queries at a time."""

    kernel: Kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def attend_compressed(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_len: int, block_stride: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        numbers: dict[str, Any] = {
            "block_len": block_len,
            "block_stride": block_stride,
            "scale": scale,
            "kernel": self.kernel,
        }
        if starts is None:
            return compressed_attention(q, k, v, **numbers)
        return packed_compressed_attention(q, k, v, **numbers, starts=starts)

    def attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        def attend_one_sequence(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> OutputAndLse:
            return selected_attention(q, k, v, indices, select_len=select_len, scale=scale, kernel=self.kernel)

        # The blockwise kernel is used only for long sequences, so a row has only a few.
        if starts is None or self.kernel.name == BlockwiseKernel.name:
            return apply_per_sequence(attend_one_sequence, (q, starts), (k, starts), (v, starts), (indices, starts))
        numbers: dict[str, Any] = {"select_len": select_len, "scale": scale, "kernel": self.kernel}
        return packed_selected_attention(q, k, v, indices, **numbers, starts=starts)

    def attend_sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        if starts is None:
            return sliding_attention(q, k, v, window=window, scale=scale, kernel=self.kernel)
        return packed_sliding_attention(q, k, v, window=window, scale=scale, kernel=self.kernel, starts=starts)

    def select(
        self,
        q: Tensor,
        k: Tensor,
        _lse: Tensor | None,
        selection: Selection,
        memo_number: Tensor | None = None,
        starts: Starts = None,
    ) -> Tensor:
        return select_blocks(q, k, selection, memo_number, starts=starts)


@dataclass(frozen=True)
class SlidingBackend:
    """An implementation of sliding-window attention by an external flash attention function, without log-sum-exp."""

    attend: Callable[..., Tensor]

    def attend_sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, None]:
        return self.attend(q, k, v, window=window, scale=scale, starts=starts), None


SlidingFunction = Callable[..., Tensor]


def flash_attn_sliding(flash_attn_varlen_func: Callable[..., Tensor]) -> SlidingFunction:
    """Return a function that computes sliding-window attention with flash-attn 2."""

    def attend(
        q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, window: int, scale: float
    ) -> Tensor:
        return flash_attn_varlen_func(
            q_NHD,
            k_NGD,
            v_NGD,
            starts,
            starts,
            longest,
            longest,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0),
        )

    return _as_one_row(attend)


def torch_flash_sliding(varlen_attn: Callable[..., Tensor]) -> SlidingFunction:
    """Return a function that computes sliding-window attention with PyTorch's varlen_attn."""
    # varlen_attn supports groups of query heads since torch 2.12. With older versions, keys and values are repeated for
    # each head.
    supports_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, window: int, scale: float
    ) -> Tensor:
        options = {"scale": scale, "window_size": (window - 1, 0)}
        if supports_groups:
            return varlen_attn(q_NHD, k_NGD, v_NGD, starts, starts, longest, longest, enable_gqa=True, **options)
        k, v = (tensor.repeat_interleave(q_NHD.shape[1] // k_NGD.shape[1], 1) for tensor in (k_NGD, v_NGD))
        return varlen_attn(q_NHD, k, v, starts, starts, longest, longest, **options)

    return _as_one_row(attend)


def _as_one_row(attend: Callable[..., Tensor]) -> SlidingFunction:
    """Return a function that calls `attend` for a whole batch as one row of packed sequences."""

    def sliding(
        q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, starts: Tensor | None
    ) -> Tensor:
        batch, _, tokens, _ = q_BHTD.shape
        if starts is None:
            starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q_BHTD.device)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q_BHTD, k_BGTD, v_BGTE))
        output = attend(q, k, v, starts, tokens, window, scale)
        return output.unflatten(0, (batch, tokens)).transpose(1, 2)

    return sliding
