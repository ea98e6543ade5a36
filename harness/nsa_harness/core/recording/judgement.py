"""Judge what the recording of an experiment shows about the cause that the experiment tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nsa_harness.core.recording.explanation import ExperimentKind, ExperimentResult, Explanation, PlannedExperiment
from nsa_harness.core.recording.recording import RankRecording, executions_of
from nsa_harness.core.report import Place

ITERATIONS = 10  # that every rank has to get past the point


class EventKind(StrEnum):
    """What an intervention did at one execution of a statement."""

    CHANGED = "changed"
    EQUAL = "equal"
    PUBLISHED = "published"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class ExperimentEvent:
    """One line of a rank's record of the experiment."""

    kind: EventKind
    rank: int
    occurrence: int  # number of the execution of the statement, from 1
    reason: str = ""  # code of the reason why the change was refused


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of one experiment."""

    result: ExperimentResult
    refused: tuple[tuple[int, str], ...]  # ranks, and why a change was refused there
    next_place: Place | None = None  # where the ranks parted or stopped after the point


def read_events(records: Iterable[Mapping[str, Any]]) -> Iterator[ExperimentEvent]:
    """Yield the events of a rank's record of the experiment. Records that are not events are skipped."""
    for fields in records:
        try:
            yield ExperimentEvent(
                kind=EventKind(fields["event"]),
                rank=int(fields["rank"]),
                occurrence=int(fields["occurrence"]),
                reason=str(fields.get("reason") or "")[:200],
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            continue


def judge_experiment(
    planned: PlannedExperiment,
    explanation: Explanation,
    before: Sequence[RankRecording],
    after: Sequence[RankRecording],
    *,
    events: Sequence[ExperimentEvent],
    new_explanation: Explanation | None,
    passed: bool,
) -> Judgement:
    """Judge an experiment.

    `explanation` and `before` belong to the recorded run that failed; `after`, `events` and `new_explanation` to the
    run of the experiment. `new_explanation` is None if its ranks cannot be compared. `passed`: every rank of the
    experiment exited successfully.
    """
    progress = _progress(explanation, before, after)
    is_past = passed or (bool(progress) and all(steps >= ITERATIONS for steps in progress.values()))
    changes = [event for event in events if event.kind is EventKind.CHANGED]
    if is_past and planned.kind is ExperimentKind.UNDO_LEAK and {event.rank for event in changes} >= {*progress}:
        result = ExperimentResult.INCONCLUSIVE  # every rank makes the call, so none of them is an extra call
    elif is_past:
        result = _success(planned, [event.occurrence for event in changes], explanation)
    else:
        result = _failure(events, explanation, new_explanation, progress)
    return Judgement(
        result=result,
        refused=tuple(sorted({(event.rank, event.reason) for event in events if event.kind is EventKind.REFUSED})),
        next_place=None if passed or new_explanation is None else _stop(new_explanation),
    )


def is_same_stop(explanation: Explanation, other: Explanation) -> bool:
    """Return whether two runs stopped in the same way: the same division, or else the same ranks at the same lines."""
    if explanation.division is not None and other.division is not None:
        return _position(explanation.division.place) == _position(other.division.place)
    return _ends(explanation) == _ends(other)


def _success(planned: PlannedExperiment, changes: Sequence[int], explanation: Explanation) -> ExperimentResult:
    """Return WENT_ON if it was the change that got the ranks past the point.

    `changes` are the executions of the statement at which something was changed.
    """
    division = explanation.division
    is_at_division = division is not None and _position(planned.place) == _position(division.place)
    if not changes or (is_at_division and division is not None and min(changes) > division.occurrence):
        return ExperimentResult.RACE
    return ExperimentResult.WENT_ON


def _failure(
    events: Sequence[ExperimentEvent],
    explanation: Explanation,
    new_explanation: Explanation | None,
    progress: Mapping[int, int],
) -> ExperimentResult:
    kinds = {event.kind for event in events}
    is_same = new_explanation is not None and is_same_stop(explanation, new_explanation)
    if EventKind.CHANGED not in kinds:
        is_race = EventKind.EQUAL in kinds and EventKind.REFUSED not in kinds and not is_same
        return ExperimentResult.RACE if is_race else ExperimentResult.NOT_MADE
    is_past_once = bool(progress) and all(steps >= 1 for steps in progress.values())
    if is_same:
        return ExperimentResult.INCONCLUSIVE if is_past_once else ExperimentResult.FAILED
    return ExperimentResult.SECOND_CAUSE if is_past_once else ExperimentResult.INCONCLUSIVE


def _progress(
    explanation: Explanation, before: Sequence[RankRecording], after: Sequence[RankRecording]
) -> dict[int, int]:
    """Return how far each rank got past the point: executions of the statement there, or communications.

    Executions count only if the rank also communicated more than in the run that failed, because a loop that waits for
    another rank executes its statements without getting anywhere. A rank that ran to its end got past the point.
    """
    division = explanation.division
    earlier = {recording.rank: _count(recording, division.place if division else None) for recording in before}
    progress = {}
    for recording in after:
        executions, communications = _count(recording, division.place if division else None)
        _, communications_before = earlier.get(recording.rank, (0, 0))
        more = communications - communications_before
        past = executions - division.occurrence if division and (more > 0 or not communications_before) else 0
        progress[recording.rank] = ITERATIONS if _ran_to_its_end(recording) else max(0, past, more)
    return {rank: progress.get(rank, 0) for rank in {*earlier, *progress}}


def _count(recording: RankRecording, place: Place | None) -> tuple[int, int]:
    """Return how often the rank executed the statement at `place`, and how many of its communications returned."""
    executions = communications = 0
    for activation, execution in executions_of(recording):
        executions += place is not None and (activation.file, execution.line) == (place.file, place.line)
        communications += sum(call.returned and not call.error for call in execution.communications)
    return executions, communications


def _ran_to_its_end(recording: RankRecording) -> bool:
    activations = recording.threads[0].activations if recording.threads else []
    return bool(activations) and activations[-1].ended and activations[-1].returned is not None


def _position(place: Place) -> tuple[str | None, int | None]:
    return place.file, place.line


def _ends(explanation: Explanation) -> set[tuple[tuple[int, ...], str | None, int | None]]:
    return {(ranks, *(_position(place) if place else (None, None))) for ranks, place, _ in explanation.ends}


def _stop(explanation: Explanation) -> Place | None:
    """Return where the ranks parted, or else where the first of them stopped."""
    if explanation.division is not None:
        return explanation.division.place
    return next((place for _, place, _ in explanation.ends if place is not None), None)
