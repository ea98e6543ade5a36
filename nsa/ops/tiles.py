"""How a sequence of queries is cut into tiles, and what an implementation of one tile must offer.

Dimensions: N batch x groups, h query heads of a group, C queries of a tile, S keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Elements of the largest intermediate of a tile. It bounds memory whatever the sequence length is.
TILE_ELEMENTS = 1 << 22
SHORTEST_TILE = 16


@dataclass(frozen=True, kw_only=True)
class TileState:
    """The tensors of one tile that the backward pass starts from."""

    q: Tensor  # [N, h, C, D]
    k: Tensor  # [N, S, D]
    v: Tensor  # [N, S, E]
    output: Tensor  # [N, h, C, E]
    lse: Tensor  # [N, h, C]


class Kernel(Protocol):
    """Attention of one tile. `bias` is 0 or minus infinity, [N or 1, 1, C, S]; a row without any 0 gives 0."""

    name: str

    def widest(self, rows: int, heads: int, keys: int) -> int:
        """Elements per query of the largest intermediate."""

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Output [N, h, C, E] and log-sum-exp [N, h, C], any finite number or minus infinity for a blind row."""

    def backward(self, grad: Tensor, saved: TileState, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Gradients of queries [N, h, C, D], keys [N, S, D] and values [N, S, E]."""


def tiles(queries: int, elements_per_query: int, longest: int) -> Iterator[tuple[int, int]]:
    """Query ranges whose largest intermediate stays near TILE_ELEMENTS."""
    length = max(SHORTEST_TILE, min(longest, TILE_ELEMENTS // max(1, elements_per_query)))
    for start in range(0, queries, length):
        yield start, min(start + length, queries)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Half types are accumulated in float32; float32 and float64 stay as they are."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def nothing_seen(q_NhTD: Tensor, v_NSE: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that see no key: 0, and minus infinity."""
    shape = q_NhTD.shape[:3]
    lse_NhT = q_NhTD.new_full(shape, -torch.inf, dtype=compute_dtype(q_NhTD))
    return q_NhTD.new_zeros((*shape, v_NSE.shape[-1])), lse_NhT


def exactly_in_the_dtype_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Without autocast: what is computed here says its dtypes itself."""
    return torch.autocast(tensor.device.type, enabled=False)
