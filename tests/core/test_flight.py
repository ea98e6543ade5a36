"""The flight recorder's dump as values."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from builders import collective
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence import flight
from nsa_harness.core.evidence import flight as plain_pickle
from nsa_harness.core.evidence.evidence import Collective
from nsa_harness.core.evidence.flight import essential_collectives, parse_dump, parse_flight, plain_value


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
        Collective(
            group="0", seq=6, op="all_reduce", sizes=((4, 2),), dtypes=("float32",), retired=False, created_ns=17
        ),
    )


def test_a_type_has_the_name_that_the_program_gives_it_and_one_that_nobody_knows_keeps_its_own() -> None:
    (found,) = parse_flight(dump(entry(input_dtypes=["BFloat16", "Long", "QInt8"])))
    assert found.dtypes == ("bfloat16", "int64", "QInt8")


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
    assert essential_collectives([old, stuck, other, *recent]) == (stuck, other, *recent)


def test_of_very_many_pending_ones_the_oldest_and_the_newest_are_kept() -> None:
    pending = [collective(seq) for seq in range(1, 101)]
    assert [one.seq for one in essential_collectives(pending)] == [*range(1, 17), *range(85, 101)]


# The two backends, and sends and receives.


def test_a_transfer_is_kept_apart_with_its_own_number() -> None:
    transfer = entry(is_p2p=True, p2p_seq_id=3, profiling_name="nccl:send 0->1")
    found = parse_dump(dump(entry(), transfer).encode())
    assert found.collectives == parse_flight(dump(entry()))
    assert [(one.op, one.seq) for one in found.transfers] == [("send 0->1", 3)]


@pytest.mark.parametrize(
    ("state", "started", "retired"), [("scheduled", False, False), ("started", True, False), ("completed", True, True)]
)
def test_nccl_tells_what_has_started_on_the_device(state: str, started: bool, retired: bool) -> None:
    (found,) = parse_flight(dump(entry(profiling_name="nccl:all_reduce", state=state)))
    assert (found.op, found.started, found.retired) == ("all_reduce", started, retired)


@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_gloo_does_not_tell_what_has_started(state: str) -> None:
    assert parse_flight(dump(entry(state=state)))[0].started is None


def test_numbers_may_come_as_texts() -> None:
    (found,) = parse_flight(dump(entry(collective_seq_id="12", time_created_ns="99", input_sizes=[["4"]])))
    assert (found.seq, found.created_ns, found.sizes) == (12, 99, ((4,),))


def test_members_are_taken_where_the_dump_has_them() -> None:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}, "": {"name": "", "ranks": "[]"}}
    assert parse_dump(json.dumps({"entries": [], "pg_config": groups}).encode()).groups == {"0": (0, 1, 2)}


# The pickled form, and whoever may have written it.


def pickled(*entries: Any) -> bytes:
    """As torch does: tuples for groups, protocol 2."""
    whole = [{**one, "process_group": tuple(one["process_group"]), "frames": []} for one in entries]
    return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": whole}, protocol=2)


def test_the_pickled_form_says_the_same_as_the_json_form() -> None:
    entries = [entry(), entry(collective_seq_id=7, retired=True, time_created_ns=1 << 60)]
    assert parse_dump(pickled(*entries)) == parse_dump(dump(*entries).encode())


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(_PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_a_plain_value_survives_pickling_in_every_protocol(value: Any, protocol: int) -> None:
    assert plain_value(pickle.dumps(value, protocol=protocol)) == value


@given(_PLAIN, st.tuples(_PLAIN, _PLAIN, _PLAIN))
def test_tuples_of_any_length_are_plain(one: Any, three: tuple[Any, ...]) -> None:
    value = ((), (one,), three[:2], three, (*three, one))
    assert plain_value(pickle.dumps(value, protocol=2)) == value


class Hostile:
    """Calls what it likes when it is unpickled."""

    calls = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (Hostile.act, ())

    @staticmethod
    def act() -> None:
        Hostile.calls += 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_dump_that_names_a_function_is_refused_and_nothing_is_called(protocol: int) -> None:
    data = pickle.dumps({"entries": [Hostile()]}, protocol=protocol)
    with pytest.raises(ValueError, match=r"byte \d+ of \d+: (STACK_)?GLOBAL is no instruction for plain values"):
        parse_dump(data)
    assert Hostile.calls == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02Na.",
        b"\x80\x02]NNs.",
        b"\x80\x02}(Nu.",
        b"\x80\x02h\x07.",
        b"\x80\x02u.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02}]Ns.",
    ],
)
def test_a_broken_pickle_is_a_value_error_that_names_the_byte(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"byte (\d+|None) of \d+"):
        plain_value(data)


@pytest.mark.parametrize("data", [b"\x80\x02NN.", b"\x80\x02(N.", b"\x80\x02].", b"\x80\x02K\x03."])
def test_a_plain_value_that_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"the top is .*, no object"):
        parse_dump(data)


@given(st.binary(max_size=60) | st.integers(0, 400).map(lambda size: pickled(entry(), entry())[:size]))
def test_no_bytes_raise_anything_but_value_error(data: bytes) -> None:
    for text in (data, b"\x80" + data):
        try:
            parse_dump(text)
        except ValueError:
            continue


def test_every_cut_of_a_dump_is_refused_with_the_place_where_it_ends() -> None:
    whole = pickled(entry())
    for size in range(1, len(whole)):
        with pytest.raises(ValueError, match=rf"byte \d+ of {size}"):
            parse_dump(whole[:size])


def test_a_list_that_holds_itself_is_refused_where_a_value_is_taken_from_it() -> None:
    endless: list[Any] = []
    endless += [endless] * 3
    with pytest.raises(ValueError, match="entry 0: process_group is list, no text"):
        parse_dump(pickle.dumps({"entries": [entry(process_group=endless)]}, protocol=2))


def test_a_pickle_of_very_many_instructions_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "_MAX_INSTRUCTIONS", 100)
    with pytest.raises(ValueError, match="more than 100 instructions"):
        plain_value(pickle.dumps(list(range(200)), protocol=2))


def test_a_dump_of_very_many_bytes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 are read"):
        parse_dump(dump(entry(), entry()).encode())


def test_of_very_many_entries_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_MAX_ENTRIES", 2)
    entries = [entry(collective_seq_id=seq) for seq in (1, 2, 3)]
    assert [one.seq for one in parse_flight(dump(*entries))] == [2, 3]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"collective_seq_id": 1 << 70}, "entry 0: number has more than 64 bits"),
        ({"collective_seq_id": None}, "entry 0: number is None"),
        ({"input_sizes": [[1.5]]}, "entry 0: input_sizes is 1.5"),
        ({"input_dtypes": [[]]}, "entry 0: input_dtypes is list"),
        ({"profiling_name": {}}, "entry 0: profiling_name is dict"),
        ({"time_created_ns": True}, "entry 0: time_created_ns is True"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_flight(dump(entry(**changes)))
