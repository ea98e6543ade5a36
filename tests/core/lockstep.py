"""Ranks that go through their calls side by side, as far as a real run would come: until two do not pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from builders import USER, board, call, collective, mark

from nsa_harness.core.collectives.alignment import Difference, differences
from nsa_harness.core.collectives.groups import groups_of
from nsa_harness.core.collectives.timeline import Timeline, timeline
from nsa_harness.core.evidence.evidence import Call, Collective, StatusFile
from nsa_harness.core.report import Place

ZERO_NS = 1_800_000_000_000_000_000  # the clock of the recorder, as the ranks were launched


def line(number: int, function: str = "step") -> Place:
    return Place(file=USER, line=number, function=function)


def entered(seq: int, at_s: float = 2.05, op: str = "all_reduce", **changes: Any) -> Collective:
    """Within the calls that the builders make, unless another time is given."""
    return collective(seq, op, created_ns=ZERO_NS + round(at_s * 1e9), **changes)


@dataclass(frozen=True, kw_only=True)
class Made:
    """One call of a program; all of them in the default group."""

    op: str = "all_reduce"
    line: int = 37
    elements: int = 4
    dtype: str = "float32"
    root: int | None = None
    step: int = 1
    position: int = 0

    def pairs(self, other: Made) -> bool:
        return (self.op, self.elements, self.dtype, self.root) == (other.op, other.elements, other.dtype, other.root)


def rounds(body: Sequence[Made], count: int) -> list[Made]:
    """A step a round."""
    return [replace(one, step=step, position=at) for step in range(1, count + 1) for at, one in enumerate(body)]


@dataclass(frozen=True, kw_only=True)
class Run:
    timelines: dict[int, Timeline]
    boards: dict[int, StatusFile]
    collectives: dict[int, tuple[Collective, ...]]

    def differences(self, ranks: Iterable[int] | None = None) -> tuple[Difference, ...]:
        """With the ranks given in this order."""
        order = list(self.timelines if ranks is None else ranks)
        timelines = {rank: self.timelines[rank] for rank in order}
        boards = {rank: self.boards[rank] for rank in order}
        return differences(timelines, groups_of(timelines, boards), boards)


def run(*programs: Sequence[Made], recorder: bool | Sequence[bool] = True, backend: str = "gloo") -> Run:
    """Every rank enters its next call when all have left theirs; a rank without a next one has ended its program."""
    stop = next(
        (at for at in range(max(map(len, programs))) if not _all_pair([one[at : at + 1] for one in programs])), None
    )
    recorders = [recorder] * len(programs) if isinstance(recorder, bool) else recorder
    known = {rank: _rank(rank, made, stop, recorders[rank]) for rank, made in enumerate(programs)}
    return Run(
        timelines={rank: timeline(rank, made, entries, backend) for rank, (made, entries) in known.items()},
        boards={rank: made for rank, (made, _) in known.items()},
        collectives={rank: entries for rank, (_, entries) in known.items()},
    )


def _all_pair(next_ones: Sequence[Sequence[Made]]) -> bool:
    return all(len(one) == 1 and one[0].pairs(next_ones[0][0]) for one in next_ones) if next_ones[0] else False


def _rank(
    rank: int, made: Sequence[Made], stop: int | None, recorder: bool
) -> tuple[StatusFile, tuple[Collective, ...]]:
    came = made if stop is None else made[: stop + 1]
    calls = [_call(at, one, at == stop) for at, one in enumerate(came)]
    entries = tuple(
        entered(
            at + 1,
            at + 1.1,
            one.op,
            sizes=((one.elements,),),
            dtypes=(one.dtype,),
            retired=at != stop,
        )
        for at, one in enumerate(came)
    )
    last = came[-1] if came else Made()
    inside = stop is not None and stop < len(came)
    stands = mark("forward" if inside else "step", step=last.step, position=last.position, at_s=len(came) + 1.0)
    facts: dict[str, Any] = {"rank": rank, "calls": tuple(calls), "zero_ns": ZERO_NS}
    return board(stands, **facts), entries if recorder else ()


def _call(at: int, one: Made, open_: bool) -> Call:
    return call(
        at + 1,
        one.op,
        place=line(one.line),
        elements=one.elements,
        dtype=one.dtype,
        peer=one.root,
        step=one.step,
        position=one.position,
        entered_s=at + 1.0,
        left_s=None if open_ else at + 1.5,
    )
