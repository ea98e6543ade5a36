"""The least that repeats a run: calls cut to where they part, as a script of known words, or the reason for none."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from builders import board, call, collective, ended, rank_evidence, spec
from builders import evidence as evidence_of
from hypothesis import given
from hypothesis import strategies as st
from runs import run

from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.outcome.reproduction import (
    COLLECTIVES,
    MAKERS,
    MOST_LINES,
    STATEMENTS,
    TRANSFERS,
    NotRepeatableError,
    Reproduction,
    ScriptCall,
    diverging_calls,
    ranks_outside_calls,
    reproduction,
    script,
)
from nsa_harness.core.plan import Fault
from nsa_harness.core.redaction import shell_words
from nsa_harness.core.report import Outcome, Status

HANG, FAIL, PASS = Status.HANG, Status.FAIL, Status.PASS
HOSTILE = '"""]; import os; os.system("x") #\n'


def recorded(*ranks: Any, groups: dict[str, tuple[int, ...]] | None = None) -> Evidence:
    """Each rank by its collectives: (operation, done) or collectives themselves, on one group unless they say so."""
    return evidence_of(*(
        rank_evidence(number, collectives=made, status_file=board(groups=groups or {}))
        for number, made in enumerate(ranks)
    ))  # fmt: skip


def done(seq: int, op: str = "all_reduce", **changes: Any) -> Any:
    return collective(seq, op, retired=True, created_ns=changes.pop("at", seq), **changes)


def open_(seq: int, op: str = "all_reduce", **changes: Any) -> Any:
    return collective(seq, op, created_ns=changes.pop("at", seq), **changes)


def hung(cause: str = "collective_order_mismatch", status: Status = HANG) -> Outcome:
    return run("ddp", status, cause=cause)


def made(evidence: Evidence, outcome: Outcome, **changes: Any) -> Reproduction:
    told = reproduction(replace(spec(), ranks=evidence.world_size, **changes), evidence, outcome, "python train.py")
    assert told is not None
    return told


def names(calls: dict[int, tuple[ScriptCall, ...]]) -> dict[int, list[str]]:
    return {rank: [f"{one.operation} {one.number}" for one in sequence] for rank, sequence in calls.items()}


MISMATCH = recorded(
    (done(1), done(2), done(3), open_(4)),
    (done(1), done(2), done(3), open_(4, "broadcast")),
)


def test_what_all_did_alike_is_left_out_but_for_the_last_of_it() -> None:
    calls = diverging_calls(MISMATCH, from_python=False)
    assert names(calls) == {0: ["all_reduce 3", "all_reduce 4"], 1: ["all_reduce 3", "broadcast 4"]}


def test_what_one_rank_no_longer_remembers_is_not_counted_as_a_difference() -> None:
    short = recorded((done(1), done(2), done(3), open_(4)), (done(3),))
    assert names(diverging_calls(short, from_python=False)) == {
        0: ["all_reduce 3", "all_reduce 4"],
        1: ["all_reduce 3"],
    }


def test_a_group_in_which_all_agree_to_the_end_is_left_out() -> None:
    members = {"dp": (0, 1)}
    told = recorded(
        (done(1, group="dp"), open_(1, group="0", at=2)),
        (done(1, group="dp"), open_(1, "barrier", at=2)),
        groups=members,
    )
    assert names(diverging_calls(told, from_python=False)) == {0: ["all_reduce 1"], 1: ["barrier 1"]}


def test_two_groups_of_the_same_ranks_stay_two() -> None:
    groups = {"a": (0, 1), "b": (0, 1)}
    crossed = recorded(
        (open_(1, group="a", at=1), open_(1, group="b", at=2)),
        (open_(1, group="b", at=1), open_(1, group="a", at=2)),
        groups=groups,
    )
    told = made(crossed, hung("cross_group_deadlock"))
    assert told.script is not None
    assert "GROUPS = [[0, 1], [0, 1]]" in told.script
    assert calls_of(told.script) == {
        0: [("all_reduce", 0, 4, "float32", None), ("all_reduce", 1, 4, "float32", None)],
        1: [("all_reduce", 1, 4, "float32", None), ("all_reduce", 0, 4, "float32", None)],
    }


def test_transfers_come_from_the_calls_of_each_rank() -> None:
    other = board(calls=())
    made_calls = diverging_calls(
        evidence_of(
            rank_evidence(
                0, status_file=replace(other, calls=(call(1, "send", peer=1), call(2, "send", peer=1, left_s=None)))
            ),
            rank_evidence(
                1, status_file=replace(other, calls=(call(1, "recv", peer=0), call(2, "barrier", left_s=None)))
            ),
        ),
        from_python=True,
    )
    assert names(made_calls) == {0: ["send 1", "send 2"], 1: ["recv 1", "barrier 1"]}


def with_calls(*ranks: Any) -> Evidence:
    return evidence_of(*(rank_evidence(number, status_file=board(calls=calls)) for number, calls in enumerate(ranks)))


def test_ranks_that_name_other_roots_are_repeated_with_their_roots() -> None:
    parted = with_calls(
        *((call(1, left_s=2.0), call(2, "broadcast", peer=root, left_s=None)) for root in (1, 2, 1)),
    )
    told = made(parted, hung("root_mismatch"))
    assert told.no_script_reason == ""
    assert told.script is not None
    assert calls_of(told.script) == {
        rank: [("all_reduce", None, 4, "float32", None), ("broadcast", None, 4, "float32", root)]
        for rank, root in enumerate((1, 2, 1))
    }
    assert "    first = first if peer is None else peer\n" in told.script


def test_a_root_that_is_the_first_of_its_group_needs_no_word() -> None:
    parted = with_calls((call(1, "broadcast", peer=0, left_s=None),), (call(1, "broadcast", peer=1, left_s=None),))
    told = made(parted, hung("root_mismatch"))
    assert told.script is not None
    assert {rank: made[0][-1] for rank, made in calls_of(told.script).items()} == {0: None, 1: 1}
    alike = with_calls(
        *[(call(1, "broadcast", peer=0, left_s=2.0), call(2, left_s=None)), (call(1, "broadcast", peer=0),)]
    )
    assert "first = first" not in (made(alike, hung("p2p_unmatched")).script or "")


def test_only_steps_that_every_rank_remembers_whole_are_counted() -> None:
    long = board(calls=tuple(call(number, step=number, left_s=2.0) for number in range(5, 9)))
    short = board(calls=tuple(call(number, step=number, left_s=2.0) for number in range(1, 8)))
    calls = diverging_calls(
        evidence_of(rank_evidence(0, status_file=long), rank_evidence(1, status_file=short)), from_python=True
    )
    assert names(calls) == {0: ["all_reduce 2", "all_reduce 3"], 1: ["all_reduce 2"]}


def test_a_call_without_a_form_in_the_script_is_the_reason_for_none() -> None:
    strange = recorded((open_(1, HOSTILE),), (open_(1),))
    with pytest.raises(NotRepeatableError):
        diverging_calls(strange, from_python=False)
    told = made(strange, hung())
    assert (told.script, told.no_script_reason) == (None, "the ranks made a call that the script has no form of")


def test_a_rank_that_stood_elsewhere_is_the_reason_for_none() -> None:
    told = recorded((open_(1),), (done(1),))
    assert ranks_outside_calls(told) == (1,)
    assert made(told, hung()).no_script_reason.startswith("rank 1 was outside every recorded call")
    gone = evidence_of(*(replace(rank, exit=ended(rank.rank)) for rank in told.ranks))
    assert ranks_outside_calls(gone) == ()


@pytest.mark.parametrize("cause", ["lock_cycle", "exception", "pipe_full", "unknown"])
def test_a_cause_outside_the_calls_gets_its_command_line_and_no_pretence(cause: str) -> None:
    told = made(MISMATCH, hung(cause), env=(("A", "x y"),), cwd="sub dir")
    assert told.script is None
    assert "the cause lies in no call to other ranks" in told.no_script_reason
    assert told.command == "# The program itself, without the harness:\ncd 'sub dir'\nA='x y' python train.py\n"


def test_a_planted_fault_is_not_in_the_bare_line_and_that_is_said() -> None:
    told = made(MISMATCH, hung("lock_cycle"), fault=Fault(kind="deadlock", rank=1))
    assert "planted by the harness" in told.command


@pytest.mark.parametrize("status", [PASS, Status.SKIP, Status.ERROR])
def test_what_neither_failed_nor_hung_has_nothing_to_repeat(status: Status) -> None:
    assert reproduction(spec(), MISMATCH, run("ddp", status), "python train.py") is None


def test_equal_calls_on_every_rank_repeat_nothing() -> None:
    same = recorded((open_(1),), (open_(1),))
    assert made(same, hung()).no_script_reason == "the record holds no call in which the ranks part"


def test_the_command_of_the_script_stands_beside_that_of_the_program() -> None:
    assert made(MISMATCH, hung()).command.endswith("torchrun --standalone --nproc-per-node=2 repro.py\n")


def test_sizes_and_types_are_those_of_the_record() -> None:
    uneven = recorded((open_(1, sizes=((2, 3),), dtypes=("bfloat16",)),), (open_(1, sizes=((7,),), dtypes=("int64",)),))
    told = made(uneven, hung("shape_mismatch")).script
    assert told is not None
    assert calls_of(told) == {
        0: [("all_reduce", None, 6, "bfloat16", None)],
        1: [("all_reduce", None, 7, "int64", None)],
    }


def test_every_operation_that_a_record_can_name_has_its_statement() -> None:
    assert {*COLLECTIVES.values(), *MAKERS.values(), *TRANSFERS} == set(STATEMENTS)


_MADE = st.builds(
    ScriptCall,
    operation=st.sampled_from(sorted(STATEMENTS)),
    group=st.sampled_from(["", "a", HOSTILE]),
    members=st.sampled_from([(0, 1), (1, 2), (0, 1, 2)]),
    elements=st.integers(1, 1 << 24),
    dtype=st.sampled_from(["float32", "int64"]),
    peer=st.none() | st.integers(0, 2),
)


@given(st.dictionaries(st.integers(0, 7), st.lists(_MADE, max_size=30), min_size=1))
def test_a_script_is_at_most_a_screen_of_python_and_holds_known_words_alone(calls: dict[int, list[ScriptCall]]) -> None:
    text = script(calls, "p2p_unmatched")
    if text is not None:
        ast.parse(text)
        assert text.count("\n") <= MOST_LINES
        assert "os.system" not in text


def test_more_than_fits_a_screen_is_no_script() -> None:
    calls = {rank: [made_call(f"g{rank}", number) for number in range(9)] for rank in range(64)}
    assert script(calls, "cross_group_deadlock") is None


def made_call(group: str, number: int) -> ScriptCall:
    return ScriptCall(operation="all_reduce", group=group, members=(0, 1), elements=number, dtype="float32")


def calls_of(text: str) -> Any:
    found = re.search(r"^CALLS = (.*?)^GROUPS", text, re.M | re.S)
    assert found
    return ast.literal_eval(found[1])


@pytest.mark.parametrize(
    "word", ["\x1b[2J\x1b]0;x\x07", "a'b\\\n\t$(x)", "\x9b31m é", "\ud800", "plain", "two words", "\udcff7"]
)
def test_what_a_terminal_would_act_on_is_typed_and_means_the_same(word: str) -> None:
    text = shell_words([word])
    assert text.isprintable()
    said = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, check=True).stdout
    assert said == word.encode("utf-8", "surrogatepass" if word == "\ud800" else "surrogateescape")


def test_no_word_of_the_environment_reaches_the_terminal_as_it_is() -> None:
    told = made(MISMATCH, hung(), env=(("TITLE", "\x1b]0;x\x07"),), cwd="/\x1b[2J")
    assert all(line.isprintable() for line in told.command.splitlines())
    assert "TITLE=$'\\e]0;x\\007'" in told.command
