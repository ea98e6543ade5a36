"""What people call ranks: few by number and place in the mesh, many in ranges, a thousand in one short line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nsa_harness.core.evidence.evidence import Evidence

Coordinates = tuple[tuple[str, int], ...]
Meshes = Mapping[int, Coordinates]

_SPANS = 4  # ranges, or single ranks, that are written out
_MENTION = re.compile(r"\branks? (?:\d+(?:, \d+){0,3}(?: and \d+)?)(?![-\d]|\.\d)(?!, \d| and \d| \()")
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r",? (?:(?:in|of|since|after|to) )?step \d+\b|\b\d+ steps? done, ")


def meshes(evidence: Evidence) -> Meshes:
    """The place of each rank in the job's mesh, for those that told one."""
    return {rank.rank: rank.board.mesh for rank in evidence.ranks if rank.board and rank.board.mesh}


def coordinates(rank: int, places: Meshes) -> str:
    """ "dp=1 tp=1"; empty where the job has no mesh."""
    return _coordinates_text(places.get(rank, ()))


def rank_names(ranks: Sequence[int], places: Meshes) -> str:
    """ "ranks 1 (dp=0), 3 (dp=1)"; of many the ranges, what they share, and how many are left: "ranks 0-511 (pp=1)"."""
    wanted = sorted(set(ranks))
    if len(wanted) <= _SPANS and any(rank in places for rank in wanted):
        return f"{'rank' if len(wanted) == 1 else 'ranks'} {', '.join(_located(rank, places) for rank in wanted)}"
    shared = set(places.get(wanted[0], ())).intersection(*(places.get(rank, ()) for rank in wanted)) if wanted else ()
    common = _coordinates_text(tuple(pair for pair in places.get(wanted[0], ()) if pair in shared)) if wanted else ""
    return ranks_text(wanted) + (f" ({common})" if common else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2", "ranks 0-511 and 3 more": inclusive, and never longer than a line."""
    spans = _spans(ranks)
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:_SPANS]]
    rest = sum(last - first + 1 for first, last in spans[_SPANS:])
    more = f" and {rest} more" if rest else ""
    word = "rank" if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks"
    return f"{word} {', '.join(shown)}{more}"


def with_coordinates(claim: str, places: Meshes) -> str:
    """The claim with each rank's place in the mesh behind the first mention of its number."""
    mentioned: set[int] = set()

    def located(number: re.Match[str]) -> str:
        rank = int(number[0])
        if rank in mentioned or rank not in places:
            return number[0]
        mentioned.add(rank)
        return _located(rank, places)

    return _MENTION.sub(lambda mention: _NUMBER.sub(located, mention[0]), claim) if places else claim


def without_steps(claim: str) -> str:
    """The claim of a program that has no optimizer: everything it does is its first step, which tells nothing."""
    return _STEP.sub("", claim)


def _spans(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of three and more together; longer ones first where not all can be shown, else in order."""
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
    return spans if len(spans) <= _SPANS else sorted(spans, key=lambda span: (span[0] - span[1], span[0]))


def _located(rank: int, places: Meshes) -> str:
    where = coordinates(rank, places)
    return f"{rank} ({where})" if where else str(rank)


def _coordinates_text(place: Coordinates) -> str:
    return " ".join(f"{axis}={coordinate}" for axis, coordinate in place)
