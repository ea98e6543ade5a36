"""A rank's timeline: what of both sources is one event, and from where on nothing is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import board, call, collective
from lockstep import ZERO_NS, entered, line

from nsa_harness.core.collectives.timeline import Event, Field, Timeline, differing_field, field_value, timeline
from nsa_harness.core.evidence.evidence import Call, Collective, StatusFile


def of(made: StatusFile | None, *entries: Collective, backend: str = "gloo") -> Timeline:
    return timeline(0, made, entries, backend)


def clocked(*calls: Call, **changes: Any) -> StatusFile:
    return board(calls=calls, zero_ns=ZERO_NS, **changes)


def only(line_of: Timeline) -> Event:
    (event,) = line_of.events
    return event


CALLED = call(1, position=5, entered_s=2.0, left_s=2.2)


def test_a_call_and_the_number_that_the_recorder_gave_it_are_one_event() -> None:
    event = only(of(clocked(CALLED), entered(7, 2.1, retired=True)))
    assert (event.seq, event.op, event.place, event.step, event.position) == (7, "all_reduce", line(37), 1, 5)
    assert (event.from_python, event.is_done, event.needs_equal_sizes) == (True, True, True)


def test_without_a_common_clock_nobody_knows_which_call_a_number_belongs_to_and_the_calls_alone_count() -> None:
    event = only(of(board(calls=(CALLED,)), collective(7)))
    assert (event.seq, event.from_python, event.place) == (None, True, line(37))
    below = only(of(board(), collective(7)))
    assert (below.seq, below.from_python) == (7, False), "of a group that was never called from Python"


def test_what_ddp_enters_below_python_has_no_line_and_its_sizes_make_its_site() -> None:
    event = only(of(clocked(), entered(3, sizes=((2, 3), (4,)))))
    assert (event.from_python, event.place, event.elements, event.root) == (False, None, 10, None)
    assert event.site == ("0", "all_reduce", 10)
    assert only(of(clocked(CALLED))).site == ("0", "all_reduce", line(37).file, 37, ())


def test_a_call_that_enters_several_is_one_event_that_is_done_with_the_last_of_them() -> None:
    event = only(of(clocked(CALLED), entered(3, 2.05, retired=True), entered(4, 2.1)))
    assert (event.seq, event.is_done) == (3, False)
    all_done = only(of(clocked(CALLED), entered(3, 2.05, retired=True), entered(4, 2.1, retired=True)))
    assert all_done.is_done
    apart = of(clocked(CALLED, call(2, entered_s=3.0, left_s=3.2)), entered(3, 2.05), entered(4, 3.1))
    assert [one.seq for one in apart.events] == [3, 4]


def test_what_is_older_than_a_hole_in_the_numbers_is_no_part_of_it() -> None:
    kept = of(None, collective(1), collective(2), *(collective(seq) for seq in (7, 8, 9)))
    assert [one.seq for one in kept.events] == [7, 8, 9]
    twice = of(None, *(collective(seq) for seq in (1, 4, 8, 9)))
    assert [one.seq for one in twice.events] == [8, 9]
    other = of(None, collective(1), collective(5), collective(3, group="1", created_ns=9))
    assert [(one.group, one.seq) for one in other.events] == [("0", 5), ("1", 3)], "a hole of one group alone"


@pytest.mark.parametrize(
    ("made", "entries", "whole"),
    [
        (clocked(CALLED), [], True),
        (clocked(replace(CALLED, number=257)), [], False),
        (clocked(), [entered(1)], True),
        (clocked(), [entered(2)], False),
        (clocked(), [entered(1), entered(2, group="1")], False),
        (clocked(), [entered(1), entered(3, 2.2)], False),
    ],
    ids=["all calls", "older calls overwritten", "all numbers", "older numbers lost", "of one group", "a hole"],
)
def test_it_says_whether_it_goes_back_to_the_beginning(
    made: StatusFile, entries: list[Collective], whole: bool
) -> None:
    assert of(made, *entries).is_complete is whole


def test_what_made_the_groups_is_no_event_and_yet_shows_that_nothing_is_missing_before_the_first_one() -> None:
    """As in every program: its first call makes the default group."""
    assert of(clocked(call(1, "init_process_group"), call(2, entered_s=3.0))).is_complete


def test_calls_older_than_what_is_known_below_python_are_left_out() -> None:
    """What lay between them below Python is lost, so they are no timeline."""
    old, new = call(1, entered_s=1.0, left_s=1.1), call(2, "barrier", entered_s=3.0, left_s=3.1)
    bucket = entered(9, 2.0, retired=True)
    assert [one.op for one in of(clocked(old, new), bucket, entered(10, 3.05)).events] == ["all_reduce", "barrier"]
    assert [one.seq for one in of(clocked(old, new), bucket, entered(10, 3.05)).events] == [9, 10]
    both = of(clocked(old, new), entered(9, 1.05), entered(10, 3.05))
    assert len(both.events) == 2, "nothing of it lies below Python"


@pytest.mark.parametrize("op", ["wait all_reduce", "init_process_group", "new_group", "destroy_process_group"])
def test_waits_and_the_making_of_groups_are_no_events(op: str) -> None:
    assert of(clocked(call(1, op))).events == ()


def test_transfers_are_events_but_of_no_group() -> None:
    line_of = of(clocked(call(1, "send", peer=1), call(2, entered_s=3.0)))
    assert [one.is_transfer for one in line_of.events] == [True, False]
    assert [one.op for one in line_of.of_group("0")] == ["all_reduce"]
    assert line_of.of_group("1") == ()


def test_below_python_the_step_is_told_by_the_clock_and_unknown_before_the_oldest_one_that_is_remembered() -> None:
    whole = clocked(steps_s=((1, 1.0), (2, 2.0)))
    assert [only(of(whole, entered(1, at_s))).step for at_s in (0.5, 1.5, 2.5)] == [1, 2, 3]
    lap = clocked(steps_s=((8, 1.0), (9, 2.0)))
    assert [only(of(lap, entered(1, at_s))).step for at_s in (0.5, 1.5, 2.5)] == [None, 9, 10]
    assert only(of(clocked(), entered(1))).step is None


# What may not differ.


def pair(op: str, backend: str = "gloo", **changes: Any) -> tuple[Event, Event]:
    made = call(1, op, entered_s=2.0)
    return only(of(clocked(made), backend=backend)), only(of(clocked(replace(made, **changes)), backend=backend))


@pytest.mark.parametrize(
    ("op", "changes", "field"),
    [
        ("all_reduce", {"elements": 5}, Field.SHAPE),
        ("all_reduce", {"dtype": "torch.float64"}, Field.DTYPE),
        ("all_reduce", {"elements": 5, "dtype": "torch.float64"}, Field.SHAPE),
        ("broadcast", {"peer": 1}, None),
        ("scatter", {"elements": 5}, None),
        ("gather", {"elements": 0}, None),
        ("all_to_all", {"elements": 9}, None),
        ("all_reduce", {}, None),
    ],
)
def test_the_fields_in_which_two_entries_of_one_operation_may_not_differ(
    op: str, changes: dict[str, Any], field: Field | None
) -> None:
    assert differing_field(*pair(op, **changes)) is field


def test_roots_differ_where_both_named_one() -> None:
    one, other = pair("broadcast", peer=1)
    assert differing_field(replace(one, root=0), other) is Field.ROOT
    assert (field_value(other, Field.ROOT), field_value(other, Field.SHAPE), field_value(other, Field.DTYPE)) == (
        1,
        4,
        "torch.float32",
    )


@pytest.mark.parametrize(("backend", "field"), [("gloo", Field.SHAPE), ("nccl", None)])
def test_an_uneven_all_gather_is_wrong_on_gloo_only(backend: str, field: Field | None) -> None:
    assert differing_field(*pair("all_gather", backend, elements=9)) is field


def test_another_shape_of_as_many_elements_is_the_same_payload() -> None:
    one, other = (only(of(clocked(), entered(1, sizes=sizes))) for sizes in (((4,),), ((2, 2),)))
    assert differing_field(one, other) is None
    assert differing_field(one, only(of(clocked(), entered(1, sizes=((4,), (1,)))))) is Field.SHAPE


def test_two_operations_have_no_field_to_differ_in() -> None:
    one, other = pair("all_reduce", elements=5)
    assert differing_field(one, replace(other, op="reduce")) is None
