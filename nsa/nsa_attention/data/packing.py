"""Packing of documents into rows of equal length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .tokens import Tokens

Place = TypeVar("Place")


class Row(NamedTuple):
    """A row of T + 1 tokens, taken from one or more documents."""

    tokens: NDArray[np.unsignedinteger[Any]]  # [T + 1]
    lengths: tuple[int, ...]  # length of each document in the T input tokens; their sum is T
    goes_on: bool  # whether the last target belongs to the same document as the last input
    counts: bool = True  # False for a row that could not be read: all its targets are ignored


@dataclass(frozen=True)
class Cursor(Generic[Place]):
    """The document and token at which the next row starts."""

    place: Place
    token: int


def rows(
    documents: Iterable[tuple[Place, Tokens]], length: int, skip_tokens: int = 0
) -> Iterator[tuple[Row, Cursor[Place]]]:
    """Yield rows cut from the concatenated documents, each with the position at which the next row starts.

    Each document has a place, which identifies it. The last token of a row is the first token of the next row. The
    first `skip_tokens` tokens of the first document are skipped, and an incomplete last row is dropped.
    """
    waiting: deque[tuple[Place, Tokens, int]] = deque()  # documents, and how many of their tokens are used
    available = 0
    for place, tokens in documents:
        skip, skip_tokens = min(skip_tokens, len(tokens)), 0
        if len(tokens) > skip:
            waiting.append((place, tokens, skip))
            available += len(tokens) - skip
        while available > length:
            row = _cut(waiting, length)
            available -= length
            next_place, _, used = waiting[0]
            yield row, Cursor(next_place, used)


def _cut(waiting: deque[tuple[Any, Tokens, int]], length: int) -> Row:
    """Remove the first `length` tokens from the queued documents, and return these tokens as a row."""
    parts, missing, goes_on = [], length, False
    while missing:
        place, tokens, used = waiting.popleft()
        part = tokens[used : used + missing]
        parts.append(part)
        missing -= len(part)
        if used + len(part) < len(tokens):
            goes_on = True
            waiting.appendleft((place, tokens, used + len(part)))
    _, tokens, used = waiting[0]
    return Row(
        tokens=np.concatenate([*parts, tokens[used : used + 1]]),
        lengths=tuple(len(part) for part in parts),
        goes_on=goes_on,
    )


def row_of_window(window: Tokens, end: int | None) -> Row:
    """Return the row for `window`, which contains T + 1 consecutive tokens of a longer sequence.

    `end` is the token that ends each document, or None if the sequence is a single document.
    """
    inputs = len(window) - 1
    if end is None:
        return Row(tokens=window, lengths=(inputs,), goes_on=True)
    ends = np.flatnonzero(window[:-1] == end) + 1
    bounds = [0, *ends.tolist()]
    goes_on = bounds[-1] != inputs
    if goes_on:
        bounds.append(inputs)
    return Row(tokens=window, lengths=tuple(np.diff(bounds).tolist()), goes_on=goes_on)
