"""Gathered artifacts: the files of all attempts together, with the reason for each one that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.report import Artifact, Outcome


@dataclass(frozen=True, kw_only=True)
class Gathered:
    path: str
    attempts: int  # in how many attempts it is there
    of: int  # out of how many that were started
    entries: int
    absent: tuple[tuple[str, int], ...]  # (reason, in how many attempts), most frequent first


def gathered(outcomes: Sequence[Outcome]) -> tuple[Gathered, ...]:
    """One row for each file that some attempt lists, in the order of the lists."""
    listed: dict[str, list[Artifact]] = {}
    for outcome in outcomes:
        for item in outcome.artifacts:
            listed.setdefault(item.path, []).append(item)
    return tuple(_row(path, items) for path, items in listed.items())


def _row(path: str, items: Sequence[Artifact]) -> Gathered:
    there = [item for item in items if item.absent is None]
    reasons = Counter(item.absent for item in items if item.absent is not None)
    return Gathered(
        path=path,
        attempts=len(there),
        of=len(items),
        entries=sum(item.count or 0 for item in there),
        absent=tuple(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
    )
