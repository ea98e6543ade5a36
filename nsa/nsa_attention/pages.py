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
NARROWEST = 16
FIRST_COLUMNS = 16


class Kind(IntEnum):
    """What the rows of a page are; also the place in the tables."""

    BLOCKS = 0  # a compressed block each, or the mean that ranks it where the layer has no compressed branch
    TOKENS = 1  # of the selected branch
    WINDOW = 2  # of the sliding branch


class OutOfPagesError(CannotRunError):
    """More pages are needed than are free."""


def default_page_len(config: NSAConfig) -> int:
    """The least common multiple of a selection block and of what a tensor core takes at once."""
    return math.lcm(config.select_len, NARROWEST)


def pages_of(config: NSAConfig, tokens: int, page_len: int | None = None) -> int:
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
    return sum(counts[kind] for kind in kinds(config))


def kinds(config: NSAConfig) -> tuple[Kind, ...]:
    """What a layer of this shape keeps."""
    kept = {
        Kind.BLOCKS: Branch.CMP in config.branches or Branch.SEL in config.branches,
        Kind.TOKENS: Branch.SEL in config.branches,
        Kind.WINDOW: Branch.WIN in config.branches,
    }
    return tuple(kind for kind, wanted in kept.items() if wanted)


@dataclass(kw_only=True)
class Held:
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
    held: dict[Kind, Held] = field(default_factory=dict)


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

    def give_back(self, pages: list[int]) -> None:
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
        self._config, self._kinds = config, kinds(config)
        self._table: Tensor | None = None  # [sequences, 3, columns], int32; None: nothing was read yet
        self._fresh: dict[tuple[int, int, int], int] = {}  # page by its place, where that is not in the table yet

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Pages for so many further tokens of each sequence; first those before its window are given back.

        Raises OutOfPagesError, and then none was taken.
        """
        wanted = []
        for number, count in counts.items():
            sequence = self.sequences[number]
            self._give_back_before_the_window(sequence)
            wanted += [(number, *place) for place in self._missing(sequence, count)]
        if len(wanted) > self.pool.free:
            raise OutOfPagesError(
                f"pages: {len(wanted)} more are needed for {sum(counts.values())} tokens of {len(counts)} sequences, "
                f"and {self.pool.free} of {self.pool.size} are free, of {self.page_len} rows each; "
                "end a sequence, or give the cache more pages (--pages)"
            )
        for number, kind, column in wanted:
            held = self.sequences[number].held.setdefault(kind, Held(first=column))
            held.pages.append(self.pool.take())
            self._fresh[number, kind, column] = held.pages[-1]

    def end(self, number: int) -> None:
        """All pages of a sequence go back; the next token of this number begins another one."""
        for held in self.sequences[number].held.values():
            self.pool.give_back(held.pages)
        self.sequences[number] = PagedSequence()

    def table(self, device: torch.device) -> Tensor:
        """Pages [sequences, 3, columns], int32; what stands for a page that a sequence has not is any number."""
        columns = max((held.stop for one in self.sequences for held in one.held.values()), default=0)
        if self._table is None or columns > self._table.shape[2]:
            self._table = self._grown(columns, device)
        if self._fresh:
            fresh = [(*place, page) for place, page in self._fresh.items()]
            *places, page = torch.tensor(fresh, device=device).unbind(1)
            self._table[tuple(places)] = page.to(torch.int32)
            self._fresh.clear()
        return self._table

    def first_in_window(self, tokens: int) -> int:
        """The first token that the next one after so many, and each later one, may see."""
        return max(0, tokens - self._config.window + 1)

    def _give_back_before_the_window(self, sequence: PagedSequence) -> None:
        held = sequence.held.get(Kind.WINDOW)
        if held is not None:
            over = min(self.first_in_window(sequence.tokens) // self.page_len - held.first, len(held.pages))
            self.pool.give_back(held.pages[:over])
            held.first, held.pages = held.first + over, held.pages[over:]

    def _missing(self, sequence: PagedSequence, count: int) -> Iterator[tuple[Kind, int]]:
        """Kind and column of the pages that a sequence needs for so many more tokens."""
        end = sequence.tokens + count
        rows = dict.fromkeys(self._kinds, end)
        if Kind.BLOCKS in rows:
            rows[Kind.BLOCKS] = CompletedBlocks(self._config.block_len, self._config.block_stride).count(end)
        for kind, stop in rows.items():
            # A whole prompt is read by the layer itself, and no later token sees what lies before the window.
            is_prompt = count > 1 and not sequence.tokens
            new = self.first_in_window(end) // self.page_len if kind is Kind.WINDOW and is_prompt else 0
            held = sequence.held.get(kind, Held(first=new))
            yield from ((kind, column) for column in range(held.stop, -(-stop // self.page_len)))

    def _grown(self, columns: int, device: torch.device) -> Tensor:
        room = max(FIRST_COLUMNS, 1 << (columns - 1).bit_length())
        table = torch.zeros(len(self.sequences), len(Kind), room, dtype=torch.int32, device=device)
        if self._table is not None:
            table[:, :, : self._table.shape[2]] = self._table
        return table
