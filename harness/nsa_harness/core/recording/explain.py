"""Explain from their recordings why the ranks of a run took different ways."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from nsa_harness.core.recording.alignment import ControlFlow, align
from nsa_harness.core.recording.candidates import Candidates
from nsa_harness.core.recording.division import Divisions, Judged, failed_children
from nsa_harness.core.recording.explanation import Division, Explanation, SilentDifference
from nsa_harness.core.recording.provability import values_of
from nsa_harness.core.recording.recording import RankRecording
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Trace, trace_of
from nsa_harness.core.report import Place

_OPTIMIZER_STEP = re.compile(r"\b\w*(?:opt|optim|optimizer|scaler)\w*\.step\(")


def explain(
    recordings: Sequence[RankRecording], sources: Mapping[str, str], silent: SilentDifference | None = None
) -> Explanation:
    """Return where and why the ranks took different ways.

    `sources` has the text of each source file by its path. `silent`: what differs although the run passed.
    """
    recordings = sorted(recordings, key=lambda recording: recording.rank)
    traces = [trace_of(recording, with_children=True) for recording in recordings]
    if not any(trace.stopped_child() or failed_children(trace) for trace in traces):
        traces = [trace_of(recording) for recording in recordings]
    statements = Statements(sources)
    notes = _notes(recordings, traces)
    if len(traces) < 2:
        return Explanation(candidates=(), division=None, ends=_ends(traces), notes=(*notes, "one_rank"))
    alignment = align(traces, ControlFlow(traces))
    divisions = Divisions(alignment).judge()
    candidates = Candidates(alignment, statements, divisions, silent).ranked()
    if not divisions and silent is None:
        notes = (*notes, "no_difference")
    return Explanation(
        candidates=candidates,
        division=_division(divisions[0], traces, statements) if divisions else None,
        ends=() if silent else _ends(traces),
        notes=notes,
    )


def _notes(recordings: Sequence[RankRecording], traces: Sequence[Trace]) -> tuple[str, ...]:
    truncated = any(activation.is_truncated for trace in traces for activation in trace.activations)
    return ("truncated",) if truncated or any(recording.problems for recording in recordings) else ()


def _division(judged: Judged, traces: Sequence[Trace], statements: Statements) -> Division:
    number = judged.pair[0]
    execution = judged.row[number]
    place = traces[number].place(execution)
    return Division(
        place=place,
        occurrence=traces[number].occurrence[execution],
        ways=_ways(judged, traces),
        condition=statements.header(place),
        values=values_of(traces, judged.row),
        step=_step(traces[number], execution, statements),
    )


def _ways(judged: Judged, traces: Sequence[Trace]) -> tuple[tuple[tuple[int, ...], Place | None], ...]:
    """Return the ranks that went each way, the smallest way first, with the next statement of each."""
    if judged.parting is None:
        others = tuple(number for number in judged.row if number not in judged.minority)
        ways = tuple(way for way in (judged.minority, others) if way)
    else:
        ways = judged.parting.ways[::-1]
    found = []
    for way in ways:
        arm = judged.parting.arms[way[0]] if judged.parting is not None else None
        trace = traces[way[0]]
        next_place = None
        if arm is not None and arm.next_line is not None and arm.first < len(trace.executions):
            next_place = trace.place(arm.first)
        found.append((tuple(traces[number].rank for number in way), next_place))
    return tuple(found)


def _step(trace: Trace, execution: int, statements: Statements) -> int | None:
    """Return the training step of an execution, counted by calls of the optimizer, or None if it cannot be counted."""
    places: defaultdict[tuple[str, int], int] = defaultdict(int)
    for number in range(execution):
        activation = trace.activations[trace.activation_of[number]]
        places[activation.file, trace.executions[number].line] += 1
    counts = [
        count
        for (file, line), count in places.items()
        if _OPTIMIZER_STEP.search(statements.header(Place(file=file, line=line)))
    ]
    return max(counts) + 1 if counts else None


def _ends(traces: Sequence[Trace]) -> tuple[tuple[tuple[int, ...], Place | None, str], ...]:
    """Return the ranks that stopped at the same place in the same operation, for each such place."""
    found: defaultdict[tuple[Place | None, str], list[int]] = defaultdict(list)
    for trace in traces:
        if (child := trace.stopped_child()) is not None:
            found[trace.place(child[1]), f"its {child[0]}"].append(trace.rank)
            continue
        execution = trace.last
        if execution < 0:
            found[None, ""].append(trace.rank)
            continue
        made = [made for made in trace.executions[execution].communications if not made.returned]
        found[trace.place(execution), made[-1].operation if made else ""].append(trace.rank)
    return tuple((tuple(ranks), place, operation) for (place, operation), ranks in found.items())
