"""A pool of pages for keys and values, and which of them each sequence has.

A page is room for `page_len` rows of keys and values, of every layer and group: one number names it in all layers. A
row is a token, or a compressed block. What a branch keeps of a sequence lies in pages of its own, and the tables say
in which: row r of a kind is row r % page_len of the page in column r // page_len.
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

# Rows of a page that a tensor core takes at once: no such piece lies in two pages.
MIN_PAGE_ALIGNMENT = 16
MIN_COLUMNS = 16


class Kind(IntEnum):
    """What the rows of a page are; also the place in the tables."""

    BLOCKS = 0  # a compressed block each, or the mean that ranks it where the layer has no compressed branch
    TOKENS = 1  # of the selected branch
    WINDOW = 2  # of the sliding branch


class OutOfPagesError(CannotRunError):
    """More pages are needed than are free."""


def default_page_len(config: NSAConfig) -> int:
    """The least common multiple of a selection block and of what a tensor core takes at once."""
    return math.lcm(config.select_len, MIN_PAGE_ALIGNMENT)


def pages_needed(config: NSAConfig, tokens: int, page_len: int | None = None) -> int:
    """Pages that a sequence of so many tokens has at most at a time."""
    length = page_len or default_page_len(config)
    whole = -(-tokens // length)
    blocks = CompletedBlocks(config.block_len, config.block_stride).count(tokens)
    # w tokens may begin with the last row of a page.
    counts = {
        Kind.BLOCKS: -(-blocks // length),
        Kind.TOKENS: whole,
        Kind.WINDOW: min(whole, (config.window - 2) // length + 2),
    }
    return sum(counts[kind] for kind in stored_kinds(config))


def stored_kinds(config: NSAConfig) -> tuple[Kind, ...]:
    """What a layer of this shape keeps."""
    is_stored = {
        Kind.BLOCKS: Branch.CMP in config.branches or Branch.SEL in config.branches,
        Kind.TOKENS: Branch.SEL in config.branches,
        Kind.WINDOW: Branch.WIN in config.branches,
    }
    return tuple(kind for kind, stored in is_stored.items() if stored)


@dataclass(kw_only=True)
class PageRange:
    """The pages of one kind that a sequence has: those of the columns from `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + len(self.pages)


@dataclass(kw_only=True)
class PagedSequence:
    """How far a sequence was read, and what it holds."""

    tokens: int = 0
    pages_by_kind: dict[Kind, PageRange] = field(default_factory=dict)


class Pool:
    """Pages by their numbers. The one that was given back last is taken first."""

    def __init__(self, pages: int) -> None:
        self.size = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, pages: list[int]) -> None:
        self._free += reversed(pages)


class PageTables:
    """Of the sequences of one batch: how far each was read, and its pages, on the host and as a table on the device."""

    def __init__(self, config: NSAConfig, sequences: int, pages: int, page_len: int | None) -> None:
        """Raises CannotRunError for attention without branches, and for a page that cuts a selection block."""
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
        self._table: Tensor | None = None  # [sequences, 3, columns], int32; None: nothing was read yet
        self._not_in_table: dict[
            tuple[int, int, int], int
        ] = {}  # page by its place, where that is not in the table yet

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Pages for so many further tokens of each sequence; first those before its window are given back.

        Raises OutOfPagesError, and then none was taken.
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
        """All pages of a sequence go back; the next token of this number begins another one."""
        for page_range in self.sequences[number].pages_by_kind.values():
            self.pool.release(page_range.pages)
        self.sequences[number] = PagedSequence()

    def table(self, device: torch.device) -> Tensor:
        """Pages [sequences, 3, columns], int32; what stands for a page that a sequence has not is any number."""
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
        """The first token that the next one after so many, and each later one, may see."""
        return max(0, tokens - self._config.window + 1)

    def _free_pages_before_window(self, sequence: PagedSequence) -> None:
        page_range = sequence.pages_by_kind.get(Kind.WINDOW)
        if page_range is not None:
            over = min(self.first_in_window(sequence.tokens) // self.page_len - page_range.first, len(page_range.pages))
            self.pool.release(page_range.pages[:over])
            page_range.first, page_range.pages = page_range.first + over, page_range.pages[over:]

    def _missing_pages(self, sequence: PagedSequence, count: int) -> Iterator[tuple[Kind, int]]:
        """Kind and column of the pages that a sequence needs for so many more tokens."""
        end = sequence.tokens + count
        rows = dict.fromkeys(self._stored_kinds, end)
        if Kind.BLOCKS in rows:
            rows[Kind.BLOCKS] = CompletedBlocks(self._config.block_len, self._config.block_stride).count(end)
        for kind, stop in rows.items():
            # A whole prompt is read by the layer itself, and no later token sees what lies before the window.
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
