"""Align the ranks' collective calls to find the first call at which they diverge, and the ranks at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import combinations, pairwise, takewhile

from nsa_harness.core.collectives.call_history import MIN_REPEATS, diverged_before_history, expected_next
from nsa_harness.core.collectives.call_patterns import compare_with_pattern, key_of
from nsa_harness.core.collectives.repair import Edit, Repair, Site, repairs
from nsa_harness.core.collectives.timeline import (
    UNKNOWN_GROUP,
    Event,
    Field,
    Timeline,
    Token,
    differing_field,
    field_value,
)
from nsa_harness.core.evidence.evidence import ForwardMode, StatusFile

Members = tuple[int, ...]


class DifferenceKind(StrEnum):
    """The way in which the calls of the ranks at fault differ from those of the other ranks."""

    MISSING = "missing"  # the ranks at fault skipped the expected call
    EXTRA = "extra"  # the ranks at fault made an additional call
    ORDER = "order"  # the ranks at fault made the same calls in a different order, or different calls
    COUNT = "count"  # the ranks at fault ran a loop a different number of times
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"
    LATE = "late"  # the ranks have not reached the call yet, and nothing shows that they skipped it


_KIND_OF_FIELD = {Field.SHAPE: DifferenceKind.SHAPE, Field.DTYPE: DifferenceKind.DTYPE, Field.ROOT: DifferenceKind.ROOT}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first point at which the ranks' calls in a process group diverge."""

    kind: DifferenceKind
    group: str
    ranks: Members  # the ranks at fault; every diverging rank if the ranks at fault are unknown
    expected: Event | None = None  # the call of the other ranks at this point
    entered_events: tuple[tuple[int, Event], ...]  # the call of each rank at this point
    absent: Members = ()  # ranks of the group that called nothing at this point
    place_is_certain: bool = False  # no other equally small edit of the calls explains the difference
    culprit_is_certain: bool = False  # earlier iterations of the ranks show which of them are at fault
    is_new_event: bool = False  # the ranks at fault never made this call before
    may_be_swapped: bool = False  # the missing call may still follow, because the next call is the latest recorded one
    diverged_before_history: bool = False  # the ranks already differed before their oldest stored calls
    ranks_with_gaps: Members = ()  # ranks whose flight recorder lacks numbers of the group

    def event(self, rank: int) -> Event | None:
        """Return the call that `rank` made at this difference, or None if it made none there."""
        return self._event_of.get(rank)

    @cached_property
    def _event_of(self) -> dict[int, Event]:
        return dict(self.entered_events)

    @cached_property
    def all_ranks(self) -> Members:
        """All ranks of the process group, sorted."""
        return tuple(sorted([*(rank for rank, _ in self.entered_events), *self.absent]))

    @property
    def is_symmetric(self) -> bool:
        """Whether the ranks at fault cannot be told apart from the others."""
        return len(self.ranks) > 1 and set(self.ranks) >= {rank for rank, _ in self.entered_events}


def differences(
    timelines: Mapping[int, Timeline],
    groups: Mapping[str, Sequence[Members]],
    status_files: Mapping[int, StatusFile],
    are_alternatives: Callable[[Event, Event], bool] = lambda _event, _other: True,
    mismatched: Collection[int] = (),
) -> tuple[Difference, ...]:
    """Return the first differing call in each process group, ordered by time.

    `groups` has the members of each group; see `groups_of`. Differences of kind LATE come last, because other
    differences may explain them. `are_alternatives` tells whether two calls may be alternatives of one condition, so
    that a rank makes only one of them. `mismatched`: ranks that received the data of another collective than their own.
    """
    per_group = [
        _without_unknown_history(difference, members, timelines, status_files)
        for group, parties in groups.items()
        for members in parties
        if (difference := _group_difference(group, members, timelines, status_files, are_alternatives, mismatched))
    ]
    return tuple(
        sorted(
            per_group,
            key=lambda difference: (
                difference.kind is DifferenceKind.LATE,
                min((event.at_s for _, event in difference.entered_events), default=0.0),
                difference.group,
            ),
        )
    )


def difference_of_stacks(timelines: Mapping[int, Timeline]) -> Difference | None:
    """Return how the collectives in the ranks' last stacks differ, or None. It does not say which rank is wrong."""
    events = {rank: event for rank, line in sorted(timelines.items()) for event in line.events[-1:]}
    if any(event.is_transfer for event in events.values()):
        return None
    kind, keys = DifferenceKind.ORDER, {rank: event.site for rank, event in events.items()}
    if len(set(keys.values())) == 1 and _have_different_roots({rank: event.root for rank, event in events.items()}):
        kind, keys = DifferenceKind.ROOT, {rank: (event.root,) for rank, event in events.items()}
    if len(set(keys.values())) < 2:
        return None
    return Difference(kind=kind, group=UNKNOWN_GROUP, ranks=minority(keys), entered_events=tuple(events.items()))


def _have_different_roots(roots: Mapping[int, int | None]) -> bool:
    """Return whether ranks of one group, in the same call, use different root ranks."""
    has_lone_root = 1 in Counter(roots.values()).values()
    return None not in roots.values() and (
        has_lone_root or any(roots.get(root or 0, root) != root for root in roots.values())
    )


def _without_unknown_history(
    difference: Difference, members: Members, timelines: Mapping[int, Timeline], status_files: Mapping[int, StatusFile]
) -> Difference:
    """Mark the properties of a difference that are uncertain because older calls are not stored."""
    diverged = diverged_before_history(
        difference.group, {rank: status_files[rank] for rank in members if rank in status_files}
    )
    ranks_with_gaps = tuple(
        rank for rank in members if rank in timelines and difference.group in timelines[rank].groups_with_gaps
    )
    if not diverged and not ranks_with_gaps:
        return difference
    return replace(
        difference,
        place_is_certain=False,
        may_be_swapped=False,
        diverged_before_history=diverged,
        ranks_with_gaps=ranks_with_gaps,
    )


def minority(keys: Mapping[int, object]) -> Members:
    """Return the ranks whose key is not the most frequent one, or all ranks if there is a tie."""
    top_two = Counter(keys.values()).most_common(2)
    if len(top_two) > 1 and top_two[0][1] == top_two[1][1]:
        return tuple(sorted(keys))
    return tuple(rank for rank in sorted(keys) if keys[rank] != top_two[0][0])


@dataclass(frozen=True, kw_only=True)
class _Track:
    """The calls of one rank in one process group, beginning at a point that all ranks of the group have in common."""

    rank: int
    events: Sequence[Event]
    line: Sequence[Event]  # all events of the rank, in every group
    is_complete: bool  # nothing is missing since the start of the run
    status_file: StatusFile | None

    def before(self, event: Event) -> Sequence[Event]:
        """Return the earlier calls that the rank made from the same line as `event`."""
        earlier = takewhile(lambda earlier_event: earlier_event is not event, self.line)
        return [event_before for event_before in earlier if event_before.site == event.site]


def _group_difference(
    group: str,
    members: Members,
    timelines: Mapping[int, Timeline],
    status_files: Mapping[int, StatusFile],
    are_alternatives: Callable[[Event, Event], bool],
    mismatched: Collection[int],
) -> Difference | None:
    """Return the first difference between the ranks' calls in a process group, or None if there is none."""
    tracks = _tracks(group, [timelines[rank] for rank in members if rank in timelines], status_files)
    if len(tracks) < 2:
        return None
    reference = _reference_track(tracks)
    consecutive = _consecutive_sites(tracks, are_alternatives)
    edits_of = [
        (other, edits)
        for other in tracks
        if other is not reference and (edits := _first_edits(other, reference, consecutive))
    ]
    first = min(edits_of, key=lambda track_edits: track_edits[1][0].right, default=None)
    call_difference = _call_difference(group, tracks, reference, *first) if first else None
    shift = _shift(group, tracks)
    if shift is None:
        return call_difference or _late_difference(group, tracks, mismatched)
    # If both begin at the same event, an added or skipped call explains more than a shift.
    is_preferred = call_difference is not None and (
        call_difference.culprit_is_certain or call_difference.kind in (DifferenceKind.EXTRA, DifferenceKind.COUNT)
    )
    last = first[1][0].right - is_preferred if first else shift[0]
    return shift[1] if shift[0] <= last else call_difference


def _shift(group: str, tracks: Sequence[_Track]) -> tuple[int, Difference] | None:
    """Return the first call at which some ranks are one optimizer step ahead, or None if there is none."""
    if len({bool(track.status_file and track.status_file.steps_s) for track in tracks}) > 1:
        return None
    count = min(len(track.events) for track in tracks)
    pairs = [[track.events[at] for track in tracks] for at in range(count)]
    ahead = [  # by how many steps each rank is ahead of the first rank
        [None if event.step is None or events[0].step is None else event.step - events[0].step for event in events]
        for events in pairs
    ]
    usual = [0 for _ in tracks] if all(track.is_complete for track in tracks) else next(iter(ahead), [])
    since = next((at for at in range(count) if all(steps != usual for steps in ahead[at:])), None)
    if since is None or any(None in steps for steps in ahead[since:]) or None in usual:
        return None
    by_rank = {
        track.rank: (event.step or 0) - (before or 0)
        for track, event, before in zip(tracks, pairs[since], usual, strict=True)
    }
    last = min(by_rank.values())
    expected = next(event for track, event in zip(tracks, pairs[since], strict=True) if by_rank[track.rank] == last)
    return since, Difference(
        kind=DifferenceKind.MISSING,
        group=group,
        ranks=tuple(rank for rank, step in by_rank.items() if step > last),
        expected=expected,
        entered_events=tuple((track.rank, event) for track, event in zip(tracks, pairs[since], strict=True)),
        place_is_certain=True,
    )


def _tracks(group: str, lines: Sequence[Timeline], status_files: Mapping[int, StatusFile]) -> list[_Track]:
    """Return each rank's calls in a process group, all beginning at a common starting point.

    The common start is the start of the run if nothing is missing. Otherwise it is the first number that every flight
    recorder has, or, without numbers, the first step that every rank recorded completely.
    """
    events = {line.rank: line.of_group(group) for line in lines}
    with_number = {
        rank: [event for event in events_of_rank if event.seq is not None] for rank, events_of_rank in events.items()
    }
    if all(line.is_complete and all(event.from_python for event in events[line.rank]) for line in lines):
        since, comparable = 0, {rank: list(events_of_rank) for rank, events_of_rank in events.items()}
    elif all(with_number[rank] or not events_of_rank for rank, events_of_rank in events.items()):
        since = max(
            (events_of_rank[0].seq or 0 for events_of_rank in with_number.values() if events_of_rank), default=0
        )
        comparable = {
            rank: [event for event in events_of_rank if (event.seq or 0) >= since]
            for rank, events_of_rank in with_number.items()
        }
    else:
        from_python = {
            rank: [event for event in events_of_rank if event.from_python] for rank, events_of_rank in events.items()
        }
        since = max(_first_complete_step(line, from_python[line.rank]) for line in lines)
        comparable = {
            rank: [event for event in events_of_rank if (event.step or 0) >= since]
            for rank, events_of_rank in from_python.items()
        }
    return [
        _Track(
            rank=line.rank,
            events=comparable[line.rank],
            line=line.events,
            is_complete=line.is_complete and since <= 1,
            status_file=status_files.get(line.rank),
        )
        for line in lines
    ]


def _first_complete_step(line: Timeline, events: Sequence[Event]) -> int:
    """Return the first optimizer step whose calls are all recorded, or 0 if nothing is missing."""
    return 0 if line.is_complete or not events else (events[0].step or 0) + 1


def _reference_track(tracks: Sequence[_Track]) -> _Track:
    """Return the calls of the rank that agrees with the most other ranks, as a reference for comparison."""
    longest = max(len(track.events) for track in tracks)
    agreeing = list(tracks)
    for at in range(longest):
        keys = {
            track.rank: (track.events[at].site, track.events[at].elements)
            for track in agreeing
            if at < len(track.events)
        }
        counts = Counter(keys.values())
        if len(counts) > 1:
            most = max(counts.values())
            best = next(key for rank, key in sorted(keys.items()) if counts[key] == most)
            agreeing = [track for track in agreeing if keys.get(track.rank) == best]
        if len(agreeing) == 1:
            break
    return max(agreeing, key=lambda track: (len(track.events), -track.rank))


_MAX_SITES = 64  # lines of a group that are compared with each other


def _consecutive_sites(
    tracks: Sequence[_Track], are_alternatives: Callable[[Event, Event], bool]
) -> frozenset[frozenset[Site]]:
    """Return the pairs of lines from which one rank can call the same operation twice in succession."""
    events = {event.site: event for track in tracks for event in track.events if event.from_python}
    pairs = combinations(list(events.values())[:_MAX_SITES], 2)
    return frozenset(
        frozenset((event.site, other.site))
        for event, other in pairs
        if event.op == other.op and not are_alternatives(event, other)
    )


def _first_edits(other: _Track, reference: _Track, consecutive: frozenset[frozenset[Site]]) -> tuple[Repair, ...]:
    """Return the first edits that make the calls of one rank equal to those of the reference rank."""
    return tuple(
        repair
        for repair in repairs(_with_expected_events(other), _with_expected_events(reference), consecutive)
        if repair.left < len(other.events) and repair.right < len(reference.events)
    )


_MAX_PREDICTED = 8  # predicted events that are appended to the recorded ones


def _with_expected_events(track: _Track) -> tuple[Token, ...]:
    """Return the calls of a rank as tokens: the recorded ones, then those predicted by the rank's own pattern."""
    prediction = expected_next(tuple(key_of(event) for event in track.events), len(track.events))
    predicted_events = track.events[prediction.at : prediction.at + _MAX_PREDICTED] if prediction else ()
    return tuple(event.token for event in (*track.events, *predicted_events))


def _call_difference(
    group: str, tracks: Sequence[_Track], reference: _Track, other: _Track, cheapest: Sequence[Repair]
) -> Difference:
    """Return the difference at the first call where one rank deviates from the reference rank."""
    first = cheapest[0]
    actual, expected = other.events[first.left], reference.events[first.right]
    # Up to the first edit, the events of all tracks have the same index.
    events = {track.rank: track.events[first.right] for track in tracks if first.right < len(track.events)}
    absent = tuple(track.rank for track in tracks if track.rank not in events)
    edits = {repair.edit for repair in cheapest}
    place_is_certain = len(edits) == 1 and cheapest[0].confirming_events > 0
    is_confirmed = any(repair.confirming_events for repair in cheapest)
    # Calls below Python have no line. Two of them count as the same call if no later event shows that they differ.
    below_python = not is_confirmed and not actual.from_python and not expected.from_python
    same_phase = _between_steps(other) == _between_steps(reference)
    same_call = actual.site == expected.site or (below_python and same_phase)
    field = differing_field(actual, expected) if same_call else None
    difference = Difference(
        kind=_KIND_OF_FIELD[field] if field and Edit.REPLACE in edits else DifferenceKind.ORDER,
        group=group,
        ranks=(),
        expected=expected,
        entered_events=tuple(sorted(events.items())),
        absent=absent,
        place_is_certain=place_is_certain,
    )
    by_rank = {track.rank: track for track in tracks}
    if difference.kind is not DifferenceKind.ORDER and field is not None:
        return _field_difference(difference, field, by_rank)
    extra = actual if edits == {Edit.DELETE} else expected if edits == {Edit.INSERT} else None
    # Only recorded calls after it show that a call is additional, not those that the pattern predicts.
    has_later_calls = first.left + 1 < len(other.events) and first.right + 1 < len(reference.events)
    is_shown = extra is not None and extra.from_python and place_is_certain and has_later_calls
    return _with_ranks_at_fault(difference, edits, by_rank, extra if is_shown else None)


def _field_difference(difference: Difference, field: Field, tracks: Mapping[int, _Track]) -> Difference:
    """Return the difference with the blame on the ranks that passed an unusual value of the argument `field`.

    A value is unusual if it differs from all earlier values from this line. If this holds for no rank or for all, the
    ranks at fault are those whose value differs from the most frequent one.
    """
    values = {rank: field_value(event, field) for rank, event in difference.entered_events}
    usual = {rank: _usual_value(tracks[rank], event, field) for rank, event in difference.entered_events}
    changed_ranks = tuple(rank for rank, (times, before) in usual.items() if times and before != values[rank])
    fewer_ranks = minority(values)
    if 0 < len(changed_ranks) < len(values):
        is_certain = all(usual[rank][0] >= MIN_REPEATS for rank in changed_ranks)
        return replace(difference, ranks=changed_ranks, culprit_is_certain=is_certain)
    return replace(difference, ranks=fewer_ranks, culprit_is_certain=len(fewer_ranks) < len(values))


def _usual_value(track: _Track, event: Event, field: Field) -> tuple[int, object]:
    """Return the number of times that the rank made this call before, and the value of `field` that it always passed.

    The result is (0, None) if it passed different values or never made the call.
    """
    before = [field_value(earlier, field) for earlier in track.before(event)]
    return (len(before), before[0]) if len(set(before)) == 1 else (0, None)


def _with_ranks_at_fault(
    difference: Difference, edits: set[Edit], tracks: Mapping[int, _Track], extra: Event | None
) -> Difference:
    """Return the difference, but blame the ranks that deviated from their own pattern of calls.

    If the patterns do not show them, these are the ranks at a later point of training, or those that made the call
    `extra`, which the later calls of the other ranks show to be additional, or those in the minority.
    """
    steps = {rank: compare_with_pattern(tracks[rank].line, event) for rank, event in difference.entered_events}
    keepers = tuple(rank for rank, step in steps.items() if step.keeps_pattern)
    leavers = tuple(rank for rank in steps if rank not in keepers)
    again = tuple(rank for rank, event in difference.entered_events if _called_more_often(tracks[rank], event))
    if again and len(again) < len(steps) and not keepers:
        return replace(difference, kind=DifferenceKind.COUNT, ranks=again, expected=difference.event(again[0]))
    if not keepers or not leavers:
        return (
            _later_in_training(difference)
            or _additional_call(difference, extra)
            or replace(difference, ranks=minority({rank: event.site for rank, event in difference.entered_events}))
        )
    expected = next(event for rank, event in difference.entered_events if rank in keepers)
    result = replace(
        difference, ranks=leavers, expected=expected, is_new_event=all(steps[rank].is_new_event for rank in leavers)
    )
    if all(steps[rank].leaves_loop for rank in leavers):
        return replace(result, kind=DifferenceKind.COUNT)
    if result.is_new_event:
        same_point = all(
            (event.step, event.position) == (expected.step, expected.position)
            for rank, event in difference.entered_events
            if rank in leavers
        )
        return result if same_point and expected.from_python else replace(result, kind=DifferenceKind.EXTRA)
    is_trusted = all(steps[rank].is_trusted for rank in leavers)
    if all(steps[rank].skips_event for rank in leavers):
        kind = DifferenceKind.ORDER if Edit.SWAP in edits else DifferenceKind.MISSING
        may_be_swapped = all(_may_be_swapped(tracks[rank], expected) for rank in leavers)
        return replace(
            result,
            kind=kind,
            culprit_is_certain=is_trusted,
            place_is_certain=difference.place_is_certain and not may_be_swapped,
            may_be_swapped=difference.place_is_certain and may_be_swapped,
        )
    return replace(result, culprit_is_certain=is_trusted and len(leavers) < len(keepers))


def _additional_call(difference: Difference, extra: Event | None) -> Difference | None:
    """Return the difference as an extra call by the ranks that made the call `extra`, or None if `extra` is None."""
    callers = tuple(rank for rank, event in difference.entered_events if extra and event.site == extra.site)
    expected = next((event for rank, event in difference.entered_events if rank not in callers), None)
    if not callers or expected is None:
        return None
    return replace(difference, kind=DifferenceKind.EXTRA, ranks=callers, expected=expected)


def _may_be_swapped(track: _Track, skipped: Event) -> bool:
    """Return whether the rank could still make the skipped call after its latest call."""
    latest = track.line[-1]
    following = [after.site for before, after in pairwise(track.line) if before.site == skipped.site]
    return latest.site in following


def _called_more_often(track: _Track, event: Event) -> bool:
    """Return whether the rank made the call more often in this step than in any earlier step."""
    counts = Counter(earlier.step for earlier in track.before(event))
    count = counts.pop(event.step, 0) + 1
    return bool(counts) and event.step is not None and count > max(counts.values())


def _later_in_training(difference: Difference) -> Difference | None:
    """Return the difference, but blame the ranks that are further ahead in training, or None if no rank is ahead."""
    points = {
        rank: (event.step, event.position or 0) for rank, event in difference.entered_events if event.step is not None
    }
    if len(points) < len(difference.entered_events):
        return None
    first = min(points.values())
    later = tuple(rank for rank, point in points.items() if point > first)
    expected = next(event for rank, event in difference.entered_events if points[rank] == first)
    return replace(difference, kind=DifferenceKind.MISSING, ranks=later, expected=expected) if later else None


def _late_difference(group: str, tracks: Sequence[_Track], mismatched: Collection[int]) -> Difference | None:
    """Return the difference at a call that only some ranks have made so far, or None if there is none."""
    count = min(len(track.events) for track in tracks)
    ahead = {track.rank: track for track in tracks if len(track.events) > count}
    events = {rank: track.events[count] for rank, track in ahead.items()}
    waiting_events = [event for rank, event in events.items() if not event.is_done or event is ahead[rank].line[-1]]
    if not waiting_events:
        return None
    absent = [track for track in tracks if track.rank not in ahead]
    expected = waiting_events[0]
    trains = any(_trains(ahead[rank]) for rank, event in events.items() if event is expected)
    waiting = [track.status_file for track in ahead.values() if track.status_file]
    beyond = [track for track in absent if trains == _trains(track) and _has_passed(track, expected, waiting)]
    is_mismatch = not beyond and any(rank in mismatched and not event.is_done for rank, event in events.items())
    if is_mismatch:
        beyond = absent  # They sent the data of another collective, such as one in a backward pass.
    late = Difference(
        kind=DifferenceKind.LATE,
        group=group,
        ranks=tuple(track.rank for track in absent),
        expected=expected,
        entered_events=tuple(sorted(events.items())),
        absent=tuple(track.rank for track in absent),
        # If all are between steps, these ranks may have no step left to do.
        place_is_certain=not all(_between_steps(track) for track in ahead.values()),
    )
    if not beyond:
        return late
    missing = replace(late, kind=DifferenceKind.MISSING, ranks=tuple(track.rank for track in beyond))
    if any(event.site == expected.site for track in absent for event in track.line):
        steps = {rank: compare_with_pattern(ahead[rank].line, event) for rank, event in events.items()}
        again = tuple(rank for rank, step in steps.items() if step.has_expectation and not step.keeps_pattern)
        if again and len(again) <= len(beyond):
            return replace(missing, kind=DifferenceKind.COUNT, ranks=again)
        all_kept = not is_mismatch and all(step.keeps_pattern for step in steps.values())
        return replace(
            missing, culprit_is_certain=all_kept and all(len(track.before(expected)) >= MIN_REPEATS for track in beyond)
        )
    if len(ahead) <= len(beyond) and not any(len(ahead[rank].before(event)) for rank, event in events.items()):
        # The call is new to every rank that made it.
        return replace(
            missing,
            kind=DifferenceKind.EXTRA,
            ranks=tuple(ahead),
            is_new_event=True,
            culprit_is_certain=len(ahead) < len(beyond),
        )
    return missing


def _trains(track: _Track) -> bool:
    """Return whether the rank runs a model."""
    return track.status_file is not None and (
        track.status_file.latest_training_event is not None or bool(track.status_file.steps_s)
    )


def _evaluates(mode: ForwardMode | None, other: ForwardMode | None) -> bool:
    """Return whether a rank in mode `mode` evaluates a model while a rank in mode `other` trains it."""
    if mode is None or other is None:
        return False
    return mode.training < other.training or mode.gradients < other.gradients


def _between_steps(track: _Track) -> bool:
    return (
        track.status_file is not None
        and track.status_file.latest_training_event is not None
        and track.status_file.latest_training_event.kind == "step"
    )


def _has_passed(track: _Track, event: Event, waiting: Sequence[StatusFile]) -> bool:
    """Return whether the rank is past the point in training at which the ranks of `waiting` made a call."""
    status_file = track.status_file
    if status_file is None or event.step is None or event.position is None:
        return False
    if status_file.step != event.step:
        return status_file.step > event.step
    if any(_evaluates(status_file.mode, other.mode) for other in waiting):
        return False  # an evaluation is not part of the training
    usual_positions = [
        earlier.position or 0
        for earlier in track.line
        if earlier.site == event.site and (earlier.step or 0) < event.step
    ]
    return status_file.position > max(usual_positions, default=event.position)
