"""The collectives around the place where ranks part, as columns that can be read beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from builders import collective

from nsa_harness.core.collectives.alignment import differences
from nsa_harness.core.collectives.divergence import divergence
from nsa_harness.core.collectives.groups import groups_of
from nsa_harness.core.collectives.timeline import timeline
from nsa_harness.core.evidence.evidence import Collective
from nsa_harness.core.report import Divergence


def side_by_side(*ranks: Sequence[Collective], blamed: tuple[int, ...] = ()) -> Divergence | None:
    lines = {rank: timeline(rank, None, entries, "gloo") for rank, entries in enumerate(ranks)}
    (found, *_) = differences(lines, groups_of(lines, {}), {})
    return divergence(found, lines, blamed)


def done(*numbers: int) -> list[Collective]:
    return [collective(seq, retired=True) for seq in numbers]


def inside(seq: int, **changes: Any) -> Collective:
    return collective(seq, retired=False, **changes)


def told(found: Divergence | None) -> list[list[str | None]]:
    assert found is not None
    signs = {True: " inside", False: ""}
    return [[one and f"{one.op} #{one.seq}{signs[one.inside]}" for one in row] for row in found.rows]


def test_ranks_that_did_the_same_share_a_column_and_the_culprit_stands_first() -> None:
    same = [*done(1, 2, 3, 4, 5), inside(6)]
    alone = [*done(1, 2, 3, 4, 5), inside(6, op="barrier")]
    found = side_by_side(same, same, alone, same, blamed=(2,))
    assert found is not None
    assert (found.ranks, found.shared) == (((2,), (0, 1, 3)), 3)
    assert told(found) == [
        *([f"all_reduce #{seq}"] * 2 for seq in (3, 4, 5)),
        ["barrier #6 inside", "all_reduce #6 inside"],
    ]


def test_a_rank_that_never_came_has_nothing_there_and_few_rows_follow() -> None:
    found = side_by_side([*done(1), inside(2)], done(1))
    assert found is not None
    assert (found.ranks, found.shared) == (((0,), (1,)), 1)
    assert told(found) == [["all_reduce #1", "all_reduce #1"], ["all_reduce #2 inside", None]]


def test_what_the_ranks_gave_to_the_same_call_is_told() -> None:
    found = side_by_side([inside(1, sizes=((4,),))], [inside(1, sizes=((8,),))])
    assert found is not None
    assert [[one and one.elements for one in row] for row in found.rows] == [[4, 8]]


def test_of_many_ranks_that_all_did_otherwise_few_are_shown() -> None:
    found = side_by_side(*([inside(1, sizes=((4 + rank,),))] for rank in range(40)), blamed=(39,))
    assert found is not None
    assert (len(found.ranks), found.ranks[0]) == (6, (39,))


def test_ranks_in_one_column_are_no_divergence() -> None:
    """What parts them lies in the order of groups, or in nothing that a column tells."""
    same = [done(1, 2), done(1, 2)]
    lines = {rank: timeline(rank, None, entries, "gloo") for rank, entries in enumerate(same)}
    apart = timeline(1, None, done(1), "gloo")
    (found, *_) = differences({**lines, 1: apart}, groups_of(lines, {}), {})
    assert divergence(replace(found, entered_events=(), absent=(0, 1)), lines, ()) is None
