"""Compare the latest call of a rank with the pattern of its earlier calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.call_history import MIN_REPEATS, comes_later, expected_next, leaves_a_loop
from nsa_harness.core.collectives.timeline import Event, Timeline


def key_of(event: Event) -> tuple[object, ...]:
    """Return the values that identify a call in the rank's pattern of calls."""
    return (*event.site, event.elements) if event.needs_equal_sizes else event.site


@dataclass(frozen=True, kw_only=True)
class PatternStep:
    """The result of comparing a rank's call with the earlier iterations of the same rank."""

    has_expectation: bool  # the pattern predicts a call at this point
    keeps_pattern: bool  # the call is the predicted one
    skips_event: bool  # the call came later in the previous iteration, so the rank skipped the predicted one
    is_new_event: bool  # the rank never made the call before
    leaves_loop: bool  # the rank leaves a loop in the same way as before, but earlier than predicted
    is_trusted: bool  # the pattern was repeated often enough


def compare_with_pattern(line: Sequence[Event], event: Event) -> PatternStep:
    """Return the result of comparing `event` with the calls in the rank's earlier iterations."""
    sites, at = _with_steps(line, event)
    prediction = expected_next(tuple(sites), at)
    keeps = prediction is not None and sites[prediction.at] == sites[at]
    return PatternStep(
        has_expectation=prediction is not None,
        keeps_pattern=keeps,
        skips_event=prediction is not None and not keeps and comes_later(sites, prediction, at, sites[at]),
        is_new_event=sites[at] not in sites[:at],
        leaves_loop=not keeps and leaves_a_loop(sites, at),
        is_trusted=prediction is not None and prediction.is_trusted,
    )


def _with_steps(line: Sequence[Event], event: Event) -> tuple[list[Hashable], int]:
    """Return the keys of all calls up to `event`, with a marker before each step, and the index of `event`."""
    sites: list[Hashable] = []
    step = None
    for earlier in line[: index_of(line, event) + 1]:
        if earlier.step is not None and earlier.step != step:
            sites.append("a step begins")
            step = earlier.step
        sites.append(key_of(earlier))
    return sites, len(sites) - 1


def index_of(line: Sequence[Event], event: Event) -> int:
    """Return the index of the object `event` itself in `line`, which may contain equal events."""
    return next(at for at, candidate in enumerate(line) if candidate is event)


def broke_pattern(line: Timeline, event: Event) -> bool:
    """Return whether the rank made the call `event` earlier than in its previous iterations."""
    step = compare_with_pattern(line.events, event)
    return not step.keeps_pattern and (step.skips_event or step.leaves_loop)


@dataclass(frozen=True, kw_only=True)
class PatternBreak:
    """A call at which a rank deviated from the pattern of its earlier calls."""

    expected: Event  # the expected call, from an earlier iteration
    actual: Event  # the latest call
    times: int  # how often the expected call came at this point before


def pattern_break(line: Timeline) -> PatternBreak | None:
    """Return the point at which a rank's latest call breaks its pattern of calls, or None if it does not."""
    if not line.events:
        return None
    latest = line.events[-1]
    sites, at = _with_steps(line.events, latest)
    prediction = expected_next(tuple(sites), at)
    if prediction is None or sites[prediction.at] == sites[at]:
        return None
    expected = next((event for event in reversed(line.events[:-1]) if key_of(event) == sites[prediction.at]), None)
    return None if expected is None else PatternBreak(expected=expected, actual=latest, times=prediction.times)


def last_transfer_of_loop(line: Timeline) -> Event | None:
    """Return the last transfer of a rank that has left its loop for a call that it never made before, or None."""
    before, latest = line.events[:-1], line.events[-1:]
    is_new = bool(latest) and all(event.site != latest[0].site for event in before)
    return (
        next((event for event in reversed(before) if event.is_transfer), None)
        if is_new and len(before) >= MIN_REPEATS
        else None
    )
