"""The pages of a paged KV cache: a pool of free pages, and the page table, which lists the pages of each sequence.

A row contains the keys and values of one token or one compressed block, for all groups. A page has room for `page_size`
rows, and has the same number in all layers that share the table. A sequence has separate pages for each kind of row
(see `Kind`): row r of a kind is row r % page_size of the page in column r // page_size. (flash-attn 2 calls such a
table `block_table`.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from .config import Attention, Branch, LayerConfig, NSAConfig
from .ops.attend import CompletedBlocks
from .ops.cached_attention import Kind
from .world import CannotRunError

# A tensor core multiplies 16 rows at a time. If 16 divides the page size, these rows are always in one page.
MIN_PAGE_ALIGNMENT = 16
MIN_COLUMNS = 16


class OutOfPagesError(CannotRunError):
    """Raised if more pages are needed than are free in the pool."""


def default_page_size(config: LayerConfig) -> int:
    """Return the default page size in rows."""
    return math.lcm(config.select_len, MIN_PAGE_ALIGNMENT)


def pages_needed(config: LayerConfig, tokens: int, page_size: int | None = None, *, later_chunks: bool = False) -> int:
    """Return the maximum number of pages that a sequence of `tokens` tokens owns at the same time.

    `page_size` is in rows; None means the default size. The number holds if tokens are appended one by one after the
    prompt, or, with `later_chunks`, also several at once.
    """
    size = page_size or default_page_size(config)
    counts = {kind: -(-rows_of(config, kind, tokens) // size) for kind in stored_kinds(config)}
    if Kind.WINDOW in counts and not later_chunks:
        # The window may start at the last row of a page.
        counts[Kind.WINDOW] = min(counts[Kind.WINDOW], (config.window - 2) // size + 2)
    return sum(counts.values())


def is_dense(config: LayerConfig) -> bool:
    """Return whether a layer with this configuration computes dense attention (`vanilla`)."""
    return isinstance(config, NSAConfig) and config.attention is Attention.VANILLA


def stored_kinds(config: LayerConfig) -> tuple[Kind, ...]:
    """Return the kinds of rows that a layer caches: compressed blocks, tokens, or tokens of the sliding window."""
    if is_dense(config):
        return (Kind.TOKENS,)
    cached = {
        Kind.BLOCKS: Branch.CMP in config.branches or Branch.SEL in config.branches,
        Kind.TOKENS: Branch.SEL in config.branches,
        Kind.WINDOW: Branch.WIN in config.branches,
    }
    return tuple(kind for kind, is_cached in cached.items() if is_cached)


def rows_of(config: LayerConfig, kind: Kind, tokens: int) -> int:
    """Return the number of rows, that is compressed blocks or tokens, in a sequence of `tokens` tokens."""
    return CompletedBlocks(config.block_len, config.block_stride).count(tokens) if kind is Kind.BLOCKS else tokens


class PageTable:
    """The free pages, and the pages that each sequence owns, as Python objects and as a tensor on the device."""

    def __init__(self, config: LayerConfig, sequences: int, pages: int, page_size: int | None) -> None:
        """Create an empty table. `page_size` is in rows, or None for the default size.

        Raises CannotRunError for dense attention, and if a selected block could span two pages.
        """
        if is_dense(config):
            raise CannotRunError("attention vanilla has no branches to keep in pages; use attention nsa")
        self.page_size = default_page_size(config) if page_size is None else page_size
        if self.page_size < 1 or self.page_size % config.select_len:
            raise CannotRunError(
                f"page size: expected a multiple of {config.select_len}, the length of a selected block, "
                f"got {self.page_size}: a selected block lies in one page"
            )
        self.pages, self._config = pages, config
        self._free = list(range(pages - 1, -1, -1))
        # Per sequence and kind, the page of each column, in ascending order of the columns.
        self.owned: list[dict[Kind, dict[int, int]]] = [
            {kind: {} for kind in stored_kinds(config)} for _ in range(sequences)
        ]
        self._table: Tensor | None = None  # [sequences, 3, columns], int32; None before the first token
        # Pages by sequence, kind and column that `_table` does not contain yet.
        self._not_in_table: dict[tuple[int, int, int], int] = {}

    @property
    def free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def reserve(self, growth: Mapping[int, tuple[int, int]], prompts: Collection[int]) -> None:
        """Reserve pages for new tokens. `growth` maps each sequence to its old and its new number of tokens.

        `prompts` are the sequences whose new tokens do not read the cache, because the layer's normal forward pass
        computes them. Their sliding branch needs only the pages of the last window. Pages before a sequence's window
        are released first. If too few pages are free, raises OutOfPagesError and takes none.
        """
        for number, (before, _) in growth.items():
            self._release_before_window(number, before)
        missing = [
            (number, *place)
            for number, (before, after) in growth.items()
            for place in self._missing(number, after if number in prompts else before, after)
        ]
        if len(missing) > self.free:
            new_tokens = sum(after - before for before, after in growth.values())
            raise OutOfPagesError(
                f"pages: {len(missing)} more are needed for {new_tokens} tokens of {len(growth)} sequences, "
                f"and {self.free} of {self.pages} are free, of {self.page_size} rows each; "
                "end a sequence, or give the cache more pages (--pages)"
            )
        for number, kind, column in missing:
            page = self.owned[number][kind][column] = self._free.pop()
            self._not_in_table[number, kind, column] = page

    def end(self, number: int) -> None:
        """Release all pages of a sequence."""
        for pages in self.owned[number].values():
            self._free += reversed(pages.values())
            pages.clear()

    def on(self, device: torch.device) -> Tensor:
        """Return the page table, with the numbers of the pages, on `device`: int32, [sequences, 3, columns].

        If a sequence owns no page for an entry, the entry contains an arbitrary valid page number.
        """
        columns = max((column + 1 for *_, column in self._not_in_table), default=1)
        if self._table is None or columns > self._table.shape[2]:
            self._table = self._enlarged(columns, device)
        if self._not_in_table:
            new_entries = [(*place, page) for place, page in self._not_in_table.items()]
            *indices, page = torch.tensor(new_entries, device=device).unbind(1)
            self._table[tuple(indices)] = page.to(torch.int32)
            self._not_in_table.clear()
        return self._table

    def first_in_window(self, tokens: int) -> int:
        """Return the position of the first token in the sliding window of the token at position `tokens`."""
        return max(0, tokens - self._config.window + 1)

    def _release_before_window(self, number: int, tokens: int) -> None:
        pages = self.owned[number].get(Kind.WINDOW, {})
        for column in [column for column in pages if column < self.first_in_window(tokens) // self.page_size]:
            self._free.append(pages.pop(column))

    def _missing(self, number: int, first_query: int, after: int) -> Iterator[tuple[Kind, int]]:
        """Yield the kind and column of each page that a sequence of `after` tokens lacks.

        `first_query` is the position of the first token that reads the cache.
        """
        for kind, pages in self.owned[number].items():
            first = self.first_in_window(first_query) // self.page_size if kind is Kind.WINDOW else 0
            next_column = next(reversed(pages), first - 1) + 1
            stop = -(-rows_of(self._config, kind, after) // self.page_size)
            yield from ((kind, column) for column in range(next_column, stop))

    def _enlarged(self, columns: int, device: torch.device) -> Tensor:
        capacity = max(MIN_COLUMNS, 1 << (columns - 1).bit_length())
        table = torch.zeros(len(self.owned), len(Kind), capacity, dtype=torch.int32, device=device)
        if self._table is not None:
            table[:, :, : self._table.shape[2]] = self._table
        return table
