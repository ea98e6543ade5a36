"""A pool of pages for cached keys and values, and tables that list the pages of each sequence.

A page has room for `page_len` rows of keys and values in every layer and group; its number is the same in all layers. A
row is a token or a compressed block. Each branch of a sequence has its own pages, listed in the tables: row r of a kind
is row r % page_len of the page in column r // page_len.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from .config import Attention, Branch, NSAConfig
from .ops.attend import CompletedBlocks
from .world import CannotRunError

# A tensor core multiplies 16 rows at a time. With page lengths that 16 divides, these rows never span two pages.
MIN_PAGE_ALIGNMENT = 16
MIN_COLUMNS = 16


class Kind(IntEnum):
    """The kind of rows that a page contains.

    The value is the index in the second dimension of the tables.
    """

    BLOCKS = 0  # compressed blocks, or block means if the layer has no compressed branch
    TOKENS = 1  # tokens of the selected branch
    WINDOW = 2  # tokens of the sliding branch


class OutOfPagesError(CannotRunError):
    """Raised if more pages are needed than are free in the pool."""


def default_page_len(config: NSAConfig) -> int:
    """Return the default page length in rows."""
    return math.lcm(config.select_len, MIN_PAGE_ALIGNMENT)


def pages_needed(config: NSAConfig, tokens: int, page_len: int | None = None) -> int:
    """Return the maximum number of pages that a sequence of `tokens` tokens owns at the same time.

    `page_len` is the page length in rows; None means the default length.
    """
    length = page_len or default_page_len(config)
    whole = -(-tokens // length)
    blocks = CompletedBlocks(config.block_len, config.block_stride).count(tokens)
    # The window may start at the last row of a page.
    counts = {
        Kind.BLOCKS: -(-blocks // length),
        Kind.TOKENS: whole,
        Kind.WINDOW: min(whole, (config.window - 2) // length + 2),
    }
    return sum(counts[kind] for kind in stored_kinds(config))


def stored_kinds(config: NSAConfig) -> tuple[Kind, ...]:
    """Return the kinds of rows that a layer of this model caches."""
    cached = {
        Kind.BLOCKS: Branch.CMP in config.branches or Branch.SEL in config.branches,
        Kind.TOKENS: Branch.SEL in config.branches,
        Kind.WINDOW: Branch.WIN in config.branches,
    }
    return tuple(kind for kind, is_cached in cached.items() if is_cached)


@dataclass(kw_only=True)
class PageRange:
    """The pages of a sequence for one kind of rows.

    They are in consecutive columns of the table, starting at `first`.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + len(self.pages)


@dataclass(kw_only=True)
class PagedSequence:
    """The length of a sequence in tokens, and the pages it owns."""

    tokens: int = 0
    pages_by_kind: dict[Kind, PageRange] = field(default_factory=dict)


class Pool:
    """A pool of free pages, identified by their numbers."""

    def __init__(self, pages: int) -> None:
        self.size = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free page from the pool, and return its number."""
        return self._free.pop()

    def release(self, pages: list[int]) -> None:
        self._free += reversed(pages)


class PageTables:
    """The lengths and pages of all sequences in a batch, on the host and as a table on the device."""

    def __init__(self, config: NSAConfig, sequences: int, pages: int, page_len: int | None) -> None:
        """Create empty tables. `page_len` is in rows, or None for the default length.

        Raises CannotRunError for attention without NSA branches, and if `page_len` is not a multiple of select_len.
        """
        if config.attention is not Attention.NSA:
            raise CannotRunError(
                f"shape {config.name}: attention {config.attention} has no branches to keep in pages; use attention nsa"
            )
        self.page_len = default_page_len(config) if page_len is None else page_len
        if self.page_len < 1 or self.page_len % config.select_len:
            raise CannotRunError(
                f"page_len: expected a multiple of select_len ({config.select_len}), got {self.page_len}: "
                "a selection block lies in one page"
            )
        self.pool = Pool(pages)
        self.sequences = [PagedSequence() for _ in range(sequences)]
        self._config, self._stored_kinds = config, stored_kinds(config)
        self._table: Tensor | None = None  # [sequences, 3, columns], int32; None before the first token
        # Pages by sequence, kind and column that `_table` does not contain yet.
        self._not_in_table: dict[tuple[int, int, int], int] = {}

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Reserve pages for new tokens. `counts` maps the number of a sequence to the number of its new tokens.

        Pages before a sequence's window are released first. Raises OutOfPagesError without taking any page if the pool
        has too few.
        """
        missing = []
        for number, count in counts.items():
            sequence = self.sequences[number]
            self._free_pages_before_window(sequence)
            missing += [(number, *column_key) for column_key in self._missing_pages(sequence, count)]
        if len(missing) > self.pool.free:
            raise OutOfPagesError(
                f"pages: {len(missing)} more are needed for {sum(counts.values())} tokens of {len(counts)} sequences, "
                f"and {self.pool.free} of {self.pool.size} are free, of {self.page_len} rows each; "
                "end a sequence, or give the cache more pages (--pages)"
            )
        for number, kind, column in missing:
            page_range = self.sequences[number].pages_by_kind.setdefault(kind, PageRange(first=column))
            page_range.pages.append(self.pool.take())
            self._not_in_table[number, kind, column] = page_range.pages[-1]

    def end(self, number: int) -> None:
        """Release all pages of a sequence."""
        for page_range in self.sequences[number].pages_by_kind.values():
            self.pool.release(page_range.pages)
        self.sequences[number] = PagedSequence()

    def table(self, device: torch.device) -> Tensor:
        """Return the table of page numbers as a tensor on `device`, int32, shape [sequences, 3, columns].

        Entries for which a sequence owns no page contain arbitrary valid page numbers.
        """
        columns = max(
            (page_range.stop for sequence in self.sequences for page_range in sequence.pages_by_kind.values()),
            default=0,
        )
        if self._table is None or columns > self._table.shape[2]:
            self._table = self._enlarged_table(columns, device)
        if self._not_in_table:
            new_entries = [(*place, page) for place, page in self._not_in_table.items()]
            *indices, page = torch.tensor(new_entries, device=device).unbind(1)
            self._table[tuple(indices)] = page.to(torch.int32)
            self._not_in_table.clear()
        return self._table

    def first_in_window(self, tokens: int) -> int:
        """Return the position of the first token in the sliding window of the token at position `tokens`."""
        return max(0, tokens - self._config.window + 1)

    def _free_pages_before_window(self, sequence: PagedSequence) -> None:
        page_range = sequence.pages_by_kind.get(Kind.WINDOW)
        if page_range is not None:
            over = min(self.first_in_window(sequence.tokens) // self.page_len - page_range.first, len(page_range.pages))
            self.pool.release(page_range.pages[:over])
            page_range.first, page_range.pages = page_range.first + over, page_range.pages[over:]

    def _missing_pages(self, sequence: PagedSequence, count: int) -> Iterator[tuple[Kind, int]]:
        """Yield the kind and column of each page that a sequence needs for `count` more tokens."""
        end = sequence.tokens + count
        rows = dict.fromkeys(self._stored_kinds, end)
        if Kind.BLOCKS in rows:
            rows[Kind.BLOCKS] = CompletedBlocks(self._config.block_len, self._config.block_stride).count(end)
        for kind, stop in rows.items():
            # A prompt runs through the layer's own forward pass, and later tokens never attend before the window.
            is_prompt = count > 1 and not sequence.tokens
            new = self.first_in_window(end) // self.page_len if kind is Kind.WINDOW and is_prompt else 0
            page_range = sequence.pages_by_kind.get(kind, PageRange(first=new))
            yield from ((kind, column) for column in range(page_range.stop, -(-stop // self.page_len)))

    def _enlarged_table(self, columns: int, device: torch.device) -> Tensor:
        capacity = max(MIN_COLUMNS, 1 << (columns - 1).bit_length())
        table = torch.zeros(len(self.sequences), len(Kind), capacity, dtype=torch.int32, device=device)
        if self._table is not None:
            table[:, :, : self._table.shape[2]] = self._table
        return table
