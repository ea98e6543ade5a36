"""Attention of query tiles over a range of keys under a mask: one autograd node, memory linear in the sequence.

Dimensions: N batch x groups, h query heads of a group, C queries of a tile, S keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Elements of the largest intermediate of a tile. It bounds memory whatever the sequence length is.
TILE_ELEMENTS = 1 << 22
LONGEST_TILE = 512
SHORTEST_TILE = 16


class Pattern(Protocol):
    """Which keys a query may see. `indices` is what the selection chose, for the pattern that needs it."""

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """The range outside of which no query in [start, stop) sees anything."""

    def allowed(self, start: int, stop: int, indices: Tensor | None, device: torch.device) -> Tensor:
        """True where the query sees the key, broadcastable to [N, 1, C, S]."""


class Kernel(Protocol):
    """Attention of one tile. Rows that see nothing give 0 and a log-sum-exp of minus infinity."""

    def widest(self, rows: int, heads: int, keys: int) -> int:
        """Elements per query of the largest intermediate."""

    def forward(
        self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, allowed: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        """Output [N, h, C, E] and log-sum-exp [N, h, C]."""

    def backward(self, grad: Tensor, saved: TileState, allowed: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Gradients of queries [N, h, C, D], keys [N, S, D] and values [N, S, E]."""


@dataclass(frozen=True, kw_only=True)
class TileState:
    """The tensors of one tile that the backward pass starts from."""

    q: Tensor  # [N, h, C, D]
    k: Tensor  # [N, S, D]
    v: Tensor  # [N, S, E]
    output: Tensor  # [N, h, C, E]
    lse: Tensor  # [N, h, C]


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    *,
    pattern: Pattern,
    kernel: Kernel,
    scale: float,
    indices_BGTn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T] (no gradient) of attention under `pattern`."""
    batch, heads, queries, _ = q_BHTD.shape
    groups = k_BGSD.shape[1]
    rows = batch * groups
    indices = None if indices_BGTn is None else indices_BGTn.reshape(rows, queries, -1)
    o_NhTE, lse_NhT = _TiledAttention.apply(
        q_BHTD.reshape(rows, heads // groups, queries, -1),
        k_BGSD.reshape(rows, *k_BGSD.shape[2:]),
        v_BGSE.reshape(rows, *v_BGSE.shape[2:]),
        indices,
        pattern,
        kernel,
        scale,
    )
    return o_NhTE.reshape(batch, heads, queries, -1), lse_NhT.reshape(batch, heads, queries)


def tiles(queries: int, elements_per_query: int) -> Iterator[tuple[int, int]]:
    """Query ranges whose largest intermediate stays near TILE_ELEMENTS."""
    length = max(SHORTEST_TILE, min(LONGEST_TILE, TILE_ELEMENTS // max(1, elements_per_query)))
    for start in range(0, queries, length):
        yield start, min(start + length, queries)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Half types are accumulated in float32; float32 and float64 stay as they are."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


class _TiledAttention(torch.autograd.Function):
    """The loop over tiles lives in here, so the graph has one node however long the sequence is."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NhTD: Tensor,
        k_NSD: Tensor,
        v_NSE: Tensor,
        indices: Tensor | None,
        pattern: Pattern,
        kernel: Kernel,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        rows, heads, queries, _ = q_NhTD.shape
        o_NhTE = q_NhTD.new_zeros(rows, heads, queries, v_NSE.shape[-1])
        lse_NhT = torch.full((rows, heads, queries), -torch.inf, dtype=compute_dtype(q_NhTD), device=q_NhTD.device)
        with torch.autocast(q_NhTD.device.type, enabled=False):
            for start, stop in _ranges(q_NhTD, pattern, kernel):
                first, last = pattern.keys(start, stop)
                if first == last:
                    continue  # no query of this tile sees a key: output 0, lse -inf
                o_NhTE[:, :, start:stop], lse_NhT[:, :, start:stop] = kernel.forward(
                    q_NhTD[:, :, start:stop],
                    k_NSD[:, first:last],
                    v_NSE[:, first:last],
                    pattern.allowed(start, stop, indices, q_NhTD.device),
                    scale,
                )
        ctx.save_for_backward(q_NhTD, k_NSD, v_NSE, indices, o_NhTE, lse_NhT)
        ctx.pattern, ctx.kernel, ctx.scale = pattern, kernel, scale
        ctx.mark_non_differentiable(lse_NhT)
        ctx.set_materialize_grads(False)
        return o_NhTE, lse_NhT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_o is None:
            return None, None, None, None, None, None, None
        q_NhTD, k_NSD, v_NSE, indices, o_NhTE, lse_NhT = ctx.saved_tensors
        dq = torch.zeros_like(q_NhTD)
        dk = torch.zeros_like(k_NSD, dtype=compute_dtype(k_NSD))
        dv = torch.zeros_like(v_NSE, dtype=compute_dtype(v_NSE))
        with torch.autocast(q_NhTD.device.type, enabled=False):
            for start, stop in _ranges(q_NhTD, ctx.pattern, ctx.kernel):
                first, last = ctx.pattern.keys(start, stop)
                if first == last:
                    continue
                state = TileState(
                    q=q_NhTD[:, :, start:stop],
                    k=k_NSD[:, first:last],
                    v=v_NSE[:, first:last],
                    output=o_NhTE[:, :, start:stop],
                    lse=lse_NhT[:, :, start:stop],
                )
                allowed = ctx.pattern.allowed(start, stop, indices, q_NhTD.device)
                tile_dq, tile_dk, tile_dv = ctx.kernel.backward(grad_o[:, :, start:stop], state, allowed, ctx.scale)
                dq[:, :, start:stop] = tile_dq
                dk[:, first:last] += tile_dk
                dv[:, first:last] += tile_dv
        return dq, dk.to(k_NSD.dtype), dv.to(v_NSE.dtype), None, None, None, None


def _ranges(q_NhTD: Tensor, pattern: Pattern, kernel: Kernel) -> Iterator[tuple[int, int]]:
    rows, heads, queries, _ = q_NhTD.shape
    first, last = pattern.keys(queries - 1, queries) if queries else (0, 0)
    return tiles(queries, kernel.widest(rows, heads, last - first))
