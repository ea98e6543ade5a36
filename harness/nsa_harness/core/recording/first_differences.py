"""Scan a run forward for the statements whose results differ between two ranks although nothing that they read does."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.recording.alignment import Alignment
from nsa_harness.core.recording.slicing import Executions, Pair, Slicer, Step, written_differently


def first_differences(alignment: Alignment, pair: Pair) -> Iterator[Step]:
    """Yield each statement once, at its first execution that made a difference, in the order of time."""
    slicer = Slicer(alignment, pair)
    seen = set()
    first, second = (alignment.traces[number] for number in pair)
    for row in alignment.rows:
        if pair[0] not in row or pair[1] not in row:
            continue
        executions = row[pair[0]], row[pair[1]]
        place = first.place(executions[0])
        if place in seen:
            continue
        name = written_differently(first.executions[executions[0]], second.executions[executions[1]])
        if name and not slicer.inputs(executions) and not _calls_differ(slicer, executions):
            seen.add(place)
            yield Step(executions, name, None, 0, is_origin=True)


def _calls_differ(slicer: Slicer, executions: Executions) -> bool:
    return bool(slicer.results(executions))
