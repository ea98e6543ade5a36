"""Where the ranks of a group part: what differs, who left its routine, and how sure that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise, takewhile

from nsa_harness.core.collectives.call_pattern import KEPT, comes_later, due, leaves_a_loop
from nsa_harness.core.collectives.counts import parted_before
from nsa_harness.core.collectives.repair import Edit, Repair, repairs
from nsa_harness.core.collectives.timeline import UNTOLD_GROUP, Event, Field, Timeline, Token, field_apart, value
from nsa_harness.core.evidence.evidence import Mode, StatusFile

Members = tuple[int, ...]


class DifferenceKind(StrEnum):
    """What is unlike. An insert here is a delete there: MISSING and EXTRA say who left its own routine."""

    MISSING = "missing"  # these ranks left out what was due
    EXTRA = "extra"  # these ranks made a call that was not due
    ORDER = "order"  # they make the same calls in another order, or others in their place
    COUNT = "count"  # another number of rounds of a loop
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"
    LATE = "late"  # these ranks have not come to it, and nothing shows that they passed it


_OF_FIELD = {Field.SHAPE: DifferenceKind.SHAPE, Field.DTYPE: DifferenceKind.DTYPE, Field.ROOT: DifferenceKind.ROOT}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first event of a group at which its members part."""

    kind: DifferenceKind
    group: str
    ranks: Members  # who; all that part here where it cannot be told
    expected: Event | None  # what the others did there
    entered: tuple[tuple[int, Event], ...]  # what each member entered there, by rank
    absent: Members  # members that entered nothing there
    where: bool  # no other smallest repair explains it
    who: bool  # their own rounds before show it
    new: bool  # what these ranks entered they never entered before
    or_swapped: bool = False  # they may yet make the call that is missing: nothing is seen behind the next one
    parted_before: bool = False  # before the oldest calls that are kept they were not the same either
    lost: Members = ()  # whose recorder lacks numbers of the group

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
    """One a group at most; those in which a rank is only late come last, since they follow from others."""
    found = [
        _within_what_is_known(one, members, timelines, boards)
        for group, parties in groups.items()
        for members in parties
        if (one := _of_group(group, members, timelines, boards))
    ]
    return tuple(sorted(found, key=lambda one: (one.kind is DifferenceKind.LATE, _since_s(one), one.group)))


def difference_of_stacks(timelines: Mapping[int, Timeline]) -> Difference | None:
    """Where ranks without a record stand in different calls, transfers aside, or take another rank for the root of one.

    Whose is not due no stack shows.
    """
    entered = {rank: event for rank, line in sorted(timelines.items()) for event in line.events[-1:]}
    if any(event.transfer for event in entered.values()):
        return None
    kind, keys = DifferenceKind.ORDER, {rank: event.site for rank, event in entered.items()}
    if len(set(keys.values())) == 1 and _roots_apart({rank: event.root for rank, event in entered.items()}):
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


def _roots_apart(roots: Mapping[int, int | None]) -> bool:
    """The ranks cannot be of several groups, each with a root of its own: one would be alone, or have another root."""
    alone = 1 in Counter(roots.values()).values()
    return None not in roots.values() and (alone or any(roots.get(root or 0, root) != root for root in roots.values()))


def _within_what_is_known(
    found: Difference, members: Members, timelines: Mapping[int, Timeline], boards: Mapping[int, StatusFile]
) -> Difference:
    """The first difference that is seen need not be the first one."""
    parted = parted_before(found.group, {rank: boards[rank] for rank in members if rank in boards})
    lost = tuple(rank for rank in members if rank in timelines and found.group in timelines[rank].lost)
    if not parted and not lost:
        return found
    return replace(found, where=False, or_swapped=False, parted_before=parted, lost=lost)


def groups_of(
    timelines: Mapping[int, Timeline], boards: Mapping[int, StatusFile], told: Mapping[str, Members] | None = None
) -> dict[str, tuple[Members, ...]]:
    """Every group that was entered and its members: as the boards say, else who entered it; all of the default one.

    `told`: what something else than a board says of them.

    Two groups may share a name on different ranks; then they are two.
    """
    found: dict[str, tuple[Members, ...]] = {}
    for group in sorted({one.group for line in timelines.values() for one in line.events}):
        declared = {
            members for rank, board in boards.items() if rank in (members := tuple(sorted(board.groups.get(group, ()))))
        }
        entered = tuple(rank for rank, line in sorted(timelines.items()) if line.of_group(group))
        declared = declared or {one for one in [tuple((told or {}).get(group, ()))] if one}
        found[group] = tuple(sorted(declared)) or ((tuple(sorted(timelines)) if group in _DEFAULT else entered),)
    return found


_DEFAULT = ("", "0")


def minority(keys: Mapping[int, object]) -> Members:
    """The ranks whose key is not that of the most; all of them where no key has more ranks than every other."""
    ranked = Counter(keys.values()).most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        return tuple(sorted(keys))
    return tuple(rank for rank in sorted(keys) if keys[rank] != ranked[0][0])


def _since_s(found: Difference) -> float:
    return min((event.at_s for _, event in found.entered), default=0.0)


@dataclass(frozen=True, kw_only=True)
class _Track:
    """What one rank entered in one group, from the event on at which all tracks begin, among all that it entered."""

    rank: int
    events: Sequence[Event]
    line: Sequence[Event]  # of every group
    whole: bool  # from the beginning on
    board: StatusFile | None

    def before(self, event: Event) -> Sequence[Event]:
        """What it entered from the same line before."""
        earlier = takewhile(lambda one: one is not event, self.line)
        return [one for one in earlier if one.site == event.site]


def _of_group(
    group: str, members: Members, timelines: Mapping[int, Timeline], boards: Mapping[int, StatusFile]
) -> Difference | None:
    tracks = _tracks(group, [timelines[rank] for rank in members if rank in timelines], boards)
    if len(tracks) < 2:
        return None
    reference = _reference(tracks)
    found = [(other, some) for other in tracks if other is not reference and (some := _repairs(other, reference))]
    first = min(found, key=lambda one: one[1][0].right, default=None)
    parted = _parted(group, tracks, reference, *first) if first else None
    shift = _shift(group, tracks)
    if shift is None:
        return parted or _short(group, tracks)
    # Both begin where calls of different steps pair: what a rank added there, or left, explains more than a shift.
    added = parted is not None and (parted.who or parted.kind in (DifferenceKind.EXTRA, DifferenceKind.COUNT))
    last = first[1][0].right - added if first else shift[0]
    return shift[1] if shift[0] <= last else parted


def _shift(group: str, tracks: Sequence[_Track]) -> tuple[int, Difference] | None:
    """Calls that pair, of different steps: from there on one rank is a round ahead, which shows in nothing else.

    The step of a rank that has no optimizer says nothing of those that have one.
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
    """From the beginning, or the first number that every recorder holds, or the first whole step."""
    events = {line.rank: line.of_group(group) for line in lines}
    numbered = {rank: [one for one in some if one.seq is not None] for rank, some in events.items()}
    if all(line.whole and all(one.called for one in events[line.rank]) for line in lines):
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


def _reference(tracks: Sequence[_Track]) -> _Track:
    """The rank whose way most others went, up to where the first of them parts; of those the one that came furthest."""
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
    """With what each would do next by its own routine behind what it did: else a difference at the end stays open."""
    return tuple(
        one
        for one in repairs(_foreseen(other), _foreseen(reference))
        if one.left < len(other.events) and one.right < len(reference.events)
    )


_FORESEEN = 8  # events


def _foreseen(track: _Track) -> tuple[Token, ...]:
    """What it entered, and what followed wherever it stood as it stands."""
    found = due(tuple(_key(one) for one in track.events), len(track.events))
    events = [*track.events, *(track.events[found.at : found.at + _FORESEEN] if found else ())]
    return tuple(one.token for one in events)


def _key(event: Event) -> tuple[object, ...]:
    return (*event.site, event.elements) if event.even else event.site


def _parted(
    group: str, tracks: Sequence[_Track], reference: _Track, other: _Track, found: Sequence[Repair]
) -> Difference:
    """Who left what is due, or else the fewer."""
    first = found[0]
    theirs, expected = other.events[first.left], reference.events[first.right]
    # Events are matched by their number from here on back: edits before the first one there are none.
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
        return _of_field(difference, field, by_rank)
    return _of_calls(difference, edits, by_rank)


def _of_field(found: Difference, field: Field, tracks: Mapping[int, _Track]) -> Difference:
    """Who does it otherwise than each time before; else the fewer."""
    values = {rank: value(event, field) for rank, event in found.entered}
    usual = {rank: _usual(tracks[rank], event, field) for rank, event in found.entered}
    changed = tuple(rank for rank, (times, before) in usual.items() if times and before != values[rank])
    fewer = minority(values)
    if 0 < len(changed) < len(values):
        return replace(found, ranks=changed, who=all(usual[rank][0] >= KEPT for rank in changed))
    return replace(found, ranks=fewer, who=len(fewer) < len(values))


def _usual(track: _Track, event: Event, field: Field) -> tuple[int, object]:
    """How often the rank gave one and the same from this line, and what; where several go through nothing is usual."""
    before = [value(one, field) for one in track.before(event)]
    return (len(before), before[0]) if len(set(before)) == 1 else (0, None)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """How a rank's event stands to its own rounds before."""

    known: bool  # something was due
    keeps: bool  # it is what was due
    skips: bool  # in the rounds before it came later
    new: bool
    leaves: bool  # it goes on as it did before, to something else than is due
    sure: bool  # its routine was kept often enough


def _step(line: Sequence[Event], event: Event) -> _Step:
    sites, at = _with_steps(line, event)
    found = due(tuple(sites), at)
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
    """What was entered up to `event`, and where a step of training began; and the index of `event` in it."""
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
    again = tuple(rank for rank, event in found.entered if _once_more(tracks[rank], event))
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
    """Its newest event is the one that always came right behind the one it lacks: it may make both the other way."""
    newest = track.line[-1]
    behind = [one.site for before, one in pairwise(track.line) if before.site == left_out.site]
    return newest.site in behind


def _once_more(track: _Track, event: Event) -> bool:
    """In this step it made the call more often than in any before."""
    counts = Counter(one.step for one in track.before(event))
    now = counts.pop(event.step, 0) + 1
    return bool(counts) and event.step is not None and now > max(counts.values())


def _by_steps(found: Difference) -> Difference | None:
    """Whose call lies further on in the training than that of the others has passed theirs."""
    points = {rank: (event.step, event.position or 0) for rank, event in found.entered if event.step is not None}
    if len(points) < len(found.entered):
        return None
    first = min(points.values())
    later = tuple(rank for rank, point in points.items() if point > first)
    expected = next(event for rank, event in found.entered if points[rank] == first)
    return replace(found, kind=DifferenceKind.MISSING, ranks=later, expected=expected) if later else None


def _short(group: str, tracks: Sequence[_Track]) -> Difference | None:
    """All did the same as far as they came: some have not come to what others wait in, or were in last."""
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
        return replace(missing, who=kept and all(len(track.before(expected)) >= KEPT for track in passed))
    if len(entered) <= len(passed) and not any(len(entered[rank].before(event)) for rank, event in events.items()):
        # Nobody ever made it before.
        return replace(
            missing, kind=DifferenceKind.EXTRA, ranks=tuple(entered), new=True, who=len(entered) < len(passed)
        )
    return missing


def _trains(track: _Track) -> bool:
    """A model runs there. The step of a rank that has none says nothing of those that have one."""
    return track.board is not None and (track.board.training is not None or bool(track.board.steps_s))


def _evaluates(mode: Mode | None, other: Mode | None) -> bool:
    """It has gradients off, or its model in evaluation, where the other one trains."""
    if mode is None or other is None:
        return False
    return mode.training < other.training or mode.gradients < other.gradients


def _between_steps(track: _Track) -> bool:
    return track.board is not None and track.board.training is not None and track.board.training.kind == "step"


def _passed(track: _Track, event: Event, waiting: Sequence[StatusFile]) -> bool:
    """By its steps, and its marks within the step, the rank is beyond the point at which the others made the call."""
    board = track.board
    if board is None or event.step is None or event.position is None:
        return False
    if board.step != event.step:
        return board.step > event.step
    if any(_evaluates(board.mode, other.mode) for other in waiting):
        return False  # what it does there is no part of the training
    usual = [one.position or 0 for one in track.line if one.site == event.site and (one.step or 0) < event.step]
    return board.position > max(usual, default=event.position)


# A ring of waits over several groups.


@dataclass(frozen=True, kw_only=True)
class Link:
    """This rank stands in `event` and waits for the rank of the next link, which has not come to it."""

    rank: int
    event: Event
    waits_for: int
    never_entered: bool  # that rank entered nothing of the group


def cycle(timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]]) -> tuple[Link, ...]:
    """The first ring of ranks, each in a collective that the next one has not come to; empty = there is none.

    It spans several groups: within one the next rank's newest number is always lower, which no ring can be.
    """
    links = {rank: _links(line, groups, timelines) for rank, line in sorted(timelines.items())}
    return next((ring for start in links if (ring := _ring(start, links))), ())


def left_routine(line: Timeline, event: Event) -> bool:
    """It did this where its own rounds before had something else."""
    step = _step(line.events, event)
    return not step.keeps and (step.skips or step.leaves)


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a rank ended up was not what its rounds before had there."""

    due: Event  # as it was in an earlier round
    made: Event  # its newest
    times: int  # that what was due came there


def departure(line: Timeline) -> Departure | None:
    """None where the rank keeps to its rounds, or nothing was due."""
    if not line.events:
        return None
    made = line.events[-1]
    sites, at = _with_steps(line.events, made)
    found = due(tuple(sites), at)
    if found is None or sites[found.at] == sites[at]:
        return None
    usual = next((one for one in reversed(line.events[:-1]) if _key(one) == sites[found.at]), None)
    return None if usual is None else Departure(due=usual, made=made, times=found.times)


def last_round(line: Timeline) -> Event | None:
    """The transfer before the newest event, where that is one it never made before: it went on from its rounds."""
    before, newest = line.events[:-1], line.events[-1:]
    new = bool(newest) and all(one.site != newest[0].site for one in before)
    return next((one for one in reversed(before) if one.transfer), None) if new and len(before) >= KEPT else None


def _links(
    line: Timeline, groups: Mapping[str, Sequence[Members]], timelines: Mapping[int, Timeline]
) -> tuple[Link, ...]:
    """From the oldest collective that this rank has open to every member that is missing in it."""
    for event in line.events:
        members = next((some for some in groups.get(event.group, ()) if line.rank in some), ())
        absent = [] if event.done or event.seq is None else list(_not_come_to(event, members, timelines))
        if absent:
            return tuple(
                Link(rank=line.rank, event=event, waits_for=rank, never_entered=newest == 0) for rank, newest in absent
            )
    return ()


def _not_come_to(event: Event, members: Members, timelines: Mapping[int, Timeline]) -> Iterator[tuple[int, int]]:
    """(rank, its newest number of that group)."""
    for rank in members:
        if rank in timelines and timelines[rank].events:
            newest = max((one.seq or 0 for one in timelines[rank].of_group(event.group)), default=0)
            if newest < (event.seq or 0):
                yield rank, newest


def _ring(start: int, links: Mapping[int, Sequence[Link]]) -> tuple[Link, ...]:
    """The shortest way from `start` back to it, lower ranks first; empty = there is none."""
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
