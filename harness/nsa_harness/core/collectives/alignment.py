"""Align the collective calls of a group's ranks: find the first call where they diverge, and the rank at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise, takewhile

from nsa_harness.core.collectives.call_history import (
    MIN_REPEATS,
    comes_later,
    diverged_before_history,
    expected_next,
    leaves_a_loop,
)
from nsa_harness.core.collectives.repair import Edit, Repair, repairs
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
    """How a rank's collective calls differ from those of the other ranks.

    If one rank makes a call too few, the other ranks seem to make a call too many. MISSING and EXTRA therefore describe
    the calls of the ranks at fault.
    """

    MISSING = "missing"  # these ranks skipped the expected call
    EXTRA = "extra"  # these ranks made a call that was not expected
    ORDER = "order"  # these ranks made the same calls in another order, or other calls instead
    COUNT = "count"  # these ranks made another number of iterations of a loop
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"
    LATE = "late"  # these ranks have not reached the call yet, and nothing shows that they skipped it


_KIND_OF_FIELD = {Field.SHAPE: DifferenceKind.SHAPE, Field.DTYPE: DifferenceKind.DTYPE, Field.ROOT: DifferenceKind.ROOT}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first point at which the ranks of a group make different collective calls, and the ranks at fault."""

    kind: DifferenceKind
    group: str
    ranks: Members  # the ranks at fault; every diverging rank if that is unknown
    expected: Event | None  # the other ranks' event at this point
    entered_events: tuple[tuple[int, Event], ...]  # (rank, its event at this point)
    absent: Members  # members that entered nothing there
    place_is_certain: bool  # the place is certain: no other smallest repair explains the difference
    culprit_is_certain: bool  # the ranks at fault are certain: their own earlier iterations show it
    is_new_event: bool  # the ranks at fault never entered this event before
    may_be_swapped: bool = False  # they may still make the missing call, since nothing is recorded after the next call
    diverged_before_history: bool = False  # they already differed before the oldest calls in the history
    ranks_with_gaps: Members = ()  # ranks whose recorder lacks numbers of the group

    def event(self, rank: int) -> Event | None:
        return dict(self.entered_events).get(rank)

    @property
    def all_ranks(self) -> Members:
        return tuple(sorted([*(rank for rank, _ in self.entered_events), *self.absent]))

    @property
    def is_symmetric(self) -> bool:
        return len(self.ranks) > 1 and set(self.ranks) >= {rank for rank, _ in self.entered_events}


def differences(
    timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]], status_files: Mapping[int, StatusFile]
) -> tuple[Difference, ...]:
    """Return the first difference between the ranks in each process group, at most one per list of members in `groups`.

    Differences of kind LATE come last, because another difference usually explains why a rank is late.
    """
    per_group = [
        _without_unknown_history(difference, members, timelines, status_files)
        for group, parties in groups.items()
        for members in parties
        if (difference := _group_difference(group, members, timelines, status_files))
    ]
    return tuple(
        sorted(
            per_group,
            key=lambda difference: (difference.kind is DifferenceKind.LATE, _since_s(difference), difference.group),
        )
    )


def difference_of_stacks(timelines: Mapping[int, Timeline]) -> Difference | None:
    """Return how ranks that are known only by their stacks differ: in the collective call, or in its root rank.

    Return None if all stacks show the same call, or if one shows a send or receive. A stack does not show which of the
    calls was expected, so the ranks in the minority are named.
    """
    entered = {rank: event for rank, line in sorted(timelines.items()) for event in line.events[-1:]}
    if any(event.is_transfer for event in entered.values()):
        return None
    kind, keys = DifferenceKind.ORDER, {rank: event.site for rank, event in entered.items()}
    if len(set(keys.values())) == 1 and _different_roots({rank: event.root for rank, event in entered.items()}):
        kind, keys = DifferenceKind.ROOT, {rank: (event.root,) for rank, event in entered.items()}
    if len(set(keys.values())) < 2:
        return None
    return Difference(
        kind=kind,
        group=UNKNOWN_GROUP,
        ranks=minority(keys),
        expected=None,
        entered_events=tuple(entered.items()),
        absent=(),
        place_is_certain=False,
        culprit_is_certain=False,
        is_new_event=False,
    )


def _different_roots(roots: Mapping[int, int | None]) -> bool:
    """Whether the calls name different root ranks in a way that must be an error. False if a root is unknown.

    It is no error if each root is named by itself and by at least one more rank: there may then be one group per root.
    """
    alone = 1 in Counter(roots.values()).values()
    return None not in roots.values() and (alone or any(roots.get(root or 0, root) != root for root in roots.values()))


def _without_unknown_history(
    difference: Difference, members: Members, timelines: Mapping[int, Timeline], status_files: Mapping[int, StatusFile]
) -> Difference:
    """Return the difference without claims that are uncertain because earlier calls are not recorded or differed.

    In these cases `place_is_certain` and `may_be_swapped` are set to False.
    """
    diverged = diverged_before_history(
        difference.group, {rank: status_files[rank] for rank in members if rank in status_files}
    )
    lost = tuple(rank for rank in members if rank in timelines and difference.group in timelines[rank].groups_with_gaps)
    if not diverged and not lost:
        return difference
    return replace(
        difference, place_is_certain=False, may_be_swapped=False, diverged_before_history=diverged, ranks_with_gaps=lost
    )


def groups_of(
    timelines: Mapping[int, Timeline],
    status_files: Mapping[int, StatusFile],
    stated: Mapping[str, Members] | None = None,
) -> dict[str, tuple[Members, ...]]:
    """Return the members of each process group in which some rank entered a collective, by the name of the group.

    The members come from the status files, or else from `stated`. If neither has them, the default group has all ranks,
    and another group has the ranks that entered it. If ranks use one name for different groups, several lists of
    members are returned for this name.
    """
    members_of: dict[str, tuple[Members, ...]] = {}
    for group in sorted({event.group for line in timelines.values() for event in line.events}):
        declared = {
            members
            for rank, status_file in status_files.items()
            if rank in (members := tuple(sorted(status_file.groups.get(group, ()))))
        }
        entered = tuple(rank for rank, line in sorted(timelines.items()) if line.of_group(group))
        declared = declared or {members for members in [tuple((stated or {}).get(group, ()))] if members}
        members_of[group] = tuple(sorted(declared)) or ((tuple(sorted(timelines)) if group in _DEFAULT else entered),)
    return members_of


_DEFAULT = ("", "0")


def minority(keys: Mapping[int, object]) -> Members:
    """Return the ranks whose value in `keys` is not the most frequent one.

    If two values are the most frequent ones, all ranks are returned.
    """
    ranked = Counter(keys.values()).most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        return tuple(sorted(keys))
    return tuple(rank for rank in sorted(keys) if keys[rank] != ranked[0][0])


def _since_s(difference: Difference) -> float:
    return min((event.at_s for _, event in difference.entered_events), default=0.0)


@dataclass(frozen=True, kw_only=True)
class _Track:
    """The events of one rank in one group, beginning at a point from which all ranks of the group can be compared."""

    rank: int
    events: Sequence[Event]
    line: Sequence[Event]  # events of every group
    is_complete: bool  # complete since the start of the run
    status_file: StatusFile | None

    def before(self, event: Event) -> Sequence[Event]:
        """Return the rank's earlier events that came from the same call in the program as `event`."""
        earlier = takewhile(lambda earlier_event: earlier_event is not event, self.line)
        return [event_before for event_before in earlier if event_before.site == event.site]


def _group_difference(
    group: str, members: Members, timelines: Mapping[int, Timeline], status_files: Mapping[int, StatusFile]
) -> Difference | None:
    tracks = _tracks(group, [timelines[rank] for rank in members if rank in timelines], status_files)
    if len(tracks) < 2:
        return None
    reference = _reference_track(tracks)
    edits_of = [
        (other, edits) for other in tracks if other is not reference and (edits := _first_edits(other, reference))
    ]
    first = min(edits_of, key=lambda track_edits: track_edits[1][0].right, default=None)
    diverged = _call_difference(group, tracks, reference, *first) if first else None
    shift = _shift(group, tracks)
    if shift is None:
        return diverged or _late_difference(group, tracks)
    # Both begin where calls of different steps pair: an added or skipped call of a rank explains more than a shift.
    added = diverged is not None and (
        diverged.culprit_is_certain or diverged.kind in (DifferenceKind.EXTRA, DifferenceKind.COUNT)
    )
    last = first[1][0].right - added if first else shift[0]
    return shift[1] if shift[0] <= last else diverged


def _shift(group: str, tracks: Sequence[_Track]) -> tuple[int, Difference] | None:
    """Return where ranks begin to pair calls of different training steps: (index of the event, difference), or None.

    The ranks in a later step than the others are at fault. Their sequences of calls may be the same as those of the
    other ranks. None is also returned if only some ranks have an optimizer, because their steps cannot be compared.
    """
    if len({bool(track.status_file and track.status_file.steps_s) for track in tracks}) > 1:
        return None
    shared = min(len(track.events) for track in tracks)
    pairs = [[track.events[at] for track in tracks] for at in range(shared)]
    ahead = [
        [None if event.step is None or events[0].step is None else event.step - events[0].step for event in events]
        for events in pairs
    ]
    usual = [0 for _ in tracks] if all(track.is_complete for track in tracks) else next(iter(ahead), [])
    since = next((at for at in range(shared) if all(steps != usual for steps in ahead[at:])), None)
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
        absent=(),
        place_is_certain=True,
        culprit_is_certain=False,
        is_new_event=False,
    )


def _tracks(group: str, lines: Sequence[Timeline], status_files: Mapping[int, StatusFile]) -> list[_Track]:
    """Return each rank's events in `group`, from a point on that all ranks have in common.

    This point is the start of the run if all calls are recorded, else the first call number that every flight recorder
    still has, else the first training step that every rank has recorded completely.
    """
    events = {line.rank: line.of_group(group) for line in lines}
    numbered = {
        rank: [event for event in events_of_rank if event.seq is not None] for rank, events_of_rank in events.items()
    }
    if all(line.is_complete and all(event.from_python for event in events[line.rank]) for line in lines):
        since, compared = 0, {rank: list(events_of_rank) for rank, events_of_rank in events.items()}
    elif all(numbered[rank] or not events_of_rank for rank, events_of_rank in events.items()):
        since = max((events_of_rank[0].seq or 0 for events_of_rank in numbered.values() if events_of_rank), default=0)
        compared = {
            rank: [event for event in events_of_rank if (event.seq or 0) >= since]
            for rank, events_of_rank in numbered.items()
        }
    else:
        called = {
            rank: [event for event in events_of_rank if event.from_python] for rank, events_of_rank in events.items()
        }
        since = max(_first_whole_step(line, called[line.rank]) for line in lines)
        compared = {
            rank: [event for event in events_of_rank if (event.step or 0) >= since]
            for rank, events_of_rank in called.items()
        }
    return [
        _Track(
            rank=line.rank,
            events=compared[line.rank],
            line=line.events,
            is_complete=line.is_complete and since <= 1,
            status_file=status_files.get(line.rank),
        )
        for line in lines
    ]


def _first_whole_step(line: Timeline, called: Sequence[Event]) -> int:
    return 0 if line.is_complete or not called else (called[0].step or 0) + 1


def _reference_track(tracks: Sequence[_Track]) -> _Track:
    """Return the track that the other tracks are compared with.

    At each point where ranks diverge, it is one of the majority. If several tracks remain, the longest is returned.
    """
    longest = max(len(track.events) for track in tracks)
    agreeing = list(tracks)
    for at in range(longest):
        here = {
            track.rank: (track.events[at].site, track.events[at].elements)
            for track in agreeing
            if at < len(track.events)
        }
        counts = Counter(here.values())
        if len(counts) > 1:
            most = max(counts.values())
            best = next(key for rank, key in sorted(here.items()) if counts[key] == most)
            agreeing = [track for track in agreeing if here.get(track.rank) == best]
        if len(agreeing) == 1:
            break
    return max(agreeing, key=lambda track: (len(track.events), -track.rank))


def _first_edits(other: _Track, reference: _Track) -> tuple[Repair, ...]:
    """Return the first edits that turn the events of `other` into those of `reference`, or () if they agree.

    Before the comparison, the next events that each rank's own pattern predicts are appended to both sequences. Then
    there are later events that can confirm an edit near the end. Edits of the appended events are not returned.
    """
    return tuple(
        repair
        for repair in repairs(_with_expected_events(other), _with_expected_events(reference))
        if repair.left < len(other.events) and repair.right < len(reference.events)
    )


_FORESEEN = 8  # expected events that are appended to a track


def _with_expected_events(track: _Track) -> tuple[Token, ...]:
    """Return the tokens of the rank's events, followed by the events that its pattern predicts next."""
    predicted = expected_next(tuple(_key(event) for event in track.events), len(track.events))
    events = [*track.events, *(track.events[predicted.at : predicted.at + _FORESEEN] if predicted else ())]
    return tuple(event.token for event in events)


def _key(event: Event) -> tuple[object, ...]:
    return (*event.site, event.elements) if event.needs_equal_sizes else event.site


def _call_difference(
    group: str, tracks: Sequence[_Track], reference: _Track, other: _Track, cheapest: Sequence[Repair]
) -> Difference:
    """Return the difference between two ranks at their first edit, with the ranks at fault.

    `cheapest` has the first edits that turn the events of `other` into those of `reference` at the same cost. The kind
    is SHAPE, DTYPE or ROOT if the calls are the same and one of these fields differs; otherwise it is derived from the
    earlier iterations of the ranks.
    """
    first = cheapest[0]
    theirs, expected = other.events[first.left], reference.events[first.right]
    # Before the first edit, events of all tracks have the same index.
    entered = {track.rank: track.events[first.right] for track in tracks if first.right < len(track.events)}
    absent = tuple(track.rank for track in tracks if track.rank not in entered)
    edits = {repair.edit for repair in cheapest}
    where = len(edits) == 1 and cheapest[0].confirming_events > 0
    unconfirmed = not any(repair.confirming_events for repair in cheapest)
    # Below Python a call has no line. Two such calls count as the same call if nothing later tells them apart.
    below_python = unconfirmed and not theirs.from_python and not expected.from_python
    same_phase = _between_steps(other) == _between_steps(reference)
    same_call = theirs.site == expected.site or (below_python and same_phase)
    field = differing_field(theirs, expected) if same_call else None
    difference = Difference(
        kind=_KIND_OF_FIELD[field] if field and Edit.REPLACE in edits else DifferenceKind.ORDER,
        group=group,
        ranks=(),
        expected=expected,
        entered_events=tuple(sorted(entered.items())),
        absent=absent,
        place_is_certain=where,
        culprit_is_certain=False,
        is_new_event=False,
    )
    by_rank = {track.rank: track for track in tracks}
    if difference.kind is not DifferenceKind.ORDER and field is not None:
        return _field_difference(difference, field, by_rank)
    return _with_ranks_at_fault(difference, edits, by_rank)


def _field_difference(difference: Difference, field: Field, tracks: Mapping[int, _Track]) -> Difference:
    """Return the difference with the ranks at fault for a wrong shape, dtype or root.

    These are the ranks whose value of `field` differs from all their earlier calls. If this is true for none or all of
    the ranks, they are the ranks in the minority.
    """
    values = {rank: field_value(event, field) for rank, event in difference.entered_events}
    usual = {rank: _usual_value(tracks[rank], event, field) for rank, event in difference.entered_events}
    changed = tuple(rank for rank, (times, before) in usual.items() if times and before != values[rank])
    fewer = minority(values)
    if 0 < len(changed) < len(values):
        return replace(
            difference, ranks=changed, culprit_is_certain=all(usual[rank][0] >= MIN_REPEATS for rank in changed)
        )
    return replace(difference, ranks=fewer, culprit_is_certain=len(fewer) < len(values))


def _usual_value(track: _Track, event: Event, field: Field) -> tuple[int, object]:
    """Return (number of earlier calls, value of `field`) for the rank's earlier calls from the same place as `event`.

    Return (0, None) if there are no earlier calls or if their values differ.
    """
    before = [field_value(earlier, field) for earlier in track.before(event)]
    return (len(before), before[0]) if len(set(before)) == 1 else (0, None)


@dataclass(frozen=True, kw_only=True)
class _PatternStep:
    """The result of comparing an event of a rank with the rank's own earlier iterations."""

    has_expectation: bool  # the pattern expects some event here
    keeps_pattern: bool  # the event is the expected one
    skips_event: bool  # in the previous iteration the event came later
    is_new_event: bool  # the rank never entered the event before
    leaves_loop: bool  # the rank leaves a loop as it did before, earlier than expected
    is_trusted: bool  # the pattern was repeated often enough


def _compare_with_pattern(line: Sequence[Event], event: Event) -> _PatternStep:
    sites, at = _with_steps(line, event)
    predicted = expected_next(tuple(sites), at)
    keeps = predicted is not None and sites[predicted.at] == sites[at]
    return _PatternStep(
        has_expectation=predicted is not None,
        keeps_pattern=keeps,
        skips_event=predicted is not None and not keeps and comes_later(sites, predicted, at, sites[at]),
        is_new_event=sites[at] not in sites[:at],
        leaves_loop=not keeps and leaves_a_loop(sites, at),
        is_trusted=predicted is not None and predicted.is_trusted,
    )


def _with_steps(line: Sequence[Event], event: Event) -> tuple[list[Hashable], int]:
    """Return (keys, index): one key per event up to `event`, and the index of `event` among them.

    A marker is inserted before the first event of each training step.
    """
    sites: list[Hashable] = []
    step = None
    for entered in line[: index_of(line, event) + 1]:
        if entered.step is not None and entered.step != step:
            sites.append("a step begins")
            step = entered.step
        sites.append(_key(entered))
    return sites, len(sites) - 1


def index_of(line: Sequence[Event], event: Event) -> int:
    return next(at for at, candidate in enumerate(line) if candidate is event)


def _with_ranks_at_fault(difference: Difference, edits: set[Edit], tracks: Mapping[int, _Track]) -> Difference:
    """Return the difference with its final kind and ranks.

    The ranks at fault are those whose call differs from their own earlier iterations. If this is true for none or all
    of the ranks, they are the ranks that are later in training, or else those in the minority.
    """
    steps = {rank: _compare_with_pattern(tracks[rank].line, event) for rank, event in difference.entered_events}
    keepers = tuple(rank for rank, step in steps.items() if step.keeps_pattern)
    leavers = tuple(rank for rank in steps if rank not in keepers)
    again = tuple(rank for rank, event in difference.entered_events if _called_more_often(tracks[rank], event))
    if again and len(again) < len(steps) and not keepers:
        return replace(difference, kind=DifferenceKind.COUNT, ranks=again, expected=difference.event(again[0]))
    if not keepers or not leavers:
        return _later_in_training(difference) or replace(
            difference, ranks=minority({rank: event.site for rank, event in difference.entered_events})
        )
    kept_event = next(event for rank, event in difference.entered_events if rank in keepers)
    result = replace(
        difference, ranks=leavers, expected=kept_event, is_new_event=all(steps[rank].is_new_event for rank in leavers)
    )
    if all(steps[rank].leaves_loop for rank in leavers):
        return replace(result, kind=DifferenceKind.COUNT)
    if result.is_new_event:
        same = all(
            (made.step, made.position) == (kept_event.step, kept_event.position)
            for rank, made in difference.entered_events
            if rank in leavers
        )
        return result if same and kept_event.from_python else replace(result, kind=DifferenceKind.EXTRA)
    sure = all(steps[rank].is_trusted for rank in leavers)
    if all(steps[rank].skips_event for rank in leavers):
        kind = DifferenceKind.ORDER if Edit.SWAP in edits else DifferenceKind.MISSING
        swapped = all(_may_be_swapped(tracks[rank], kept_event) for rank in leavers)
        return replace(
            result,
            kind=kind,
            culprit_is_certain=sure,
            place_is_certain=difference.place_is_certain and not swapped,
            may_be_swapped=difference.place_is_certain and swapped,
        )
    return replace(result, culprit_is_certain=sure and len(leavers) < len(keepers))


def _may_be_swapped(track: _Track, left_out: Event) -> bool:
    """Whether the rank may only have swapped two calls and may still make the call `left_out`.

    This is possible if its latest event directly followed `left_out` in an earlier iteration.
    """
    latest = track.line[-1]
    behind = [after.site for before, after in pairwise(track.line) if before.site == left_out.site]
    return latest.site in behind


def _called_more_often(track: _Track, event: Event) -> bool:
    """Whether the rank has made this call more often in the current training step than in any earlier step."""
    counts = Counter(earlier.step for earlier in track.before(event))
    now = counts.pop(event.step, 0) + 1
    return bool(counts) and event.step is not None and now > max(counts.values())


def _later_in_training(difference: Difference) -> Difference | None:
    """Return the difference with kind MISSING and the ranks that made their call at a later point of training.

    Return None if all ranks are at the same point, or if the step of some rank is unknown.
    """
    points = {
        rank: (event.step, event.position or 0) for rank, event in difference.entered_events if event.step is not None
    }
    if len(points) < len(difference.entered_events):
        return None
    first = min(points.values())
    later = tuple(rank for rank, point in points.items() if point > first)
    expected = next(event for rank, event in difference.entered_events if points[rank] == first)
    return replace(difference, kind=DifferenceKind.MISSING, ranks=later, expected=expected) if later else None


def _late_difference(group: str, tracks: Sequence[_Track]) -> Difference | None:
    """Return the difference between ranks whose calls agree so far, if some of them have not reached the next call.

    Its kind is LATE, unless the recorded progress shows that an absent rank has passed the point of the call. Then it
    is MISSING, EXTRA or COUNT. Return None if no rank waits in a call that others have not reached.
    """
    reached = min(len(track.events) for track in tracks)
    entered = {track.rank: track for track in tracks if len(track.events) > reached}
    events = {rank: track.events[reached] for rank, track in entered.items()}
    waited = [event for rank, event in events.items() if not event.is_done or event is entered[rank].line[-1]]
    if not waited:
        return None
    absent = [track for track in tracks if track.rank not in entered]
    expected = waited[0]
    trains = any(_trains(entered[rank]) for rank, event in events.items() if event is expected)
    waiting = [track.status_file for track in entered.values() if track.status_file]
    passed = [track for track in absent if trains == _trains(track) and _has_passed(track, expected, waiting)]
    late = Difference(
        kind=DifferenceKind.LATE,
        group=group,
        ranks=tuple(track.rank for track in absent),
        expected=expected,
        entered_events=tuple(sorted(events.items())),
        absent=tuple(track.rank for track in absent),
        place_is_certain=not all(
            _between_steps(track) for track in entered.values()
        ),  # else these may have no step left to do
        culprit_is_certain=False,
        is_new_event=False,
    )
    if not passed:
        return late
    missing = replace(late, kind=DifferenceKind.MISSING, ranks=tuple(track.rank for track in passed))
    if any(event.site == expected.site for track in absent for event in track.line):
        steps = {rank: _compare_with_pattern(entered[rank].line, event) for rank, event in events.items()}
        again = tuple(rank for rank, step in steps.items() if step.has_expectation and not step.keeps_pattern)
        if again and len(again) <= len(passed):
            return replace(missing, kind=DifferenceKind.COUNT, ranks=again)
        all_kept = all(step.keeps_pattern for step in steps.values())
        return replace(
            missing, culprit_is_certain=all_kept and all(len(track.before(expected)) >= MIN_REPEATS for track in passed)
        )
    if len(entered) <= len(passed) and not any(len(entered[rank].before(event)) for rank, event in events.items()):
        # No rank ever made this call before.
        return replace(
            missing,
            kind=DifferenceKind.EXTRA,
            ranks=tuple(entered),
            is_new_event=True,
            culprit_is_certain=len(entered) < len(passed),
        )
    return missing


def _trains(track: _Track) -> bool:
    """Whether the rank has recorded training events or finished optimizer steps."""
    return track.status_file is not None and (
        track.status_file.latest_training_event is not None or bool(track.status_file.steps_s)
    )


def _evaluates(mode: ForwardMode | None, other: ForwardMode | None) -> bool:
    """Whether the rank with `mode` evaluates its model or disabled gradients while the rank with `other` trains.

    False if one of the modes is unknown.
    """
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
    """Whether the rank has passed the point of training at which the other ranks made the call `event`.

    `waiting` are the status files of the ranks that made it. False if the point is unknown or the rank runs an
    evaluation.
    """
    status_file = track.status_file
    if status_file is None or event.step is None or event.position is None:
        return False
    if status_file.step != event.step:
        return status_file.step > event.step
    if any(_evaluates(status_file.mode, other.mode) for other in waiting):
        return False  # an evaluation is no part of the training
    usual = [
        earlier.position or 0
        for earlier in track.line
        if earlier.site == event.site and (earlier.step or 0) < event.step
    ]
    return status_file.position > max(usual, default=event.position)


# A cycle of waits over several groups.


@dataclass(frozen=True, kw_only=True)
class Link:
    """One wait in a cycle of waits: `rank` is in the collective `event`, which rank `waits_for` has not entered."""

    rank: int
    event: Event
    waits_for: int
    never_entered: bool  # `waits_for` never entered any collective of the group


def cycle(timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]]) -> tuple[Link, ...]:
    """Return the first cycle of ranks in which each rank is inside a collective that the next rank has not entered.

    The result is empty if there is no cycle. A cycle always involves several process groups, because within one group
    the ranks enter the collectives in the same order.
    """
    links = {rank: _links(line, groups, timelines) for rank, line in sorted(timelines.items())}
    return next((ring for start in links if (ring := _shortest_cycle(start, links))), ())


def broke_pattern(line: Timeline, event: Event) -> bool:
    """Whether the rank's earlier iterations had another call in place of `event`.

    This counts only if `event` came later in these iterations, or after the loop.
    """
    step = _compare_with_pattern(line.events, event)
    return not step.keeps_pattern and (step.skips_event or step.leaves_loop)


@dataclass(frozen=True, kw_only=True)
class PatternBreak:
    """A rank's latest call, together with the call that its earlier iterations made at this point instead."""

    expected: Event  # the expected event, as it was in an earlier iteration
    actual: Event  # the latest event
    times: int  # how often the expected event came at this point before


def pattern_break(line: Timeline) -> PatternBreak | None:
    """Return the rank's latest call and the expected one if they differ.

    Return None if they agree or if no call can be predicted.
    """
    if not line.events:
        return None
    latest = line.events[-1]
    sites, at = _with_steps(line.events, latest)
    predicted = expected_next(tuple(sites), at)
    if predicted is None or sites[predicted.at] == sites[at]:
        return None
    usual = next((event for event in reversed(line.events[:-1]) if _key(event) == sites[predicted.at]), None)
    return None if usual is None else PatternBreak(expected=usual, actual=latest, times=predicted.times)


def last_transfer_of_loop(line: Timeline) -> Event | None:
    """Return the last send or receive that a rank made before it left its loop, or None.

    A rank has left its loop if it never made its latest call before. None is returned if this is not the case, if the
    rank made no send or receive, or if it made too few calls.
    """
    before, latest = line.events[:-1], line.events[-1:]
    new = bool(latest) and all(event.site != latest[0].site for event in before)
    return (
        next((event for event in reversed(before) if event.is_transfer), None)
        if new and len(before) >= MIN_REPEATS
        else None
    )


def _links(
    line: Timeline, groups: Mapping[str, Sequence[Members]], timelines: Mapping[int, Timeline]
) -> tuple[Link, ...]:
    """Return one link to each rank that has not entered a collective in which this rank still waits.

    Only the oldest such collective counts. The result is empty if this rank waits in none.
    """
    for event in line.events:
        members = next((parties for parties in groups.get(event.group, ()) if line.rank in parties), ())
        absent = [] if event.is_done or event.seq is None else list(_missing_members(event, members, timelines))
        if absent:
            return tuple(
                Link(rank=line.rank, event=event, waits_for=rank, never_entered=latest == 0) for rank, latest in absent
            )
    return ()


def _missing_members(event: Event, members: Members, timelines: Mapping[int, Timeline]) -> Iterator[tuple[int, int]]:
    """Yield (rank, number of its latest collective in the group) for each member that has not entered `event`.

    Ranks without any recorded events are skipped.
    """
    for rank in members:
        if rank in timelines and timelines[rank].events:
            latest = max((other.seq or 0 for other in timelines[rank].of_group(event.group)), default=0)
            if latest < (event.seq or 0):
                yield rank, latest


def _shortest_cycle(start: int, links: Mapping[int, Sequence[Link]]) -> tuple[Link, ...]:
    """Return the shortest cycle of waits that begins and ends at rank `start`, or () if there is none."""
    paths: list[tuple[Link, ...]] = [(link,) for link in links[start]]
    seen: set[int] = set()
    while paths:
        path = paths.pop(0)
        at = path[-1].waits_for
        if at == start:
            return path
        if at not in seen:
            seen.add(at)
            paths += [(*path, link) for link in links.get(at, ())]
    return ()
