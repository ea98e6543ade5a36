"""The trace lines of the subject, in the formats its users know, and what they count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_TRACE = re.compile(r"^(?:\[GRAD-TRACE\] |  - MISSING: |\[DDP\] |\[MODULE-BWD\] )")
_GRADIENTS = re.compile(r"^\[GRAD-TRACE\] after_backward_step(\d+) arrived=(\d+) missing=(\d+)$")
_MISSING = re.compile(r"^  - MISSING: (\S.*)$")
_BUCKET = re.compile(r"^\[DDP\] rank=(\d+) bucket_elems=(\d+) dtype=(\S+)$")


@dataclass(frozen=True, kw_only=True)
class RankTraces:
    """What one rank traced."""

    arrived: int | None  # of the last traced step
    missing: int | None
    missing_parameters: tuple[str, ...]  # over all steps, in order of appearance
    buckets: tuple[tuple[int, str], ...]  # (elements, dtype)


def trace_lines(log: Iterable[str]) -> Iterator[str]:
    return (line for line in log if _TRACE.match(line))


def read_traces(lines: Sequence[str]) -> RankTraces:
    gradients = [found for line in lines if (found := _GRADIENTS.match(line))]
    names = [found[1] for line in lines if (found := _MISSING.match(line))]
    buckets = [(int(found[2]), found[3]) for line in lines if (found := _BUCKET.match(line))]
    last = gradients[-1] if gradients else None
    return RankTraces(
        arrived=int(last[2]) if last else None,
        missing=int(last[3]) if last else None,
        missing_parameters=tuple(dict.fromkeys(names)),
        buckets=tuple(buckets),
    )
