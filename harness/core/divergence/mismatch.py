"""Calls from Python laid side by side: the first point where ranks call another collective, or on other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.divergence.divergence import DivergenceKind, minority
from nsa_harness.core.evidence.evidence import Board, Call

# By their Python names. Objects, scatter, gather, all_to_all and transfers rightly differ in size between ranks.
_EVEN = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "_all_gather_base", "all_gather_into_tensor",
    "all_gather_single", "_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single",
})  # fmt: skip
_EVEN_ON_GLOO = _EVEN | {"all_gather", "all_gather_coalesced", "reduce_scatter"}
_COLLECTIVES = _EVEN_ON_GLOO | {
    "all_gather_object", "all_to_all", "all_to_all_single", "barrier", "broadcast_object_list", "gather",
    "gather_object", "scatter", "scatter_object_list",
}  # fmt: skip

_TIMES = 2  # that a line was passed, before what it does can be called usual


@dataclass(frozen=True, kw_only=True)
class CallMismatch:
    """The same collective by its place in the step, called otherwise on some ranks."""

    kind: DivergenceKind
    step: int
    group: str
    calls: tuple[tuple[int, Call], ...]  # (rank, its call)
    differ: tuple[int, ...]  # who departs from what it did itself before, or from the majority; else all

    skipped: bool = False  # these ranks went on to what they usually call later

    def call(self, rank: int) -> Call:
        return dict(self.calls)[rank]


def first_call_mismatch(boards: Mapping[int, Board], backend: str) -> CallMismatch | None:
    """The first unlike calls that end the run: on some rank nothing follows in that group."""
    made = {rank: _collectives(board) for rank, board in sorted(boards.items())}
    even = _EVEN_ON_GLOO if backend == "gloo" else _EVEN
    found = (
        _first_in(made, group, even) for group in sorted({call.group for calls in made.values() for call in calls})
    )
    return min((one for one in found if one), key=lambda one: (one.step, one.calls[0][1].entered_s), default=None)


def _collectives(board: Board) -> list[Call]:
    """Of whole steps: nothing older than a step's first call was overwritten."""
    whole = board.calls if not board.calls or board.calls[0].number == 1 else _after_first_step(board.calls)
    return [call for call in whole if call.op in _COLLECTIVES]


def _after_first_step(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.step > calls[0].step]


def _first_in(made: Mapping[int, Sequence[Call]], group: str, even: frozenset[str]) -> CallMismatch | None:
    in_group = {rank: [call for call in calls if call.group == group] for rank, calls in made.items()}
    in_group = {rank: calls for rank, calls in in_group.items() if calls}
    oldest = max((calls[0].step for calls in in_group.values()), default=0)
    for step in sorted({call.step for calls in in_group.values() for call in calls if call.step >= oldest}):
        steps = {rank: [call for call in calls if call.step == step] for rank, calls in in_group.items()}
        for index in range(max(map(len, steps.values()))):
            calls = {rank: mine[index] for rank, mine in steps.items() if index < len(mine)}
            found = _compare(calls, even)
            if found is None and len(calls) == len(steps):
                continue
            if found is None or not any(calls[rank] is in_group[rank][-1] for rank in calls):
                return None  # ranks part here in another way, and what follows is not the same call any more
            return _call_mismatch(found, step, group, calls, in_group)
    return None


def _compare(calls: Mapping[int, Call], even: frozenset[str]) -> DivergenceKind | None:
    """None also where one operation is called at different points of the program: then one may have been skipped."""
    operations = {call.op for call in calls.values()}
    if len(operations) > 1:
        return DivergenceKind.OPERATION
    if len({call.position for call in calls.values()}) > 1:
        return None
    kinds = (DivergenceKind.SHAPE, DivergenceKind.DTYPE) if operations <= even else ()
    found = next((kind for kind in kinds if len({_key(kind, call) for call in calls.values()}) > 1), None)
    if found is None and all(call.peer is not None for call in calls.values()):
        return DivergenceKind.ROOT if len({call.peer for call in calls.values()}) > 1 else None
    return found


def _key(kind: DivergenceKind, call: Call) -> str | int | None:
    if kind is DivergenceKind.OPERATION:
        return call.op
    if kind is DivergenceKind.ROOT:
        return call.peer
    return call.elements if kind is DivergenceKind.SHAPE else call.dtype


def _call_mismatch(
    kind: DivergenceKind, step: int, group: str, calls: Mapping[int, Call], in_group: Mapping[int, Sequence[Call]]
) -> CallMismatch | None:
    changed = tuple(rank for rank, call in calls.items() if _changed(kind, call, in_group[rank]))
    apart = minority({rank: _key(kind, call) for rank, call in calls.items()})
    ahead = tuple(rank for rank, call in calls.items() if _skips_ahead(call, in_group[rank]))
    if ahead and ahead == changed and len(ahead) < len(calls):
        return _left_out(step, group, calls, changed)
    if kind is DivergenceKind.OPERATION and ahead:
        return None
    if kind is DivergenceKind.OPERATION and len({call.position for call in calls.values()}) > 1:
        return None
    new = tuple(rank for rank, call in calls.items() if _differs_every_time(kind, call, in_group[rank]))
    own = changed if 0 < len(changed) < len(calls) else new
    differ = own if 0 < len(own) < len(calls) and len(apart) == len(calls) else apart
    return CallMismatch(kind=kind, step=step, group=group, calls=tuple(calls.items()), differ=differ)


def _left_out(step: int, group: str, calls: Mapping[int, Call], ranks: tuple[int, ...]) -> CallMismatch:
    return CallMismatch(
        kind=DivergenceKind.OPERATION, step=step, group=group, calls=tuple(calls.items()), differ=ranks, skipped=True
    )


def _skips_ahead(call: Call, calls: Sequence[Call]) -> bool:
    """In an earlier step the rank made this very call later: something before it was left out."""
    index = _index(call, calls)
    before = [(_index(one, calls), one) for one in calls if one.step < call.step]
    usual = next((one for at, one in reversed(before) if at == index), None)
    # Layers of one loop are called from one line: then the size tells them apart.
    by_size = usual is not None and _this_call(usual, sized=False) == _this_call(call, sized=False)
    wanted = _this_call(call, sized=by_size)
    if usual is not None and _this_call(usual, sized=by_size) == wanted:
        return False
    return any(at > index and _this_call(one, sized=by_size) == wanted for at, one in before)


def _this_call(call: Call, *, sized: bool) -> tuple[object, ...]:
    return (call.op, call.place, call.elements) if sized else (call.op, call.place)


def _changed(kind: DivergenceKind, call: Call, calls: Sequence[Call]) -> bool:
    """The rank did it otherwise at the same place in its step before."""
    index = _index(call, calls)
    before = [one for one in calls if one.step < call.step and _index(one, calls) == index]
    return bool(before) and _key(kind, before[-1]) != _key(kind, call)


def _differs_every_time(kind: DivergenceKind, call: Call, calls: Sequence[Call]) -> bool:
    """From the same line it did the same each time before; where several sizes go through it, nothing is usual."""
    before = [one for one in calls if one.number < call.number]
    usual = [_key(kind, one) for one in before if (one.op, one.place) == (call.op, call.place)]
    return len(usual) >= _TIMES and len(set(usual)) == 1 and usual[0] != _key(kind, call)


def _index(call: Call, calls: Sequence[Call]) -> int:
    """Its place among the calls of its step, from 0."""
    return next(i for i, one in enumerate(_of_step(calls, call.step)) if one is call)


def _of_step(calls: Sequence[Call], step: int) -> Iterator[Call]:
    return (call for call in calls if call.step == step)
