"""Align the ranks of a group: the first call where they diverge, which rank broke its pattern, and how sure that is."""

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
from nsa_harness.core.collectives.timeline import UNTOLD_GROUP, Event, Field, Timeline, Token, field_apart, value
from nsa_harness.core.evidence.evidence import Mode, StatusFile

Members = tuple[int, ...]


class DifferenceKind(StrEnum):
    """The kind of a difference. MISSING and EXTRA name the rank that broke its pattern: an insert is also a delete."""

    MISSING = "missing"  # these ranks skipped the expected call
    EXTRA = "extra"  # these ranks made a call that was not expected
    ORDER = "order"  # they make the same calls in another order, or other calls instead
    COUNT = "count"  # another number of iterations of a loop
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"
    LATE = "late"  # these ranks have not reached it, and nothing shows that they passed it


_OF_FIELD = {Field.SHAPE: DifferenceKind.SHAPE, Field.DTYPE: DifferenceKind.DTYPE, Field.ROOT: DifferenceKind.ROOT}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first event of a group at which its members diverge."""

    kind: DifferenceKind
    group: str
    ranks: Members  # the ranks at fault; every diverging rank if that is unknown
    expected: Event | None  # what the other ranks did there
    entered: tuple[tuple[int, Event], ...]  # what each member entered there, by rank
    absent: Members  # members that entered nothing there
    where: bool  # no other smallest repair explains it
    who: bool  # their own earlier iterations show which ranks are at fault
    new: bool  # these ranks never entered this event before
    or_swapped: bool = False  # they may still make the missing call: nothing is recorded after the next one
    diverged_before_history: bool = False  # they already differed before the oldest calls in the history
    lost: Members = ()  # ranks whose recorder lacks numbers of the group

    def event(self, rank: int) -> Event | None:
        return dict(self.entered).get(rank)

    @property
    def everyone(self) -> Members:
        return tuple(sorted([*(rank for rank, _ in self.entered), *self.absent]))

    @property
    def symmetric(self) -> bool:
        return len(self.ranks) > 1 and set(self.ranks) >= {rank for rank, _ in self.entered}


def differences(
    timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]], boards: Mapping[int, StatusFile]
) -> tuple[Difference, ...]:
    """Return at most one difference per group. Ranks that are only late come last, since others explain them."""
    found = [
        _without_unknown_history(one, members, timelines, boards)
        for group, parties in groups.items()
        for members in parties
        if (one := _group_difference(group, members, timelines, boards))
    ]
    return tuple(sorted(found, key=lambda one: (one.kind is DifferenceKind.LATE, _since_s(one), one.group)))


def difference_of_stacks(timelines: Mapping[int, Timeline]) -> Difference | None:
    """Return the difference of ranks without a record that are in different calls, or name different roots.

    Transfers do not count. A stack does not show which of the calls was not expected.
    """
    entered = {rank: event for rank, line in sorted(timelines.items()) for event in line.events[-1:]}
    if any(event.transfer for event in entered.values()):
        return None
    kind, keys = DifferenceKind.ORDER, {rank: event.site for rank, event in entered.items()}
    if len(set(keys.values())) == 1 and _different_roots({rank: event.root for rank, event in entered.items()}):
        kind, keys = DifferenceKind.ROOT, {rank: (event.root,) for rank, event in entered.items()}
    if len(set(keys.values())) < 2:
        return None
    return Difference(
        kind=kind,
        group=UNTOLD_GROUP,
        ranks=minority(keys),
        expected=None,
        entered=tuple(entered.items()),
        absent=(),
        where=False,
        who=False,
        new=False,
    )


def _different_roots(roots: Mapping[int, int | None]) -> bool:
    """Return the rooted calls with different roots, if they cannot belong to several groups with one root each."""
    alone = 1 in Counter(roots.values()).values()
    return None not in roots.values() and (alone or any(roots.get(root or 0, root) != root for root in roots.values()))


def _without_unknown_history(
    found: Difference, members: Members, timelines: Mapping[int, Timeline], boards: Mapping[int, StatusFile]
) -> Difference:
    """Return the difference without a claim that older, unrecorded calls could contradict."""
    diverged = diverged_before_history(found.group, {rank: boards[rank] for rank in members if rank in boards})
    lost = tuple(rank for rank in members if rank in timelines and found.group in timelines[rank].lost)
    if not diverged and not lost:
        return found
    return replace(found, where=False, or_swapped=False, diverged_before_history=diverged, lost=lost)


def groups_of(
    timelines: Mapping[int, Timeline], boards: Mapping[int, StatusFile], told: Mapping[str, Members] | None = None
) -> dict[str, tuple[Members, ...]]:
    """Return every group with its members: from status files, else the ranks that entered it.

    The default group has all ranks. `told` are members from another source. A name that means two groups on different
    ranks gives two groups.
    """
    found: dict[str, tuple[Members, ...]] = {}
    for group in sorted({event.group for line in timelines.values() for event in line.events}):
        declared = {
            members for rank, board in boards.items() if rank in (members := tuple(sorted(board.groups.get(group, ()))))
        }
        entered = tuple(rank for rank, line in sorted(timelines.items()) if line.of_group(group))
        declared = declared or {one for one in [tuple((told or {}).get(group, ()))] if one}
        found[group] = tuple(sorted(declared)) or ((tuple(sorted(timelines)) if group in _DEFAULT else entered),)
    return found


_DEFAULT = ("", "0")


def minority(keys: Mapping[int, object]) -> Members:
    """Return the ranks whose key differs from the most frequent one; all ranks if no key is the most frequent."""
    ranked = Counter(keys.values()).most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        return tuple(sorted(keys))
    return tuple(rank for rank in sorted(keys) if keys[rank] != ranked[0][0])


def _since_s(found: Difference) -> float:
    return min((event.at_s for _, event in found.entered), default=0.0)


@dataclass(frozen=True, kw_only=True)
class _Track:
    """The events of one rank in one group, from where all tracks begin, and all its events."""

    rank: int
    events: Sequence[Event]
    line: Sequence[Event]  # events of every group
    whole: bool  # complete since the start of the run
    board: StatusFile | None

    def before(self, event: Event) -> Sequence[Event]:
        """Return what the rank entered from the same line before."""
        earlier = takewhile(lambda one: one is not event, self.line)
        return [one for one in earlier if one.site == event.site]


def _group_difference(
    group: str, members: Members, timelines: Mapping[int, Timeline], boards: Mapping[int, StatusFile]
) -> Difference | None:
    tracks = _tracks(group, [timelines[rank] for rank in members if rank in timelines], boards)
    if len(tracks) < 2:
        return None
    reference = _reference_track(tracks)
    found = [(other, some) for other in tracks if other is not reference and (some := _repairs(other, reference))]
    first = min(found, key=lambda one: one[1][0].right, default=None)
    diverged = _call_difference(group, tracks, reference, *first) if first else None
    shift = _shift(group, tracks)
    if shift is None:
        return diverged or _late_difference(group, tracks)
    # Both begin where calls of different steps pair: an added or skipped call of a rank explains more than a shift.
    added = diverged is not None and (diverged.who or diverged.kind in (DifferenceKind.EXTRA, DifferenceKind.COUNT))
    last = first[1][0].right - added if first else shift[0]
    return shift[1] if shift[0] <= last else diverged


def _shift(group: str, tracks: Sequence[_Track]) -> tuple[int, Difference] | None:
    """Return a shift: calls of different steps pair, so one rank is an iteration ahead, which nothing else shows.

    The step of a rank without an optimizer cannot be compared with that of ranks with one.
    """
    if len({bool(track.board and track.board.steps_s) for track in tracks}) > 1:
        return None
    shared = min(len(track.events) for track in tracks)
    pairs = [[track.events[at] for track in tracks] for at in range(shared)]
    ahead = [
        [None if one.step is None or some[0].step is None else one.step - some[0].step for one in some]
        for some in pairs
    ]
    usual = [0 for _ in tracks] if all(track.whole for track in tracks) else next(iter(ahead), [])
    since = next((at for at in range(shared) if all(one != usual for one in ahead[at:])), None)
    if since is None or any(None in one for one in ahead[since:]) or None in usual:
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
        entered=tuple((track.rank, event) for track, event in zip(tracks, pairs[since], strict=True)),
        absent=(),
        where=True,
        who=False,
        new=False,
    )


def _tracks(group: str, lines: Sequence[Timeline], boards: Mapping[int, StatusFile]) -> list[_Track]:
    """Return the tracks from the start, from the first number that every recorder has, or from the first whole step."""
    events = {line.rank: line.of_group(group) for line in lines}
    numbered = {rank: [one for one in some if one.seq is not None] for rank, some in events.items()}
    if all(line.whole and all(event.called for event in events[line.rank]) for line in lines):
        since, kept = 0, {rank: list(some) for rank, some in events.items()}
    elif all(numbered[rank] or not some for rank, some in events.items()):
        since = max((some[0].seq or 0 for some in numbered.values() if some), default=0)
        kept = {rank: [one for one in some if (one.seq or 0) >= since] for rank, some in numbered.items()}
    else:
        called = {rank: [one for one in some if one.called] for rank, some in events.items()}
        since = max(_first_whole_step(line, called[line.rank]) for line in lines)
        kept = {rank: [one for one in some if (one.step or 0) >= since] for rank, some in called.items()}
    return [
        _Track(
            rank=line.rank,
            events=kept[line.rank],
            line=line.events,
            whole=line.whole and since <= 1,
            board=boards.get(line.rank),
        )
        for line in lines
    ]


def _first_whole_step(line: Timeline, called: Sequence[Event]) -> int:
    return 0 if line.whole or not called else (called[0].step or 0) + 1


def _reference_track(tracks: Sequence[_Track]) -> _Track:
    """Return the rank that most others agree with up to the first divergence; of these, the one that got furthest."""
    longest = max(len(track.events) for track in tracks)
    alike = list(tracks)
    for at in range(longest):
        here = {
            track.rank: (track.events[at].site, track.events[at].elements) for track in alike if at < len(track.events)
        }
        counts = Counter(here.values())
        if len(counts) > 1:
            most = max(counts.values())
            best = next(key for rank, key in sorted(here.items()) if counts[key] == most)
            alike = [track for track in alike if here.get(track.rank) == best]
        if len(alike) == 1:
            break
    return max(alike, key=lambda track: (len(track.events), -track.rank))


def _repairs(other: _Track, reference: _Track) -> tuple[Repair, ...]:
    """Return the repairs of two tracks, each extended by what its pattern expects, so that no difference stays open."""
    return tuple(
        repair
        for repair in repairs(_with_expected_events(other), _with_expected_events(reference))
        if repair.left < len(other.events) and repair.right < len(reference.events)
    )


_FORESEEN = 8  # events that the pattern is extended by


def _with_expected_events(track: _Track) -> tuple[Token, ...]:
    """Return the rank's events, followed by those that its pattern expects next."""
    found = expected_next(tuple(_key(event) for event in track.events), len(track.events))
    events = [*track.events, *(track.events[found.at : found.at + _FORESEEN] if found else ())]
    return tuple(event.token for event in events)


def _key(event: Event) -> tuple[object, ...]:
    return (*event.site, event.elements) if event.even else event.site


def _call_difference(
    group: str, tracks: Sequence[_Track], reference: _Track, other: _Track, found: Sequence[Repair]
) -> Difference:
    """Return the ranks that left their expected call, or else the minority."""
    first = found[0]
    theirs, expected = other.events[first.left], reference.events[first.right]
    # From here backwards, events match by their number: there are no edits before the first one.
    entered = {track.rank: track.events[first.right] for track in tracks if first.right < len(track.events)}
    absent = tuple(track.rank for track in tracks if track.rank not in entered)
    edits = {one.edit for one in found}
    where = len(edits) == 1 and found[0].confirmed > 0
    unconfirmed = not any(one.confirmed for one in found)
    below = unconfirmed and not theirs.called and not expected.called
    below = below and _between_steps(other) == _between_steps(reference)
    field = field_apart(theirs, expected) if theirs.site == expected.site or below else None
    difference = Difference(
        kind=_OF_FIELD[field] if field and Edit.REPLACE in edits else DifferenceKind.ORDER,
        group=group,
        ranks=(),
        expected=expected,
        entered=tuple(sorted(entered.items())),
        absent=absent,
        where=where,
        who=False,
        new=False,
    )
    by_rank = {track.rank: track for track in tracks}
    if difference.kind is not DifferenceKind.ORDER and field is not None:
        return _field_difference(difference, field, by_rank)
    return _of_calls(difference, edits, by_rank)


def _field_difference(found: Difference, field: Field, tracks: Mapping[int, _Track]) -> Difference:
    """Return the ranks that give another value than each time before; else the minority."""
    values = {rank: value(event, field) for rank, event in found.entered}
    usual = {rank: _usual_value(tracks[rank], event, field) for rank, event in found.entered}
    changed = tuple(rank for rank, (times, before) in usual.items() if times and before != values[rank])
    fewer = minority(values)
    if 0 < len(changed) < len(values):
        return replace(found, ranks=changed, who=all(usual[rank][0] >= MIN_REPEATS for rank in changed))
    return replace(found, ranks=fewer, who=len(fewer) < len(values))


def _usual_value(track: _Track, event: Event, field: Field) -> tuple[int, object]:
    """Return the value that the rank always gave from this line, and how often; None if it had several."""
    before = [value(one, field) for one in track.before(event)]
    return (len(before), before[0]) if len(set(before)) == 1 else (0, None)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """How an event of a rank compares with the rank's own earlier iterations."""

    known: bool  # an event was expected
    keeps: bool  # it is the expected event
    skips: bool  # in earlier iterations it came later
    new: bool
    leaves: bool  # the rank goes on as it did before, to another event than the expected one
    sure: bool  # the pattern was repeated often enough


def _step(line: Sequence[Event], event: Event) -> _Step:
    sites, at = _with_steps(line, event)
    found = expected_next(tuple(sites), at)
    keeps = found is not None and sites[found.at] == sites[at]
    return _Step(
        known=found is not None,
        keeps=keeps,
        skips=found is not None and not keeps and comes_later(sites, found, at, sites[at]),
        new=sites[at] not in sites[:at],
        leaves=not keeps and leaves_a_loop(sites, at),
        sure=found is not None and found.kept,
    )


def _with_steps(line: Sequence[Event], event: Event) -> tuple[list[Hashable], int]:
    """Return the events up to `event` with the beginnings of training steps among them, and the index of `event`."""
    sites: list[Hashable] = []
    step = None
    for one in line[: index_of(line, event) + 1]:
        if one.step is not None and one.step != step:
            sites.append("a step begins")
            step = one.step
        sites.append(_key(one))
    return sites, len(sites) - 1


def index_of(line: Sequence[Event], event: Event) -> int:
    return next(at for at, one in enumerate(line) if one is event)


def _of_calls(found: Difference, edits: set[Edit], tracks: Mapping[int, _Track]) -> Difference:
    steps = {rank: _step(tracks[rank].line, event) for rank, event in found.entered}
    keepers = tuple(rank for rank, step in steps.items() if step.keeps)
    leavers = tuple(rank for rank in steps if rank not in keepers)
    again = tuple(rank for rank, event in found.entered if _called_more_often(tracks[rank], event))
    if again and len(again) < len(steps) and not keepers:
        return replace(found, kind=DifferenceKind.COUNT, ranks=again, expected=found.event(again[0]))
    if not keepers or not leavers:
        return _by_steps(found) or replace(found, ranks=minority({rank: event.site for rank, event in found.entered}))
    kept = next(event for rank, event in found.entered if rank in keepers)
    told = replace(found, ranks=leavers, expected=kept, new=all(steps[rank].new for rank in leavers))
    if all(steps[rank].leaves for rank in leavers):
        return replace(told, kind=DifferenceKind.COUNT)
    if told.new:
        same = all(
            (one.step, one.position) == (kept.step, kept.position) for rank, one in found.entered if rank in leavers
        )
        return told if same and kept.called else replace(told, kind=DifferenceKind.EXTRA)
    sure = all(steps[rank].sure for rank in leavers)
    if all(steps[rank].skips for rank in leavers):
        kind = DifferenceKind.ORDER if Edit.SWAP in edits else DifferenceKind.MISSING
        swapped = all(_may_be_swapped(tracks[rank], kept) for rank in leavers)
        return replace(told, kind=kind, who=sure, where=found.where and not swapped, or_swapped=found.where and swapped)
    return replace(told, who=sure and len(leavers) < len(keepers))


def _may_be_swapped(track: _Track, left_out: Event) -> bool:
    """Whether the newest event always came right after the missing one, so that the rank may make both in reverse."""
    newest = track.line[-1]
    behind = [one.site for before, one in pairwise(track.line) if before.site == left_out.site]
    return newest.site in behind


def _called_more_often(track: _Track, event: Event) -> bool:
    """Whether the rank made the call more often in this step than in any earlier one."""
    counts = Counter(one.step for one in track.before(event))
    now = counts.pop(event.step, 0) + 1
    return bool(counts) and event.step is not None and now > max(counts.values())


def _by_steps(found: Difference) -> Difference | None:
    """Return the ranks whose call lies later in training, after the call of the others."""
    points = {rank: (event.step, event.position or 0) for rank, event in found.entered if event.step is not None}
    if len(points) < len(found.entered):
        return None
    first = min(points.values())
    later = tuple(rank for rank, point in points.items() if point > first)
    expected = next(event for rank, event in found.entered if points[rank] == first)
    return replace(found, kind=DifferenceKind.MISSING, ranks=later, expected=expected) if later else None


def _late_difference(group: str, tracks: Sequence[_Track]) -> Difference | None:
    """Return the difference of ranks that agree so far: some have not reached the call that others wait in."""
    reached = min(len(track.events) for track in tracks)
    entered = {track.rank: track for track in tracks if len(track.events) > reached}
    events = {rank: track.events[reached] for rank, track in entered.items()}
    waited = [event for rank, event in events.items() if not event.done or event is entered[rank].line[-1]]
    if not waited:
        return None
    absent = [track for track in tracks if track.rank not in entered]
    expected = waited[0]
    trains = any(_trains(entered[rank]) for rank, event in events.items() if event is expected)
    waiting = [track.board for track in entered.values() if track.board]
    passed = [track for track in absent if trains == _trains(track) and _passed(track, expected, waiting)]
    late = Difference(
        kind=DifferenceKind.LATE,
        group=group,
        ranks=tuple(track.rank for track in absent),
        expected=expected,
        entered=tuple(sorted(events.items())),
        absent=tuple(track.rank for track in absent),
        where=not all(_between_steps(track) for track in entered.values()),  # else these may have no step left to do
        who=False,
        new=False,
    )
    if not passed:
        return late
    missing = replace(late, kind=DifferenceKind.MISSING, ranks=tuple(track.rank for track in passed))
    if any(one.site == expected.site for track in absent for one in track.line):
        steps = {rank: _step(entered[rank].line, event) for rank, event in events.items()}
        again = tuple(rank for rank, step in steps.items() if step.known and not step.keeps)
        if again and len(again) <= len(passed):
            return replace(missing, kind=DifferenceKind.COUNT, ranks=again)
        kept = all(step.keeps for step in steps.values())
        return replace(missing, who=kept and all(len(track.before(expected)) >= MIN_REPEATS for track in passed))
    if len(entered) <= len(passed) and not any(len(entered[rank].before(event)) for rank, event in events.items()):
        # No rank ever made this call before.
        return replace(
            missing, kind=DifferenceKind.EXTRA, ranks=tuple(entered), new=True, who=len(entered) < len(passed)
        )
    return missing


def _trains(track: _Track) -> bool:
    """Whether the rank runs a model. The step of a rank without one cannot be compared."""
    return track.board is not None and (track.board.training is not None or bool(track.board.steps_s))


def _evaluates(mode: Mode | None, other: Mode | None) -> bool:
    """Whether the rank has gradients off, or its model in evaluation, while the other rank trains."""
    if mode is None or other is None:
        return False
    return mode.training < other.training or mode.gradients < other.gradients


def _between_steps(track: _Track) -> bool:
    return track.board is not None and track.board.training is not None and track.board.training.kind == "step"


def _passed(track: _Track, event: Event, waiting: Sequence[StatusFile]) -> bool:
    """Whether the rank's step and progress events are past the point at which the others made the call."""
    board = track.board
    if board is None or event.step is None or event.position is None:
        return False
    if board.step != event.step:
        return board.step > event.step
    if any(_evaluates(board.mode, other.mode) for other in waiting):
        return False  # what it does there is no part of the training
    usual = [one.position or 0 for one in track.line if one.site == event.site and (one.step or 0) < event.step]
    return board.position > max(usual, default=event.position)


# A cycle of waits over several groups.


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of a cycle: this rank is in `event` and waits for the next link's rank, which has not reached it."""

    rank: int
    event: Event
    waits_for: int
    never_entered: bool  # that rank entered nothing of the group


def cycle(timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]]) -> tuple[Link, ...]:
    """Return the first cycle of ranks, each in a collective that the next one has not reached; empty if there is none.

    The cycle spans several groups. Within one group the next rank's newest number is always lower, which no cycle
    allows.
    """
    links = {rank: _links(line, groups, timelines) for rank, line in sorted(timelines.items())}
    return next((ring for start in links if (ring := _shortest_cycle(start, links))), ())


def broke_pattern(line: Timeline, event: Event) -> bool:
    """Whether the rank's own earlier iterations had something else here."""
    step = _step(line.events, event)
    return not step.keeps and (step.skips or step.leaves)


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A rank's newest event that breaks its pattern."""

    due: Event  # as it was in an earlier iteration
    made: Event  # the newest event
    times: int  # how often the expected event came there


def departure(line: Timeline) -> Departure | None:
    """Return the departure of a rank from its pattern, or None."""
    if not line.events:
        return None
    made = line.events[-1]
    sites, at = _with_steps(line.events, made)
    found = expected_next(tuple(sites), at)
    if found is None or sites[found.at] == sites[at]:
        return None
    usual = next((event for event in reversed(line.events[:-1]) if _key(event) == sites[found.at]), None)
    return None if usual is None else Departure(due=usual, made=made, times=found.times)


def last_round(line: Timeline) -> Event | None:
    """Return the transfer before the newest event, if the newest event is one that the rank never made before."""
    before, newest = line.events[:-1], line.events[-1:]
    new = bool(newest) and all(one.site != newest[0].site for one in before)
    return next((one for one in reversed(before) if one.transfer), None) if new and len(before) >= MIN_REPEATS else None


def _links(
    line: Timeline, groups: Mapping[str, Sequence[Members]], timelines: Mapping[int, Timeline]
) -> tuple[Link, ...]:
    """Yield links from the rank's oldest open collective to every member that is missing in it."""
    for event in line.events:
        members = next((some for some in groups.get(event.group, ()) if line.rank in some), ())
        absent = [] if event.done or event.seq is None else list(_missing_members(event, members, timelines))
        if absent:
            return tuple(
                Link(rank=line.rank, event=event, waits_for=rank, never_entered=newest == 0) for rank, newest in absent
            )
    return ()


def _missing_members(event: Event, members: Members, timelines: Mapping[int, Timeline]) -> Iterator[tuple[int, int]]:
    """Yield (rank, its newest number of that group) for each member that has not reached the event."""
    for rank in members:
        if rank in timelines and timelines[rank].events:
            newest = max((one.seq or 0 for one in timelines[rank].of_group(event.group)), default=0)
            if newest < (event.seq or 0):
                yield rank, newest


def _shortest_cycle(start: int, links: Mapping[int, Sequence[Link]]) -> tuple[Link, ...]:
    """Return the shortest cycle through `start`, lower ranks first; empty if there is none."""
    ways: list[tuple[Link, ...]] = [(link,) for link in links[start]]
    seen: set[int] = set()
    while ways:
        way = ways.pop(0)
        at = way[-1].waits_for
        if at == start:
            return way
        if at not in seen:
            seen.add(at)
            ways += [(*way, link) for link in links.get(at, ())]
    return ()
