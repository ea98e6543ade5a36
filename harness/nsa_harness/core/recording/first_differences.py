"""Scan a run forward for the statements whose results differ between two ranks although nothing that they read does."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.recording.alignment import Alignment
from nsa_harness.core.recording.recording import Execution
from nsa_harness.core.recording.slicing import Executions, Pair, Slicer, Step, differs


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
        name = _written(first.executions[executions[0]], second.executions[executions[1]])
        if (
            (name or _returned(alignment, pair, executions))
            and not slicer.inputs(executions)
            and not _calls_differ(slicer, executions)
        ):
            seen.add(place)
            yield Step(executions, name, None, 0, is_origin=True)


def extra_draws(alignment: Alignment, pair: Pair) -> Iterator[Step]:
    """Yield for each random generator the draw of only one rank after which both drew from it in different states."""
    seen: set[str] = set()
    slicer = Slicer(alignment, pair)
    first, second = (alignment.traces[number].executions for number in pair)
    for ours, theirs in sorted((row[pair[0]], row[pair[1]]) for row in alignment.rows if {*pair} <= row.keys()):
        others = {name: before for name, before, _ in second[theirs].draws}
        for name, before, _ in first[ours].draws:
            if name not in seen and others.get(name, before) != before:
                extra = [
                    step for step in slicer.slice((ours, theirs)) if step.is_leak and step.name.endswith(f":{name}")
                ]
                yield from extra[:1]
                seen.update(name for _ in extra[:1])


def _returned(alignment: Alignment, pair: Pair, executions: Executions) -> bool:
    """Return whether these statements ended calls that returned different values."""
    results = []
    for number, execution in zip(pair, executions, strict=True):
        trace = alignment.traces[number]
        activation = trace.activation_of[execution]
        if trace.members[activation][-1] != execution or (value := trace.activations[activation].returned) is None:
            return False
        results.append(value)
    return differs(*results)


def _written(ours: Execution, theirs: Execution) -> str:
    """Return the first name to which both assigned different values, or "" if there is none."""
    if not ours.writes or not theirs.writes:
        return ""
    others = dict(theirs.writes)
    return next((name for name, value in ours.writes if name in others and differs(value, others[name])), "")


def _calls_differ(slicer: Slicer, executions: Executions) -> bool:
    return bool(slicer.results(executions))
