"""Native frames: when they are asked for, how the tools' answers are read, and the causes that rest on them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import board, diagnose, frame, in_all_reduce, process, rank_snapshot, sample, stack, stalled, task

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.stacks import parse_native, parse_pystack, stack_that_needs_native_frames
from nsa_harness.core.verdict.verdict import judge

LEAF = frame(17)
HELD = replace(stack(LEAF), gil=True)
FREE = stack(LEAF)


def running(**changes: object) -> object:
    return process(tasks=(task(100, **{"state": "R", "syscall": "running", **changes}),))


def standing(syscall: str) -> object:
    return process(tasks=(task(100, syscall=syscall),))


@pytest.mark.parametrize(
    ("stacks", "target", "last", "wanted"),
    [
        ((HELD,), standing("clock_nanosleep"), None, HELD),
        ((FREE,), standing("clock_nanosleep"), LEAF, None),
        ((HELD,), running(), None, None),
        ((HELD,), running(), LEAF, HELD),
        ((FREE,), running(), frame(18), None),
        ((FREE,), standing("999"), LEAF, FREE),
        ((FREE,), standing("futex"), LEAF, None),
        ((HELD,), replace(standing("read"), state="T"), LEAF, None),
        ((HELD,), replace(standing("read"), state="D"), LEAF, None),
        ((replace(HELD, source="faulthandler"),), standing("read"), LEAF, None),
        ((), standing("read"), LEAF, None),
    ],
    ids=[
        "keeps the lock in a sleep", "sleeps without it", "runs, seen once", "runs on in the same line",
        "runs elsewhere", "unknown call", "known call", "stopped", "in the kernel", "no ptrace", "no stack",
    ],
)  # fmt: skip
def test_native_frames_are_wanted_only_where_python_cannot_tell(
    stacks: tuple[Stack, ...], target: object, last: Frame | None, wanted: Stack | None
) -> None:
    assert stack_that_needs_native_frames(stacks, target, (), last) == wanted


def native_frame(name: str, module: str | None = "/usr/lib/libc.so.6") -> dict[str, object]:
    return {"name": name, "filename": "x", "module": module, "line": 0}


def test_the_c_functions_below_the_python_line_are_read_and_a_recursion_is_one() -> None:
    frames = [native_frame("0x1"), native_frame("0x2"), native_frame("qsort"), native_frame("step", None)]
    text = json.dumps([{"os_thread_id": 7, "frames": [*frames, native_frame("main")]}])
    assert parse_native(text) == {7: ("? (libc.so.6)", "qsort (libc.so.6)")}


@pytest.mark.parametrize("text", ["{", "[1]", "[{}]", '[{"os_thread_id": null, "frames": []}]', "[" * 100_000])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_native(text)


PYSTACK = """
Traceback for thread 7 (python) [Has the GIL] (most recent call last):
    (Python) File "train.py", line 9, in <module>
        step()
    (Python) File "train.py", line 4, in step
        wait()

Traceback for thread 8 (python) [] (most recent call last):
    (Python) File "a.py", line 1, in work
"""


def test_pystack_prints_the_outermost_frame_first_and_names_who_has_the_lock() -> None:
    first, second = parse_pystack(PYSTACK)
    assert (first.tid, first.gil, [one.line for one in first.frames]) == (7, True, [4, 9])
    assert (second.tid, second.gil, [one.function for one in second.frames]) == (8, False, ["work"])
    with pytest.raises(ValueError, match="no thread in it"):
        parse_pystack("Engine error: no such process")


NATIVE = ("nanosleep (libc.so.6)", "sleep (libc.so.6)", "ffi_call (libffi.so.8)", "PyCFuncPtr_call (_ctypes.so)")


def with_native(*native: str, gil: bool, rank: int = 0) -> RankSnapshot:
    seen = rank_snapshot(rank, LEAF)
    return replace(seen, stacks=(replace(seen.stacks[0], native=native, gil=gil),))


def cause_of(seen: Evidence) -> tuple[str, dict[str, Any]]:
    finding = diagnose(seen, judge(seen)).findings[0]
    return finding.code, dict(finding.facts)


def test_a_rank_that_keeps_the_interpreters_lock_in_c_is_named_with_the_function() -> None:
    code, facts = cause_of(stalled(in_all_reduce(1), with_native(*NATIVE, gil=True)))
    assert (code, facts["computes"], facts["function"]) == ("gil_held_native", False, "step")
    assert facts["native"] == ["sleep (libc.so.6)", "nanosleep (libc.so.6)"]


@pytest.mark.parametrize("seen", [with_native(*NATIVE, gil=False), with_native(gil=True)], ids=["free", "no frames"])
def test_without_the_lock_or_the_frames_that_is_not_claimed(seen: RankSnapshot) -> None:
    assert cause_of(stalled(seen))[0] != "gil_held_native"


def test_a_lock_that_is_kept_while_the_beat_is_silent_is_told_without_a_name_where_no_tool_could_look() -> None:
    silent = replace(with_native(gil=True), status_file=board(beat_s=9.0))
    code, facts = cause_of(stalled(silent))
    assert (code, diagnose(stalled(silent), judge(stalled(silent))).findings[0].confidence) == ("gil_held_native", 0.85)
    assert (facts["computes"], facts["native"]) == (False, [])
    assert cause_of(stalled(replace(silent, status_file=board(beat_s=19.9))))[0] != "gil_held_native"


def spinning(*native: str, gil: bool = False, beat_s: float | None = None, lines: int = 1) -> Evidence:
    before = replace(with_native(*native, gil=gil), status_file=board(beat_s=beat_s))
    looks = stalled(before, at_s=90.0).snapshots
    spun = replace(looks[1], ranks=(replace(before, process=process(cpu_s=9.0)),))
    leaves = [replace(LEAF, line=LEAF.line + number % lines) for number in range(20)]
    samples = tuple(sample(leaf=leaf, user=LEAF) for leaf in leaves)
    return stalled(before, at_s=90.0, snapshots=(looks[0], spun), samples=samples)


def test_a_loop_in_a_library_is_a_native_one_and_one_in_the_interpreter_is_not() -> None:
    code, facts = cause_of(spinning("? (libc.so.6)", "qsort (libc.so.6)"))
    assert (code, facts["native"], facts["function"]) == ("native_busy_loop", ["qsort (libc.so.6)"], "step")
    assert cause_of(spinning("list_sort (libpython3.11.so.1.0)"))[0] == "infinite_loop"
    assert cause_of(spinning())[0] == "infinite_loop"


QSORT = ("? (libc.so.6)", "qsort (libc.so.6)")


def test_a_python_loop_that_calls_small_c_functions_is_no_native_one() -> None:
    assert cause_of(spinning(*QSORT, gil=True, beat_s=89.8))[0] == "infinite_loop"
    assert cause_of(spinning(*QSORT, lines=2))[0] == "infinite_loop"


def test_a_c_function_that_keeps_the_lock_is_known_by_the_silence_of_the_beat() -> None:
    assert cause_of(spinning(*QSORT, gil=True, beat_s=80.0))[0] == "native_busy_loop"
    assert cause_of(spinning(*QSORT, gil=True))[0] == "infinite_loop", "without a beat nobody knows"


def silent_at(beat_s: float | None, *native: str, gil: bool = True, lines: int = 1) -> str:
    seen = spinning(*native, gil=gil, beat_s=beat_s, lines=lines)
    return cause_of(seen)[0]


def test_a_function_of_the_interpreter_that_keeps_its_lock_is_no_loop_in_python() -> None:
    search = ("sre_ucs1_match (libpython3.11.so.1.0)", "pattern_match (libpython3.11.so.1.0)")
    assert silent_at(9.0, *search) == "gil_held_native"
    assert silent_at(9.0) == "gil_held_native", "the silence of the beat alone shows it"
    code, facts = cause_of(spinning(*search, gil=True, beat_s=9.0))
    assert (code, facts["computes"]) == ("gil_held_native", True)


def test_a_beat_that_was_heard_while_the_samples_were_taken_shows_a_loop_in_python() -> None:
    assert silent_at(80.0) == "infinite_loop"
    assert silent_at(None) == "infinite_loop"
    assert silent_at(9.0, lines=2) == "infinite_loop"
    assert silent_at(9.0, gil=False) == "infinite_loop"
