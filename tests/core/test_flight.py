"""The flight recorder's dump as values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import collective
from hypothesis import given
from hypothesis import strategies as st

from harness.core.observed.evidence import Collective
from harness.core.observed.flight import essential, parse_flight


def entry(**changes: Any) -> dict[str, Any]:
    facts = {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 6,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "time_created_ns": 17,
        "is_p2p": False,
    }
    return {**facts, **changes}


def dump(*entries: Any) -> str:
    return json.dumps({"version": "2.10", "entries": list(entries)})


def test_an_entry_becomes_a_collective_without_the_backends_name() -> None:
    assert parse_flight(dump(entry())) == (
        Collective(group="0", seq=6, op="all_reduce", sizes=((4, 2),), dtypes=("Float",), retired=False, created_ns=17),
    )


@pytest.mark.parametrize(
    ("changes", "retired"),
    [
        ({"retired": True}, True),
        ({"retired": "true"}, True),
        ({"retired": "1"}, True),
        ({"state": "completed"}, True),
        ({"retired": "false"}, False),
        ({"retired": None}, False),
        ({"state": "started"}, False),
    ],
)
def test_completion_is_said_in_several_ways(changes: dict[str, Any], retired: bool) -> None:
    assert parse_flight(dump(entry(**changes)))[0].retired is retired


def test_a_send_or_receive_is_no_collective() -> None:
    assert parse_flight(dump(entry(is_p2p=True), entry(collective_seq_id=7))) == parse_flight(
        dump(entry(collective_seq_id=7))
    )


def test_a_dump_without_entries_holds_nothing() -> None:
    assert parse_flight("{}") == ()
    assert parse_flight('{"entries": null}') == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"entries": 5}',
        dump(3),
        dump({}),
        dump(entry(process_group=[])),
        dump(entry(collective_seq_id="x")),
        dump(entry(input_sizes=[3])),
        dump(entry(time_created_ns=float("inf"))),
        "[" * 100_000,
    ],
)
def test_what_is_no_dump_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_flight(text)


_VALUES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3) | st.lists(st.integers())


@given(st.text() | st.dictionaries(st.sampled_from(sorted(entry())), _VALUES).map(lambda one: dump({**entry(), **one})))
def test_parsing_a_dump_never_raises_anything_but_value_error(text: str) -> None:
    try:
        assert all(isinstance(one, Collective) for one in parse_flight(text))
    except ValueError:
        return


def test_of_each_group_the_newest_and_what_is_pending_is_kept() -> None:
    old = collective(1, retired=True)
    stuck = collective(2)
    recent = [collective(seq, retired=True) for seq in range(3, 19)]
    other = collective(1, group="1", retired=True)
    assert essential([old, stuck, other, *recent]) == (stuck, other, *recent)


def test_of_very_many_pending_ones_the_oldest_and_the_newest_are_kept() -> None:
    pending = [collective(seq) for seq in range(1, 101)]
    assert [one.seq for one in essential(pending)] == [*range(1, 17), *range(85, 101)]
