"""Where the ranks of a group part: the first collective they did not all enter alike, and who left its usual order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Board, Call, Collective
from nsa_harness.core.evidence.steps import SETUP, call_of, entered_s

# Operations whose inputs have as many elements on every rank. Elsewhere sizes rightly differ: the root of a scatter has
# the payload, all_to_all and (on NCCL) all_gather and reduce_scatter may be uneven, sparse tensors have any size.
_EVEN = frozenset({
    "all_reduce", "broadcast", "reduce", "_all_gather_base", "all_gather_into_tensor", "all_gather_single",
    "_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single",
})  # fmt: skip
_EVEN_ON_GLOO = _EVEN | {"all_gather", "reduce_scatter"}  # gloo refuses uneven ones

Members = tuple[int, ...]


class DivergenceKind(StrEnum):
    OPERATION = "operation"
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"  # another rank sends, or collects
    MISSING = "missing"  # some members have not come to it


@dataclass(frozen=True, kw_only=True)
class Track:
    """What is known of the collectives of one rank."""

    collectives: tuple[Collective, ...]  # oldest first, of each group without holes back to the oldest compared
    board: Board | None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One rank entering one collective."""

    rank: int
    collective: Collective
    call: Call | None  # from Python; None = below it, or not known
    at_s: float | None


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first number of a group at which its members differ."""

    kind: DivergenceKind
    group: str
    seq: int
    entries: tuple[Entry, ...]  # by rank
    differ: tuple[int, ...]  # the ranks unlike the majority; all of them where there is none
    missing: tuple[int, ...]  # members that have not come to it


@dataclass(frozen=True, kw_only=True)
class Link:
    """In a cycle: this rank stands in `entry` and waits for the rank of the next link."""

    entry: Entry
    waits_for: int


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What the recorders of all ranks say together."""

    divergences: tuple[Divergence, ...]  # one a group at most, earliest first
    cycle: tuple[Link, ...]  # a ring over several groups; empty = none
    never_entered: tuple[tuple[str, Members], ...]  # (group, members that entered none of its collectives)


def analyse(tracks: Mapping[int, Track], backend: str) -> Analysis:
    """Pure and deterministic: the same tracks in any order give the same answer."""
    even = _EVEN_ON_GLOO if backend == "gloo" else _EVEN
    groups = [_Group(name, members, tracks) for name, members in _groups(tracks)]
    found = [divergence for group in groups if (divergence := group.divergence(even))]
    return Analysis(
        divergences=tuple(sorted(found, key=_when)),
        cycle=_cycle(groups, tracks),
        never_entered=tuple((group.name, absent) for group in groups if (absent := group.never_entered())),
    )


class _Group:
    """One process group: its members whose recorder is known, and what each entered by number."""

    def __init__(self, name: str, members: Members, tracks: Mapping[int, Track]) -> None:
        self.name = name
        self.members = members
        self._tracks = tracks
        self.entered = {
            rank: {one.seq: one for one in tracks[rank].collectives if one.group == name}
            for rank in members
            if rank in tracks and tracks[rank].collectives
        }

    def divergence(self, even: frozenset[str]) -> Divergence | None:
        """The first number entered unlike, or else the oldest one that is open and that a member has not come to."""
        counts = Counter(seq for entered in self.entered.values() for seq in entered)
        for seq in sorted(seq for seq, ranks in counts.items() if ranks > 1):
            unlike = _difference(self._at(seq), even)
            if unlike is not None:
                return self._divergence(*unlike, seq)
        waited = [seq for seq in self._open() if self.missing(seq)]
        return self._divergence(DivergenceKind.MISSING, self.missing(waited[0]), waited[0]) if waited else None

    def missing(self, seq: int) -> Members:
        return tuple(rank for rank, entered in self.entered.items() if max(entered, default=0) < seq)

    def never_entered(self) -> Members:
        """Members that others wait for in this group, and that entered nothing of it."""
        return tuple(rank for rank, entered in self.entered.items() if not entered) if self._open() else ()

    def _open(self) -> list[int]:
        return sorted({seq for entered in self.entered.values() for seq, one in entered.items() if not one.retired})

    def _at(self, seq: int) -> dict[int, Collective]:
        return {rank: entered[seq] for rank, entered in self.entered.items() if seq in entered}

    def _divergence(self, kind: DivergenceKind, differ: Members, seq: int) -> Divergence:
        return Divergence(
            kind=kind,
            group=self.name,
            seq=seq,
            entries=tuple(_entry(rank, one, self._tracks[rank].board) for rank, one in sorted(self._at(seq).items())),
            differ=differ,
            missing=self.missing(seq),
        )


def elements(collective: Collective) -> tuple[int, ...]:
    """How many each tensor has: the shape itself need not agree."""
    counts = []
    for sizes in collective.sizes:
        count = 1
        for size in sizes:
            count *= size
        counts.append(count)
    return tuple(counts)


def minority(keys: Mapping[int, object]) -> Members:
    """The ranks whose key is not that of the most; all of them where no key has more ranks than every other."""
    ranked = Counter(keys.values()).most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        return tuple(sorted(keys))
    return tuple(rank for rank in sorted(keys) if keys[rank] != ranked[0][0])


def _difference(entered: Mapping[int, Collective], even: frozenset[str]) -> tuple[DivergenceKind, Members] | None:
    operations = {rank: one.op for rank, one in entered.items()}
    if len(set(operations.values())) > 1:
        return DivergenceKind.OPERATION, minority(operations)
    if not set(operations.values()) <= even:
        return None
    for kind, keys in (
        (DivergenceKind.SHAPE, {rank: elements(one) for rank, one in entered.items()}),
        (DivergenceKind.DTYPE, {rank: one.dtypes for rank, one in entered.items()}),
    ):
        if len(set(keys.values())) > 1:
            return kind, minority(keys)
    return None


def _groups(tracks: Mapping[int, Track]) -> Iterator[tuple[str, Members]]:
    """Every group with its members: as the boards say, or else all ranks that entered it, and all of the default one.

    Two groups may share a name on different ranks; then they are two.
    """
    names = sorted({one.group for track in tracks.values() for one in track.collectives})
    for name in names:
        declared = {
            members
            for rank, track in tracks.items()
            if track.board and rank in (members := tuple(sorted(track.board.groups.get(name, ()))))
        }
        entered = tuple(rank for rank in sorted(tracks) if any(one.group == name for one in tracks[rank].collectives))
        everyone = tuple(sorted(tracks)) if name == "0" else entered
        for members in sorted(declared) or [everyone]:
            yield name, members


def _cycle(groups: Sequence[_Group], tracks: Mapping[int, Track]) -> tuple[Link, ...]:
    """The first ring of ranks, each in a collective that the next one has not come to.

    It spans several groups: within one the next rank's newest number is always lower, which no ring can be.
    """
    links = {rank: _links(rank, groups, tracks) for rank in sorted(tracks)}
    for start in links:
        ring = _ring(start, links)
        if ring:
            return ring
    return ()


def _links(rank: int, groups: Sequence[_Group], tracks: Mapping[int, Track]) -> tuple[Link, ...]:
    """From the oldest collective that this rank has open to every member that is missing in it."""
    opened = [
        (one.created_ns, group.name, one, group)
        for group in groups
        for one in group.entered.get(rank, {}).values()
        if not one.retired and group.missing(one.seq)
    ]
    if not opened:
        return ()
    _, _, oldest, group = min(opened, key=lambda one: one[:2])
    entry = _entry(rank, oldest, tracks[rank].board)
    return tuple(Link(entry=entry, waits_for=peer) for peer in group.missing(oldest.seq))


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


def _entry(rank: int, collective: Collective, board: Board | None) -> Entry:
    return Entry(
        rank=rank,
        collective=collective,
        call=call_of(board, collective) if board else None,
        at_s=entered_s(board, collective) if board else None,
    )


def _when(divergence: Divergence) -> tuple[float, str, int]:
    times = [entry.at_s for entry in divergence.entries if entry.at_s is not None]
    return min(times, default=0.0), divergence.group, divergence.seq


_TIMES = 2  # that a line was passed, before what it does can be called usual


def went_ahead(found: Divergence, tracks: Mapping[int, Track]) -> Members:
    """The ranks that left something out: they entered what they usually enter later, and some other rank what is due.

    Empty where that is not shown, and where it would be every rank.
    """
    entered = {entry.rank: entry.collective for entry in found.entries}
    due = {rank for rank, one in entered.items() if _is_due(one, tracks[rank])}
    ahead = tuple(rank for rank, one in sorted(entered.items()) if rank not in due and _is_later(one, tracks[rank]))
    return ahead if due and len(due) + len(ahead) == len(entered) else ()


def added(found: Divergence, tracks: Mapping[int, Track]) -> Members:
    """The ranks that entered something which they never entered before, where all others did what is due."""
    entered = {entry.rank: entry.collective for entry in found.entries}
    new = tuple(rank for rank, one in sorted(entered.items()) if _is_new(one, tracks[rank]))
    due = {rank for rank, one in entered.items() if rank not in new and _is_due(one, tracks[rank])}
    return new if due and len(due) + len(new) == len(entered) else ()


@dataclass(frozen=True, kw_only=True)
class Departure:
    """`due` was left out behind `after`, the last call that the rank made in its usual order."""

    due: Call  # as it was made in an earlier round
    after: Call


def first_departure(board: Board) -> Departure | None:
    """The call that was due where the rank first went on to what comes later in its rounds; None = it kept to them.

    Calls from Python only, transfers included. A call that it never made before is the end of a loop, no departure.
    """
    calls = [one for one in board.calls if not one.op.startswith(protocol.WAIT)]
    made = [_from_python(one) for one in calls]
    for number in range(1, len(made)):
        at = _same_point(made[:number])
        if at is not None and made[at] != made[number] and made[number] in made[at + 1 : number]:
            return Departure(due=calls[at], after=calls[number - 1])
    return None


def other_partner(board: Board) -> Call | None:
    """The newest transfer, where its line has had one and the same partner each time before, and now another."""
    made = [one for one in board.calls if not one.op.startswith(protocol.WAIT) and one.peer is not None]
    if not made:
        return None
    newest = made[-1]
    usual = [one.peer for one in made[:-1] if (one.op, one.group, one.place) == (newest.op, newest.group, newest.place)]
    return newest if len(usual) >= _TIMES and len(set(usual)) == 1 and usual[0] != newest.peer else None


def changed_order(board: Board) -> bool:
    """In its newest step it began with, or went on to, what came later in the step before."""
    calls = [one for one in board.calls if not one.op.startswith(SETUP)]
    if not calls:
        return False
    now, before = ([_from_python(one) for one in calls if one.step == calls[-1].step - back] for back in (0, 1))
    unlike = next((one for one, earlier in zip(now, before, strict=False) if one != earlier), None)
    return unlike is not None and unlike in before


def _from_python(one: Call) -> Hashable:
    return one.op, one.group, one.place, one.peer


def _is_due(one: Collective, track: Track) -> bool:
    """At this point of its order before, the rank entered the same."""
    before = _before(one, track)
    at = _same_point(before)
    return at is not None and before[at] == _signature(one)


def _is_later(one: Collective, track: Track) -> bool:
    """It was entered after this point in the order before, and not at it."""
    before = _before(one, track)
    at = _same_point(before)
    return at is not None and before[at] != _signature(one) and _signature(one) in before[at + 1 :]


def _is_new(one: Collective, track: Track) -> bool:
    before = _before(one, track)
    return _same_point(before) is not None and _signature(one) not in before


def _same_point(before: Sequence[Hashable]) -> int | None:
    """Where what now follows stood the last time: behind the newest earlier series that ends as `before` does.

    The longest such series decides, as layers of one size make short ones ambiguous.
    """
    best: tuple[int, int] | None = None
    for at in range(len(before) - 1, 0, -1):
        length = 0
        while length < at and before[at - 1 - length] == before[len(before) - 1 - length]:
            length += 1
        if length and (best is None or length > best[0]):
            best = (length, at)
    return best[1] if best else None


def _before(one: Collective, track: Track) -> list[Hashable]:
    return [_signature(other) for other in track.collectives if other.group == one.group and other.seq < one.seq]


def _signature(one: Collective) -> Hashable:
    return one.op, one.sizes, one.dtypes
