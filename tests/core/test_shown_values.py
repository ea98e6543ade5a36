"""Which values a report shows, and how the files of values are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from nsa_harness.core.evidence.evidence import Source
from nsa_harness.core.evidence.frame_values import (
    FrameValues,
    ProcessValues,
    ReadWhen,
    StackValues,
    parse_py_spy_values,
    parse_values,
    unquoted,
)
from nsa_harness.core.outcome.values import shown_values
from nsa_harness.core.report import Culprit, NamedValue, Outcome, Place, RanksValue, SpecSummary, Status, Verdict
from nsa_harness.render.values import values_line

FILE = "/job/train.py"
MAIN = """\
def main(stopper, loader, rank):
    for batch in loader:
        loss = train(batch)
        if stopper.step(loss):
            break
        dist.all_reduce(loss)
    dist.barrier()
"""
STEP = """\
def step(self, loss):
    return self.bad >= self.patience
"""
SOURCES = (Source(file=FILE, first=1, text=MAIN), Source(file=FILE, first=50, text=STEP))


def of_rank(rank: int, line: int, /, *, function: str = "main", **values: str) -> ProcessValues:
    """The values of one rank; `stopper__bad` stands for the name stopper.bad, `len_loader` for len(loader)."""
    named = tuple((_name(name), text) for name, text in values.items())
    frame = FrameValues(file=FILE, line=line, function=function, values=named)
    return ProcessValues(rank=rank, when=ReadWhen.REQUEST, stacks=(StackValues(thread="MainThread", frames=(frame,)),))


def _name(word: str) -> str:
    return f"len({word[4:]})" if word.startswith("len_") else word.replace("__", ".")


def outcome(status: Status = Status.HANG, line: int | None = 4) -> Outcome:
    place = Place(file=FILE, line=line, function="main")
    return Outcome(
        spec=SpecSummary(scenario="train", about=""),
        verdict=Verdict(status=status, kind=None, cause="rank_conditional_collective", summary=""),
        culprit=Culprit(ranks=(0,), step=None, collective=None, place=place if line else None),
        ending_text="",
    )


def shown(*ranks: ProcessValues, of: Outcome | None = None) -> dict[str, dict[str, tuple[int, ...]]]:
    return {value.name: by_text(value) for value in shown_values(of or outcome(), SOURCES, ranks)}


def by_text(value: NamedValue) -> Mapping[str, tuple[int, ...]]:
    return {equal.value: equal.ranks for equal in value.values}


def test_the_condition_comes_first_with_what_is_equal_in_it_and_elsewhere_only_what_differs() -> None:
    common = {"stopper__patience": "3", "len_loader": "18", "mode": "'train'", "rank": "0"}
    ranks = [
        of_rank(0, 7, **common, stopper__bad="3", loss="0.5"),
        of_rank(1, 6, **{**common, "rank": "1"}, stopper__bad="1", loss="0.7"),
        of_rank(2, 6, **{**common, "rank": "2"}, stopper__bad="1", loss="0.6"),
    ]
    assert shown(*ranks) == {
        "stopper.bad": {"3": (0,), "1": (1, 2)},
        "stopper.patience": {"3": (0, 1, 2)},
        "loss": {"0.5": (0,), "0.7": (1,), "0.6": (2,)},
    }


def test_a_loop_around_a_line_on_a_stack_decides_if_its_length_differs() -> None:
    ranks = [of_rank(0, 7, len_loader="17", loader__size="4"), of_rank(1, 6, len_loader="18", loader__size="4")]
    (first, *others) = shown_values(outcome(line=None), SOURCES, ranks)
    assert (first.name, first.line, first.decides, others) == ("len(loader)", 2, True, [])


def test_other_variables_are_shown_if_they_differ_and_are_plain() -> None:
    of_both = [
        of_rank(0, 7, step="7", best="0.25", batch="float32 [4] crc 00000001", mode="'eval'", rank="0", world="2"),
        of_rank(1, 6, step="8", best="0.5", batch="float32 [4] crc 00000002", mode="'train'", rank="1", world="2"),
    ]
    values = shown_values(outcome(), SOURCES, of_both)
    assert [(value.name, value.decides, value.line) for value in values] == [
        ("step", False, None),
        ("mode", False, None),
    ]


def test_tensors_differ_in_their_shape_only() -> None:
    ranks = [of_rank(0, 6, loss="float32 [4] crc 00000001"), of_rank(1, 6, loss="float32 [3] crc 00000002")]
    assert shown(*ranks) == {"loss": {"float32 [4]": (0,), "float32 [3]": (1,)}}


def test_the_contents_of_a_list_are_left_out_where_its_length_differs() -> None:
    ranks = [
        of_rank(0, 6, loader="9 items crc 00000001", len_loader="9"),
        of_rank(1, 6, loader="8 items crc 00000002", len_loader="8"),
    ]
    assert list(shown(*ranks)) == ["len(loader)"]


def test_the_order_of_what_a_loop_iterates_over_counts_and_of_other_containers_only_the_length() -> None:
    ranks = [
        of_rank(0, 6, loader="9 items crc 00000001", loss="2 items crc 00000001", groups="1 items crc 00000001"),
        of_rank(1, 6, loader="9 items crc 00000002", loss="2 items crc 00000002", groups="None"),
    ]
    found = shown(*ranks, of=outcome(line=None))
    assert found == {"loader": {"9 items crc 00000001": (0,), "9 items crc 00000002": (1,)}}


def test_two_names_of_one_value_are_shown_once() -> None:
    values = {"stopper__bad": "3", "step": "7"}, {"stopper__bad": "1", "step": "8"}
    inner = [FrameValues(file=FILE, line=51, function="step", values=(("self.bad", text),)) for text in "31"]
    ranks = [of_rank(rank, 6, **values[rank]) for rank in range(2)]
    both = [
        replace(each, stacks=(replace(each.stacks[0], frames=(inner[each.rank], *each.stacks[0].frames)),))
        for each in ranks
    ]
    assert list(shown(*both)) == ["stopper.bad", "step"]


def test_equal_arguments_of_a_call_are_left_out() -> None:
    ranks = [of_rank(0, 6, loss="0.5", args="1"), of_rank(1, 7, loss="0.5", args="1")]
    assert shown(*ranks, of=outcome(line=None)) == {}


def test_the_condition_of_the_cause_is_shown_even_if_one_rank_alone_has_its_values() -> None:
    ranks = [of_rank(0, 6, stopper__bad="1"), of_rank(1, 52, function="run", step="8")]
    assert shown(*ranks) == {"stopper.bad": {"1": (0,)}}


@pytest.mark.parametrize("status", [Status.PASS, Status.SKIP])
def test_a_run_without_a_failure_shows_none(status: Status) -> None:
    assert shown(of_rank(0, 6, stopper__bad="3"), of_rank(1, 6, stopper__bad="1"), of=outcome(status)) == {}


def test_many_ranks_are_few_classes() -> None:
    ranks = [of_rank(rank, 6, stopper__bad="3" if rank == 9 else "1") for rank in range(64)]
    others = tuple(rank for rank in range(64) if rank != 9)
    assert shown(*ranks) == {"stopper.bad": {"1": others, "3": (9,)}}


# Files.

RECORD = {
    "at_ns": 1,
    "reason": "request",
    "is_cut": False,
    "threads": [
        {
            "name": "MainThread",
            "frames": [
                {"file": FILE, "line": 4, "function": "main", "values": [["bad", "int", "3"], ["len(x)", "int", "1"]]}
            ],
        }
    ],
}


def test_the_file_of_the_probe_is_read() -> None:
    values = parse_values(json.dumps(RECORD), 5)
    (stack,) = values.stacks
    assert (values.rank, values.when, values.is_cut, stack.thread) == (5, ReadWhen.REQUEST, False, "MainThread")
    assert stack.frames[0].values == (("bad", "3"), ("len(x)", "1"))


def damaged() -> list[str]:
    whole = json.dumps(RECORD)
    replaced = [("4", "null"), ('"request"', '"never"'), ("[[", "[3, ["), ('"threads"', '"thread"'), ("4", "1e999")]
    texts = [whole.replace(old, new, 1) for old, new in replaced]
    return ["", "[]", "null", "7", '{"threads": 7}', "[" * 100_000, whole[:-9], *texts]


@pytest.mark.parametrize("text", damaged())
def test_a_damaged_file_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_values(text, 0)
    with pytest.raises(ValueError, match=r"."):
        parse_py_spy_values(text.replace("[]", "7"), 0)


def test_a_huge_file_is_cut() -> None:
    names = [[f"name{number}" * 30, "str", "x" * 300] for number in range(100)]
    frame = {"file": FILE, "line": 4, "function": "main", "values": names}
    threads = [{"name": f"{number}" * 900, "frames": [frame] * 20} for number in range(10)]
    values = parse_values(json.dumps({**RECORD, "threads": threads}), 0)
    size = sum(len(name) + len(text) for stack in values.stacks for one in stack.frames for name, text in one.values)
    assert values.is_cut
    assert size < 100_000
    assert len(values.stacks) <= 8


def test_py_spy_gives_the_plain_values_of_the_programs_own_frames() -> None:
    shown_by_py_spy = [
        {"thread_name": "reader", "frames": [{"filename": FILE, "line": 9, "name": "read", "locals": None}]},
        {
            "thread_name": "MainThread",
            "frames": [
                {"filename": "/x/lib/python3.11/threading.py", "line": 3, "name": "wait", "locals": []},
                {
                    "filename": FILE,
                    "line": 4,
                    "name": "main",
                    "locals": [
                        {"name": "bad", "repr": "3"},
                        {"name": "mode", "repr": '"eval"'},
                        {"name": "note", "repr": '"' + "x" * 50 + '"'},
                        {"name": "model", "repr": "<DDP at 0x7f3b5c>"},
                    ],
                },
            ],
        },
    ]
    values = parse_py_spy_values(json.dumps(shown_by_py_spy), 1)
    assert [stack.thread for stack in values.stacks] == ["MainThread", "reader"]
    assert [frame.function for frame in values.stacks[0].frames] == ["main"]
    assert values.stacks[0].frames[0].values == (
        ("bad", "3"), ("mode", "'eval'"), ("note", "52 characters, crc fd92804b"),
    )  # fmt: skip


def test_the_quotes_of_a_text_are_no_part_of_it() -> None:
    assert [unquoted(text) for text in ("'a'", '"b"', "3", "'", "{'c': 1}")] == [
        ("a", "'"), ("b", '"'), ("3", ""), ("'", ""), ("{'c': 1}", ""),
    ]  # fmt: skip


def test_without_values_the_names_that_decide_are_shown_with_the_lines_that_set_them() -> None:
    of = replace(outcome(), stacks=())
    assert shown_values(of, SOURCES, ()) == ()
    values = shown_values(of, SOURCES, (), with_definitions=True)
    assert [(value.name, value.line, value.definitions) for value in values] == [
        ("stopper.bad", 4, ()),
        ("stopper.patience", 4, ()),
        ("loss", 4, (3, 2)),
        ("loader", 2, ()),
    ]
    assert values_line(replace(of, values=values[2:]), 80) == (
        "loss  decides line 4, set in 3, 2     loader  decides line 2"
    )


def test_a_long_value_that_all_ranks_share_is_written_once() -> None:
    words = "['train.py', '--lr', '3']"
    equal = NamedValue(
        name="sys.argv", file="train.py", function="main", line=3, decides=True,
        values=(RanksValue(ranks=(0, 1, 2), value=words),),
    )  # fmt: skip
    short = replace(equal, name="step", values=(RanksValue(ranks=(0, 1, 2), value="2"),))
    line = values_line(replace(outcome(), values=(equal, short)), 100)
    assert line == f"sys.argv  {words} on all ranks     step  2 | 2 | 2"


def test_values_keep_the_lines_that_set_them_only_where_the_job_cannot_be_launched_again() -> None:
    ranks = [of_rank(0, 7, stopper__bad="3", loss="0.5"), of_rank(1, 6, stopper__bad="1", loss="0.5")]
    found = {value.name: value.definitions for value in shown_values(outcome(), SOURCES, ranks, with_definitions=True)}
    assert found == {"stopper.bad": (), "loss": (3, 2)}
    assert {value.definitions for value in shown_values(outcome(), SOURCES, ranks)} == {()}
