"""The schedule of what the ranks communicate in one training step, and the differences between two schedules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import prod

from nsa_harness.core.evidence.evidence import Call, Collective, StatusFile
from nsa_harness.core.evidence.flight import FlightDump
from nsa_harness.core.evidence.steps import elements, entered_by_step, python_calls
from nsa_harness.core.verdict.group_waits import TRANSFERS

# Parts of an operation's name that depend on the version of torch and on the caller.
_VARIANT = re.compile(r"^_|(_into_tensor|_tensor|_single|_base)?(_coalesced)?(_autograd)?$")
_BY_SHARD = ("all_gather", "reduce_scatter")  # their tensors are padded to a multiple of the group's size
_PADDING = 1.25  # largest factor by which such padding may change a tensor
WORLD, ALL = "world", "all"

Meshes = Mapping[int, Mapping[str, int]]  # rank -> its coordinate on each axis of the device mesh


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group, named so that the name holds in a job of any size.

    `names`: the axis of the device mesh that it spans, "world" if it has all ranks, or else its shape. It may have
    several of these names, such as ("dp", "world").
    """

    names: tuple[str, ...]
    size: int

    def is_same(self, other: Group) -> bool:
        """Return whether both may be the same group in jobs of different sizes."""
        return not set(self.names).isdisjoint(other.names)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A collective or transfer of one rank. `line` is only shown, and never compared.

    `peer`: for a transfer, the names of the other rank that hold in a job of any size, such as ("next", "last"). Empty
    if the other rank is unknown; then it is not compared.
    """

    group: Group
    op: str
    dtype: str
    elements: int | None  # that the rank contributes; None: any number, such as for an object
    site: str  # file and function that called it, such as "train.py main"; "": called below Python, such as by DDP
    line: int | None = field(default=None, compare=False)
    peer: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The operation with the other rank of a transfer, such as "isend to next = last"."""
        direction = "from" if "recv" in self.op else "to"
        return f"{self.op} {direction} {' = '.join(self.peer)}" if self.peer else self.op

    @property
    def bytes(self) -> int:
        """The size of what the rank contributes."""
        digits = re.search(r"\d+", self.dtype)
        return (self.elements or 0) * (int(digits[0]) // 8 if digits else 1)


@dataclass(frozen=True, kw_only=True)
class Role:
    """Ranks that communicate alike, and their operations in one step, in order.

    `who`: "all", ranks such as "0" or "1-" (rank 1 and all after it), or a coordinate in the mesh such as "pp=0".
    """

    who: str
    operations: tuple[Operation, ...]


def bytes_of(operations: Sequence[Operation]) -> int:
    """Return the number of bytes that a rank contributes to these operations."""
    return sum(operation.bytes for operation in operations)


Steps = Mapping[int, tuple[Operation, ...]]  # number of an optimizer step -> the operations of one rank in it


def recorded_steps(status_file: StatusFile, flight: FlightDump, meshes: Meshes) -> Steps:
    """Return what one rank communicated in each step that was recorded completely."""
    world = tuple(range(status_file.world_size or 1))
    # gloo records no transfers, so they come from the probe's record of the calls from Python.
    made = {("transfers", number): call for number, call in enumerate(_transfers(status_file), 1)}
    transfers = (
        Collective(
            group=key[0], seq=key[1], op=call.op, sizes=((call.elements,),), dtypes=(call.dtype or "none",),
            retired=True, created_ns=(status_file.zero_ns or 0) + round(call.entered_s * 1e9),
        )
        for key, call in made.items()
    )  # fmt: skip
    calls = python_calls(status_file, flight.collectives) | made
    steps: dict[int, tuple[Operation, ...]] = {}
    for step, end_s, entered in entered_by_step(status_file, (*flight.collectives, *transfers)):
        if end_s is None:
            continue
        operations: list[Operation] = []
        for one in sorted(entered, key=lambda one: one.created_ns):
            call = calls.get((one.group, one.seq))
            members = status_file.groups.get(call.group if call else one.group) or world
            group = Group(names=tuple(_names(members, len(world), meshes)), size=len(members))
            peer = _peer_names(status_file.rank or 0, call, members, meshes, group) if call else ()
            operations.append(replace(_operation(one, call, group), peer=tuple(peer)))
        steps[step] = tuple(operations)
    return steps


def _transfers(status_file: StatusFile) -> Iterator[Call]:
    """Yield the sends and receives that a rank called from Python, each transfer of a batch as a call of its own."""
    for call in status_file.calls:
        parts = [part.split() for part in call.transfers.split(";") if part]
        for op, peer, count, dtype in parts:
            yield replace(call, op=op, peer=int(peer), elements=int(count), dtype=dtype)
        if call.op in TRANSFERS and not parts:
            yield call


def _peer_names(rank: int, call: Call, members: Sequence[int], meshes: Meshes, group: Group) -> Iterator[str]:
    """Yield the names of a transfer's peer that hold in a job of any size: its distance, "rank 0" or "last".

    If it differs from `rank` on one axis of the mesh only, it is named by its place on this axis, otherwise in `group`.
    """
    peer, suffix = call.peer, ""
    if call.op not in TRANSFERS or peer is None or not {rank, peer} <= set(members):
        yield from ["any"] * (peer is None and call.op.startswith("recv"))
        return
    first, to, size = members.index(rank), members.index(peer), len(members)
    own, other = meshes.get(rank, {}), meshes.get(peer, {})
    axes = [axis for axis in own if own[axis] != other.get(axis)]
    if len(axes) == 1 and axes[0] in other and axes[0] not in group.names:
        first, to, size = own[axes[0]], other[axes[0]], 1 + max(place[axes[0]] for place in meshes.values())
        suffix = f" in {axes[0]}"
    ahead = (to - first) % size
    for distance in [ahead] * (2 * ahead <= size) + [ahead - size] * (2 * ahead >= size):
        yield {1: "next", -1: "previous"}.get(distance, f"{distance:+d}") + suffix
    yield from [f"rank 0{suffix}"] * (to == 0) + [f"last{suffix}"] * (to == size - 1)


def steady_step(ranks: Sequence[Steps]) -> tuple[int | None, bool]:
    """Return the last step in which every rank communicated as in the step before, and True.

    If there is none, return the last step that all ranks recorded, or None, and False.
    """
    common = set.intersection(*map(set, ranks)) if ranks else set()
    steady = [step for step in common if step - 1 in common and all(one[step] == one[step - 1] for one in ranks)]
    return max(steady or common, default=None), bool(steady)


def roles(operations: Mapping[int, tuple[Operation, ...]], meshes: Meshes) -> tuple[Role, ...]:
    """Return the roles of the ranks, the first rank's role first. `operations`: those of each rank in one step."""
    members: list[tuple[tuple[Operation, ...], list[int]]] = []
    for rank in sorted(operations):
        for at, (own, ranks) in enumerate(members):
            if (common := _common(own, operations[rank])) is not None:
                members[at] = common, [*ranks, rank]
                break
        else:
            members.append((operations[rank], [rank]))
    for axis in meshes.get(0, {}):
        coordinates = [{meshes.get(rank, {}).get(axis) for rank in ranks} for _, ranks in members]
        if all(len(one) == 1 for one in coordinates) and len(set.union(*coordinates)) == len(members) > 1:
            return tuple(
                Role(who=f"{axis}={one.pop()}", operations=own)
                for one, (own, _) in zip(coordinates, members, strict=True)
            )
    last = max(operations)
    return tuple(Role(who=ALL if len(members) == 1 else _ranges(ranks, last), operations=own) for own, ranks in members)


def _common(first: tuple[Operation, ...], second: tuple[Operation, ...]) -> tuple[Operation, ...] | None:
    """Return the operations of two ranks with the names that both use for a peer, or None if they are not alike."""
    if len(first) != len(second) or not all(map(_is_same, first, second)):
        return None
    pairs = zip(first, second, strict=True)
    return tuple(replace(one, peer=tuple(name for name in one.peer if name in other.peer)) for one, other in pairs)


def role_of(rank: int, candidates: Sequence[Role], meshes: Meshes) -> Role:
    """Return the role that a rank has by its number and coordinates, or the last role if none fits."""
    for role in candidates:
        axis, _, coordinate = role.who.partition("=")
        if role.who == ALL or (coordinate and str(meshes.get(rank, {}).get(axis)) == coordinate):
            return role
        for part in role.who.split(",") if not coordinate else ():
            first, dash, last = part.partition("-")
            if int(first) <= rank <= int(last or (rank if dash else first)):
                return role
    return candidates[-1]


def _ranges(ranks: Sequence[int], last: int) -> str:
    """Return text for sorted ranks, such as "0,2-3". The range with the job's last rank has no end: "1-"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(
        f"{part[0]}-" if part[-1] == last else f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}"
        for part in parts
    )


def _operation(collective: Collective, call: Call | None, group: Group) -> Operation:
    place = call.place if call else None
    return Operation(
        group=group,
        op=_VARIANT.sub("", call.op if call else collective.op),
        dtype=(collective.dtypes or ("none",))[0],
        elements=None if call and "object" in call.op else elements(collective),
        site=f"{(place.file or '').rpartition('/')[2]} {place.function}" if place else "",
        line=place.line if place else None,
    )


def _names(members: Sequence[int], world_size: int, meshes: Meshes) -> Iterator[str]:
    """Yield the names of a group: its axes in the mesh, "world", or its shape."""
    places = [meshes.get(rank, {}) for rank in members]
    axes = {axis: max(place[axis] for place in meshes.values()) + 1 for axis in places[0]}
    spanned = [axis for axis in axes if len({place.get(axis) for place in places}) > 1]
    is_named = axes and prod(axes[axis] for axis in spanned) == len(members)
    if is_named:
        yield from ["+".join(spanned)] if spanned else [axis for axis in axes if axes[axis] == 1]
    if len(members) == world_size:
        yield WORLD
    elif not is_named:
        gaps = {later - earlier for earlier, later in pairwise(members)}
        yield (
            f"blocks-of-{len(members)}" if gaps <= {1}
            else f"every-{gaps.pop()}" if len(gaps) == 1
            else f"ranks-{'.'.join(map(str, members))}"
        )  # fmt: skip


# The comparison of two schedules.


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    MOVED = "in another order"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference between two schedules. `before` is None for an added operation, `after` for a removed one.

    If both are the same operation, it has moved to another place in the order. `count`: how often it occurs.
    """

    before: Operation | None
    after: Operation | None
    count: int = 1

    @property
    def kind(self) -> ChangeKind:
        if self.before is None or self.after is None:
            return ChangeKind.ADDED if self.before is None else ChangeKind.REMOVED
        return ChangeKind.MOVED if self.before == self.after else ChangeKind.CHANGED


def changes(before: Sequence[Operation], after: Sequence[Operation]) -> tuple[Change, ...]:
    """Return the differences between two schedules, in the order of the steps; equal ones are counted.

    The two jobs may have different sizes. Then sizes that follow from the number of ranks are no difference.
    """
    kinds = tuple(dict.fromkeys(before))
    after = [
        min((one for one in kinds if _is_same(one, own)), key=lambda one: abs(_whole(one) - _whole(own)), default=own)
        for own in after
    ]
    numbers: dict[Operation, int] = {}
    removed, added = _edits(*([numbers.setdefault(one, len(numbers)) for one in side] for side in (before, after)))
    operations = list(numbers)
    return tuple(_paired(Counter(operations[one] for one in removed), Counter(operations[one] for one in added)))


_MOST_EDITS = 500  # if two schedules differ in more calls, every call between the first and last difference counts


def _edits(before: Sequence[int], after: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the fewest items to remove from and to add to `before` that make it `after`, each in order.

    This is the greedy algorithm of Myers, "An O(ND) difference algorithm and its variations", 1986. `difflib` does not
    find the fewest in schedules of many equal layers.
    """
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    furthest, history = {1: 0}, []  # diagonal (items of `before` minus items of `after`) -> items of `before` consumed
    for edits in range(min(len(before) + len(after), _MOST_EDITS) + 1):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            adds = _adds(furthest, diagonal, edits)
            at = furthest[diagonal + 1] if adds else furthest[diagonal - 1] + 1
            while at < len(before) and at - diagonal < len(after) and before[at] == after[at - diagonal]:
                at += 1
            furthest[diagonal] = at
            if at >= len(before) and at - diagonal >= len(after):
                return _path(before, after, history)
    return before, after


def _adds(furthest: Mapping[int, int], diagonal: int, edits: int) -> bool:
    """Return whether the best way to a diagonal with so many edits ends with an added item, not a removed one."""
    return diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])


def _path(
    before: Sequence[int], after: Sequence[int], history: Sequence[Mapping[int, int]]
) -> tuple[list[int], list[int]]:
    removed: list[int] = []
    added: list[int] = []
    diagonal = len(before) - len(after)
    for edits in range(len(history) - 1, 0, -1):
        furthest = history[edits]
        if _adds(furthest, diagonal, edits):
            diagonal += 1
            added.insert(0, after[furthest[diagonal] - diagonal])
        else:
            diagonal -= 1
            removed.insert(0, before[furthest[diagonal]])
    return removed, added


def _is_same(before: Operation, after: Operation) -> bool:
    """Return whether two operations are the same in jobs that may have different sizes."""
    expected = replace(before, group=after.group, elements=after.elements, peer=after.peer)
    is_other_peer = before.peer and after.peer and set(before.peer).isdisjoint(after.peer)
    if not before.group.is_same(after.group) or after != expected or is_other_peer:
        return False
    sizes = before.elements, after.elements
    if None in sizes or sizes[0] == sizes[1]:
        return sizes.count(None) in (0, 2)
    if before.group.size == after.group.size or not before.op.startswith(_BY_SHARD):
        return False
    small, large = sorted((_whole(before), _whole(after)))
    return large <= _PADDING * small


def _whole(operation: Operation) -> int:
    """Return the number of elements of all ranks together for a gather, and of one rank for any other operation."""
    return (operation.elements or 0) * (operation.group.size if operation.op == "all_gather" else 1)


def _paired(removed: Counter[Operation], added: Counter[Operation]) -> Iterator[Change]:
    """Yield the changes. An added operation and the removed one that is most like it are one change."""
    pairs: dict[Operation, list[Change]] = {}
    for likeness in (_LIKENESS_OF_EQUALS, 4, 3):
        for old, new in ((old, new) for old in removed for new in added if _likeness(old, new) == likeness):
            if count := min(removed[old], added[new]):
                pairs.setdefault(old, []).append(Change(before=old, after=new, count=count))
                removed[old] -= count
                added[new] -= count
    for old, left in removed.items():
        yield from pairs.get(old, ())
        if left:
            yield Change(before=old, after=None, count=left)
    yield from (Change(before=None, after=new, count=left) for new, left in added.items() if left)


_LIKENESS_OF_EQUALS = 5


def _likeness(old: Operation, new: Operation) -> int:
    """Return how many properties two operations share. 0: they are not the same call before and after a change."""
    same = [getattr(old, name) == getattr(new, name) for name in ("op", "site", "elements", "dtype", "peer")]
    return sum(same) if old.group.is_same(new.group) and (same[0] or same[1]) else 0


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A reviewed schedule: what each rank of a job communicates in one step. `ranks`: the size of the job.

    `has_peers`: False for a file of an earlier version, whose sends and receives are incomplete and are not compared.
    """

    ranks: int
    roles: tuple[Role, ...]
    has_peers: bool = True


def folded(operations: Sequence[Operation], longest: int = 64) -> Iterator[tuple[int, tuple[Operation, ...]]]:
    """Yield the operations in order, as blocks with the number of times that each block is repeated.

    `longest`: the most operations of a block that is looked for.
    """
    at = 0
    while at < len(operations):
        best, times = 1, 1
        for size in range(1, min(longest, (len(operations) - at) // 2) + 1):
            block, count = operations[at : at + size], 1
            while operations[at + count * size : at + (count + 1) * size] == block:
                count += 1
            if count > 1 and count * size > best * times:
                best, times = size, count
        yield times, tuple(operations[at : at + best])
        at += best * times
