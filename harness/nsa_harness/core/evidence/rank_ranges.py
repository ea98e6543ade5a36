"""Ranks as short text, such as "0-3,6,8-16/4": how the probe writes the members of a group, and how they are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

_MAX_RANKS = 1 << 16
_RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?:/([0-9]{1,7}))?)?")
_ONE_RANGE = r"[0-9]{1,7}(?:-[0-9]{1,7}(?:/[0-9]{1,7})?)?"
_RANGES = re.compile(f"{_ONE_RANGE}(?:,{_ONE_RANGE})*")
_MIN_STORED_AS_TEXT = 16  # ranks; a shorter list is stored as a list, which older versions read


@lru_cache(maxsize=1 << 13)  # all ranks of a group have the same text, and share one tuple
def read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a string such as "0-3,6,8-16/4", or () if it is malformed."""
    ranks: list[int] = []
    for first, last, stride in _RANGE.findall(text) if _RANGES.fullmatch(text) else ():
        ranks += range(int(first), min(int(last or first), int(first) + _MAX_RANKS) + 1, max(1, int(stride or 1)))
    return tuple(ranks[:_MAX_RANKS])


@lru_cache(maxsize=1 << 13)
def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return the text of ranks from which `read_ranks` returns them, in their order."""
    parts, at = [], 0
    while at < len(ranks):
        stride = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        end = at + 1
        while stride > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
            end += 1
        if end - at < (2 if stride == 1 else 3):
            end = at + 1
        last = f"-{ranks[end - 1]}" + (f"/{stride}" if stride != 1 else "") if end > at + 1 else ""
        parts.append(f"{ranks[at]}{last}")
        at = end
    return ",".join(parts)


def stored_ranks(ranks: Sequence[int]) -> str | list[int]:
    """Return the ranks of a group as they are stored: as text if there are many."""
    is_long = len(ranks) >= _MIN_STORED_AS_TEXT and min(ranks) >= 0
    return ranks_text(tuple(ranks)) if is_long else list(ranks)


def stored_groups(groups: Mapping[str, Sequence[int]]) -> dict[str, str | list[int]]:
    """Return the members of groups as they are stored."""
    return {group: stored_ranks(members) for group, members in groups.items()}


def _read_stored(value: Any, read_list: ValidatorFunctionWrapHandler) -> Any:
    # pydantic would copy the tuple, and each of 16,384 ranks would have its own list of all of them.
    return read_ranks(value) if isinstance(value, str) else read_list(value)


# The members of a group. In JSON they are a list, or a string if there are many.
StoredRanks = Annotated[tuple[int, ...], WrapValidator(_read_stored), PlainSerializer(stored_ranks)]
