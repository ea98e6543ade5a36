"""Which keys a query sees in each branch, as the bias of a tile: 0 for a key it sees, minus infinity for others.

Dimensions: N batch x groups, C queries of a tile, S keys of its range, b selection blocks, n places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_NOT_SEEN = -torch.inf


class Pattern(Protocol):
    """What a branch lets a query see. `indices` is what the selection chose, for the pattern that needs it."""

    def longest_tile(self) -> int:
        """Queries per tile: more of them look at more keys in vain, fewer of them are slower for each key."""

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """The range outside of which no query in [start, stop) sees anything."""

    def bias(self, start: int, stop: int, indices: Tensor | None, like: Tensor) -> Tensor:
        """0 or minus infinity, broadcastable to [N, 1, C, S], in the dtype and on the device of `like`."""

    def blind(self, start: int, stop: int, indices: Tensor | None, device: torch.device) -> Tensor | None:
        """True for a query that sees no key at all, broadcastable to [N, 1, C]; None if there is no such query."""


@dataclass(frozen=True)
class CompletedBlocks:
    """Query t sees block i when the block's last token i*d + l - 1 is not after t."""

    block_len: int
    block_stride: int

    def count(self, tokens: int) -> int:
        """Blocks that are complete after `tokens` tokens."""
        return max(0, (tokens - self.block_len) // self.block_stride + 1)

    def longest_tile(self) -> int:
        return 512

    def keys(self, _start: int, stop: int) -> tuple[int, int]:
        return 0, self.count(stop)

    def bias(self, start: int, stop: int, _indices: Tensor | None, like: Tensor) -> Tensor:
        return _bias(self.seen(start, stop, like.device), like)

    def seen(self, start: int, stop: int, device: torch.device) -> Tensor:
        """True where the query sees the block, [C, S]."""
        queries = torch.arange(start, stop, device=device)
        last_tokens = torch.arange(self.count(stop), device=device) * self.block_stride + self.block_len - 1
        return last_tokens <= queries[:, None]

    def blind(self, start: int, stop: int, _indices: Tensor | None, device: torch.device) -> Tensor | None:
        first_sighted = self.block_len - 1
        return None if start >= first_sighted else torch.arange(start, stop, device=device) < first_sighted


@dataclass(frozen=True)
class LastTokens:
    """Query t sees keys in (t - w, t]."""

    window: int

    def longest_tile(self) -> int:
        return max(64, self.window // 4)

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        return max(0, start - self.window + 1), stop

    def bias(self, start: int, stop: int, _indices: Tensor | None, like: Tensor) -> Tensor:
        queries = torch.arange(start, stop, device=like.device)[:, None]
        keys = torch.arange(*self.keys(start, stop), device=like.device)
        return _bias((keys <= queries) & (keys > queries - self.window), like)

    def blind(self, _start: int, _stop: int, _indices: Tensor | None, _device: torch.device) -> Tensor | None:
        return None


@dataclass(frozen=True)
class ChosenBlocks:
    """Query t sees token s when s <= t and block s // l' stands in its row of indices; -1 is an empty place."""

    select_len: int

    def longest_tile(self) -> int:
        return 256

    def keys(self, _start: int, stop: int) -> tuple[int, int]:
        return 0, stop

    def bias(self, start: int, stop: int, indices: Tensor | None, like: Tensor) -> Tensor:
        chosen_NCn = _rows(indices, start, stop)
        blocks = -(-stop // self.select_len)
        # Empty places and blocks after this tile write to a column of their own. A block named twice is one 0.
        columns = torch.where((chosen_NCn < 0) | (chosen_NCn >= blocks), blocks, chosen_NCn)
        of_block = like.new_full((*columns.shape[:2], blocks + 1), _NOT_SEEN).scatter_(2, columns, 0.0)
        of_token = of_block[..., :blocks].repeat_interleave(self.select_len, dim=2)[..., :stop]
        # Only among the tile's own tokens can a key be later than the query.
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=like.device).triu_(1)
        of_token[..., start:].masked_fill_(later, _NOT_SEEN)
        return of_token.unsqueeze(1)

    def blind(self, start: int, stop: int, indices: Tensor | None, device: torch.device) -> Tensor | None:
        chosen_NCn = _rows(indices, start, stop)
        current = torch.arange(start, stop, device=device)[:, None] // self.select_len
        return ~((chosen_NCn >= 0) & (chosen_NCn <= current)).any(-1).unsqueeze(1)


PATTERNS: dict[str, type[CompletedBlocks] | type[LastTokens] | type[ChosenBlocks]] = {
    "compressed": CompletedBlocks,
    "sliding": LastTokens,
    "selected": ChosenBlocks,
}


def _rows(indices: Tensor | None, start: int, stop: int) -> Tensor:
    assert indices is not None, "the selected branch always has indices"
    return indices[:, start:stop].long()


def _bias(seen_CS: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(seen_CS.shape).masked_fill_(~seen_CS, _NOT_SEEN)[None, None]
