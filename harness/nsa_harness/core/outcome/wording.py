"""Format ranks, source locations and counts as text.

The modules of `texts` use these functions too. They are defined here because `core` may not import `texts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsa_harness.core.report import Place

Coordinates = tuple[tuple[str, int | str], ...]  # the node of a rank has the axis ""
Meshes = Mapping[int, Coordinates]

_MAX_SPANS = 4  # ranges and single ranks shown; the rest are counted


def coordinates(rank: int, places: Meshes) -> str:
    """Return a rank's device mesh coordinates, such as "dp=1 tp=1", or "" if the rank has none."""
    return _coordinates_text(places.get(rank, ()))


def rank_names(ranks: Sequence[int], places: Meshes) -> str:
    """Return the ranks with their device mesh coordinates, such as "ranks 1 (dp=0), 3 (dp=1)"."""
    numbers = sorted(set(ranks))
    if len(numbers) <= _MAX_SPANS and any(rank in places for rank in numbers):
        return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(located_rank(rank, places) for rank in numbers)}"
    common = _coordinates_text(_common_coordinates(numbers, places))
    return ranks_text(numbers) + (f" ({common})" if common else "")


def _common_coordinates(ranks: Sequence[int], places: Meshes) -> Coordinates:
    if not ranks:
        return ()
    first, *others = (places.get(rank, ()) for rank in ranks)
    return tuple(pair for pair in first if all(pair in other for other in others))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks as short text, such as "rank 1", "ranks 0, 2" or "ranks 0-511 and 3 more"."""
    spans = _spans(ranks)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:_MAX_SPANS]]
    rest = sum(last - first + 1 for first, last in spans[_MAX_SPANS:])
    more = f" and {rest} more" if rest else ""
    word = "rank" if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks"
    return f"{word} {', '.join(texts)}{more}"


def location_in_brackets(place: Place | None, step: int | None = None) -> str:
    """Return a location and step in brackets, such as " (own/train.py:12, step 3)", or "" if they are unknown."""
    if place is None or place.file is None:
        return "" if step is None else f" in step {step}"
    return f" ({location(place)})" if step is None else f" ({location(place)}, step {step})"


def location(place: Place | None) -> str:
    """Return a location as text, such as "own/train.py:12", or "" if it is unknown."""
    if place is None:
        return ""
    if place.file is not None:
        name = "/".join(place.file.split("/")[-2:])
        return name if place.line is None else f"{name}:{place.line}"
    return place.module or place.parameter or ""


_WORLD_GROUPS = ("", "0")  # the unknown group and the group of all ranks


def of_group(group: str) -> str:
    """Return " of group tp" for the process group `tp`, or "" for the default group."""
    return "" if group in _WORLD_GROUPS else f" of group {group}"


def shorten(text: str, limit: int = 200) -> str:
    """Return the text on one line with at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def number_of(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as "1 rank" or "2 ranks"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _spans(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive ranks, the longest if there are too many. Two ranks are not joined."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    spans = [
        part
        for first, last in spans
        for part in ([(first, last)] if last - first != 1 else [(first, first), (last, last)])
    ]
    return spans if len(spans) <= _MAX_SPANS else sorted(spans, key=lambda span: (span[0] - span[1], span[0]))


def located_rank(rank: int, places: Meshes) -> str:
    where = coordinates(rank, places)
    return f"{rank} ({where})" if where else str(rank)


def _coordinates_text(place: Coordinates) -> str:
    return " ".join(f"{axis}={coordinate}" if axis else str(coordinate) for axis, coordinate in place)
