"""Native frames: when they are asked for, how the tools' answers are read, and the causes that rest on them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    ALL_REDUCE,
    IN_LOCK,
    SITE,
    board,
    diagnose,
    frame,
    in_all_reduce,
    process,
    rank_snapshot,
    sample,
    stack,
    stalled,
    task,
    twice,
)

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankSnapshot, Source, Stack
from nsa_harness.core.evidence.stacks import (
    NativeWait,
    native_wait,
    parse_native,
    parse_py_spy,
    parse_py_spy_text,
    parse_pystack,
    stacks_that_need_native_frames,
)
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.core.verdict.wait import WaitKind
from nsa_harness.core.verdict.wait_graph import wait_graph_between

LEAF = frame(17)
HELD = replace(stack(LEAF), gil=True)
IN_QUEUE = frame(171, file="/usr/lib/python3.11/queue.py", function="Queue.get")
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
        ((FREE,), standing("futex"), LEAF, FREE),
        ((FREE,), standing("futex"), None, None),
        ((stack(IN_QUEUE, LEAF),), standing("futex"), IN_QUEUE, None),
        ((stack(ALL_REDUCE, LEAF),), standing("futex"), ALL_REDUCE, None),
        ((replace(FREE, native=("sem_wait (libc.so.6)",)),), standing("futex"), LEAF, None),
        ((FREE,), standing("poll"), LEAF, None),
        ((HELD,), replace(standing("read"), state="T"), LEAF, None),
        ((HELD,), replace(standing("read"), state="D"), LEAF, None),
        ((replace(HELD, source="faulthandler"),), standing("read"), LEAF, None),
        ((), standing("read"), LEAF, None),
    ],
    ids=[
        "keeps the lock in a sleep", "sleeps without it", "runs, seen once", "runs on in the same line",
        "runs elsewhere", "unknown call", "a lock or native code", "the same, seen once", "a queue",
        "a collective", "already read", "known call", "stopped", "in the kernel", "no ptrace", "no stack",
    ],
)  # fmt: skip
def test_native_frames_are_wanted_only_where_python_cannot_tell(
    stacks: tuple[Stack, ...], target: object, last: Frame | None, wanted: Stack | None
) -> None:
    needed = stacks_that_need_native_frames(stacks, target, (), last, has_probe=True)
    assert needed == ((wanted,) if wanted else ())


def test_without_the_probe_native_frames_are_wanted_at_once_and_for_reads_of_the_store_too() -> None:
    for target in (standing("futex"), standing("poll")):
        assert stacks_that_need_native_frames((FREE,), target, (), None, has_probe=False) == (FREE,)
    assert stacks_that_need_native_frames((FREE,), standing("clock_nanosleep"), (), None, has_probe=False) == ()


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


# Waits in native code, which only look like waits for a lock of Python.

LIBC = ("? (libc.so.6)", "pthread_cond_wait (libc.so.6)", "std::condition_variable::wait (libstdc++.so.6.0.30)")
ON_WORK = (*LIBC, "c10d::Work::wait (libtorch_cpu.so)", "pybind11::cpp_function::dispatcher (libtorch_python.so)")
ON_FUTURE = (*LIBC, "torch::jit::PythonFutureWrapper::wait (libtorch_python.so)")
ON_STORE = ("poll (libc.so.6)", "c10d::TCPStore::doWait (libtorch_cpu.so)")
ON_STREAM = ("? (libcuda.so.1)", "cudaStreamSynchronize (libcudart.so.12)")
ON_ANOTHER = (*LIBC, "ray::core::Get (_raylet.so)")


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (stack(LEAF), None),
        (stack(IN_QUEUE, LEAF), NativeWait.PYTHON_LOCK),
        (stack(frame(80, file=f"{SITE}/torch/futures/__init__.py", function="Future.wait"), LEAF), NativeWait.FUTURE),
        (stack(frame(9, file=f"{SITE}/torch/cuda/streams.py", function="Stream.synchronize")), NativeWait.DEVICE),
        (replace(stack(LEAF), native=IN_LOCK), NativeWait.PYTHON_LOCK),
        (replace(stack(LEAF), native=ON_WORK), NativeWait.WORK),
        (replace(stack(LEAF), native=("c10d::ProcessGroupNCCL::WorkNCCL::synchronize (x.so)",)), NativeWait.WORK),
        (replace(stack(LEAF), native=ON_FUTURE), NativeWait.FUTURE),
        (replace(stack(LEAF), native=ON_STORE), NativeWait.STORE),
        (replace(stack(LEAF), native=ON_STREAM), NativeWait.DEVICE),
        (replace(stack(LEAF), native=ON_ANOTHER), NativeWait.UNNAMED),
    ],
)  # fmt: skip
def test_a_wait_below_python_is_named_by_its_frames(seen: Stack, kind: NativeWait | None) -> None:
    assert native_wait(seen) is kind


def test_a_dump_with_native_frames_keeps_them_apart_from_the_lines_of_the_program() -> None:
    text = (
        'Process 7: python train.py\n\nThread 7 (idle): "MainThread"\n    pthread_cond_wait (libc.so.6)\n'
        "    c10d::Work::wait (libtorch_cpu.so)\n    f(int)::{lambda(g&)#1}::_FUN (libtorch_python.so)\n"
        "    step (train.py:17)\n    <module> (train.py:20)\n    main (libc.so.6)\n"
    )
    (only,) = parse_py_spy_text(text)[7]
    assert [(one.file, one.line) for one in only.frames] == [("train.py", 17), ("train.py", 20)]
    assert native_wait(only) is NativeWait.WORK
    python = {"name": "step", "filename": "train.py", "line": 17, "module": None}
    native = native_frame("c10d::Work::wait", "/x/libtorch_cpu.so")
    thread = {"thread_name": "MainThread", "os_thread_id": 7, "frames": [native, python, native_frame("main")]}
    (one,) = parse_py_spy(json.dumps([thread]), "py-spy")
    assert ([line.function for line in one.frames], native_wait(one)) == (["step"], NativeWait.WORK)


def blocked(rank: int, *native: str, **changes: Any) -> RankSnapshot:
    """Rank `rank`, in a futex on the line LEAF of the program, with these native frames below."""
    seen = rank_snapshot(rank, LEAF, **changes)
    return replace(seen, stacks=(replace(seen.stacks[0], native=native),))


def test_a_wait_for_a_handle_without_the_probe_waits_for_the_other_ranks() -> None:
    waits = wait_graph_between(*twice(blocked(0, *ON_WORK), in_all_reduce(1)), (), "gloo").waits
    assert (waits[0].kind, waits[0].peers, waits[0].blocked_in) == (WaitKind.COLLECTIVE, (1,), "Work.wait")
    assert waits[1].peers == (0,)


@pytest.mark.parametrize(
    ("native", "text"),
    [
        (ON_FUTURE, "Future.wait in step"),
        (ON_STREAM, "a device synchronization in step"),
        (ON_ANOTHER, "native code in step"),
        (("?",), "native code in step"),
    ],
)
def test_a_wait_of_native_code_is_never_a_proven_lock(native: tuple[str, ...], text: str) -> None:
    wait = wait_graph_between(*twice(blocked(0, *native)), (), "gloo").waits[0]
    assert (wait.is_closed, wait.blocked_in) == (False, text)
    assert wait_graph_between(*twice(blocked(0, *IN_LOCK)), (), "gloo").waits[0].is_closed


def test_a_wait_for_the_store_without_the_probe_is_one() -> None:
    reads = process(tasks=(task(100, syscall="poll", timed=True),))
    wait = wait_graph_between(*twice(blocked(0, *ON_STORE, process=reads), in_all_reduce(1)), (), "gloo").waits[0]
    assert (wait.kind, wait.peers, wait.blocked_in) == (WaitKind.STORE, (1,), "a store wait")


def test_a_thread_that_waits_for_a_handle_may_still_release_the_lock() -> None:
    holder = replace(stack(frame(60), tid=101, thread="reader"), native=ON_WORK)
    tasks = (task(), task(101))
    for other, closed in ((holder, False), (replace(holder, native=IN_LOCK), True), (replace(holder, native=()), True)):
        seen = rank_snapshot(0, process=process(tasks=tasks), stacks=(replace(stack(LEAF), native=IN_LOCK), other))
        assert wait_graph_between(*twice(seen), (), "gloo").waits[0].is_closed is closed


def test_a_lock_that_only_the_system_call_shows_is_likely_and_one_that_frames_or_source_show_is_certain() -> None:
    def finding(*native: str, **changes: Any) -> tuple[float, tuple[str, ...]]:
        seen = stalled(blocked(0, *native), **changes)
        found = diagnose(seen, judge(seen)).findings[0]
        assert found.code == "lock_cycle"
        return found.confidence, found.left_open

    unnamed = ("the stacks do not show that this wait is for a lock of Python",)
    assert finding() == (0.85, unnamed)
    assert finding(*IN_LOCK) == (0.9, ())
    source = Source(file=LEAF.file, first=16, text="def step():\n    with lock:\n        pass\n")
    assert finding(sources=(source,)) == (0.9, ())
    source = replace(source, text="def step():\n    work.wait()\n")
    assert finding(sources=(source,)) == (0.85, unnamed)
