"""Documents to rows of T + 1 tokens: one behind the other, cut wherever a row is full."""

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
    """T inputs and the token behind them. The documents of the inputs follow each other and fill them."""

    tokens: NDArray[np.unsignedinteger[Any]]  # [T + 1]
    lengths: tuple[int, ...]
    goes_on: bool  # the last document does behind the inputs: their last target is a token of it


@dataclass(frozen=True)
class Cursor(Generic[Place]):
    """Where the next row begins: so many tokens into the document of that place."""

    place: Place
    token: int


def rows(
    documents: Iterable[tuple[Place, Tokens]], length: int, skip_tokens: int = 0
) -> Iterator[tuple[Row, Cursor[Place]]]:
    """Rows of `length` inputs, each with where the next one begins; what is left over at the end is no row.

    The last token of a row is the first of the next one. `skip_tokens` of the first document are passed over.
    """
    waiting: deque[tuple[Place, Tokens, int]] = deque()  # documents, and how many of their tokens are used up
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
    """The first `length` tokens of what waits, and the one behind them, which stays."""
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
    """The row of T + 1 tokens that were cut from a longer line of them, in which `end` ends each document."""
    inputs = len(window) - 1
    if end is None:
        return Row(tokens=window, lengths=(inputs,), goes_on=True)
    ends = np.flatnonzero(window[:-1] == end) + 1
    bounds = [0, *ends.tolist()]
    goes_on = bounds[-1] != inputs
    if goes_on:
        bounds.append(inputs)
    return Row(tokens=window, lengths=tuple(np.diff(bounds).tolist()), goes_on=goes_on)
