"""Stacks of processes that make it hard: tools that hang, die or are refused, targets that are stopped or leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from living import PATIENCE_S, program, wait_for

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Stack
from nsa_harness.core.evidence.host import Process
from nsa_harness.core.evidence.stacks import NativeWait, native_wait
from nsa_harness.supervisor.capture import procfs, snapshot, stacks
from nsa_harness.supervisor.capture.node import CommandFailed, run_command
from nsa_harness.supervisor.capture.snapshot import StackSampler
from nsa_harness.supervisor.capture.stacks import StackSources

SLEEPER = "import time\ndef step():\n    print(flush=True)\n    time.sleep(600)\nstep()\n"
HANGS = "#!/bin/sh\nsleep 600 &\nsleep 600\n"
REFUSED = "#!/bin/sh\necho 'Error: Permission Denied' >&2\necho '   1: trace of the tool' >&2\nexit 1\n"


def reported_proof(pid: int, state: str) -> Process:
    """The process as soon as its main thread is in that state."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        process = procfs.read_process(pid, 0)
        assert process is not None
        if process.state in state or time.monotonic() > deadline:
            assert process.state in state
            return process


def tool(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Puts other programs in place of py-spy and pystack; what is not named is not installed."""

    def these(**texts: str) -> None:
        paths = {name.replace("_", "-"): tool(tmp_path, name.replace("_", "-"), text) for name, text in texts.items()}
        monkeypatch.setattr(stacks, "tool_path", lambda name: paths.get(name))

    return these


@pytest.mark.parametrize(("load", "longer"), [(0.0, 1.0), (1.5, 1.5), (50.0, 3.0)])
def test_where_more_wants_to_run_than_there_are_cores_a_question_may_take_longer(
    load: float, longer: float, use: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    asked: list[float] = []
    plain = snapshot.StackSources

    def noted(*, limit_factor: float, **given: Any) -> Any:
        asked.append(limit_factor)
        return plain(limit_factor=limit_factor, **given)

    monkeypatch.setattr(snapshot, "StackSources", noted)
    with program(SLEEPER) as one:
        StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps").take(1, {0: one.pid})
    assert asked == [longer]


def functions(found: tuple[Stack, ...]) -> list[str]:
    return [frame.function for frame in found[0].frames]


def test_two_ranks_take_less_than_three_seconds_when_every_tool_hangs(
    use: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(py_spy=HANGS, pystack=HANGS)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(SLEEPER) as one, program(SLEEPER) as other:
        began_s = time.monotonic()
        taken = sampler.take(1, {0: one.pid, 1: other.pid})
        took_s = time.monotonic() - began_s
    assert took_s < 3.0
    assert [rank.stacks for rank in taken.ranks] == [(), ()]
    assert {(trouble.what, trouble.rank) for trouble in sampler.trouble} == {("stacks", 0), ("stacks", 1)}
    assert all("no result within" in trouble.why for trouble in sampler.trouble)


def test_a_command_that_leaves_a_child_with_its_output_is_not_waited_for(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(CommandFailed, match=r"hangs: no result within 0\.2 s"):
        run_command([tool(tmp_path, "hangs", HANGS)], 0.2)
    assert run_command([tool(tmp_path, "forks", "#!/bin/sh\nsleep 600 &\necho 7\n")], 5.0) == "7\n"
    assert time.monotonic() - began_s < 5.0


def test_a_command_that_fails_is_told_by_the_line_that_names_the_error(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"^refused: Error: Permission Denied$"):
        run_command([tool(tmp_path, "refused", REFUSED)], 5.0)
    with pytest.raises(CommandFailed, match=r"^absent: No such file or directory$"):
        run_command([str(tmp_path / "absent")], 5.0)
    with pytest.raises(CommandFailed, match=r"^silent: status 3$"):
        run_command([tool(tmp_path, "silent", "#!/bin/sh\nexit 3\n")], 5.0)


FAULTHANDLER = f"""
import faulthandler, os, signal, sys, time
file = open(os.path.join({{boards!r}}, str(os.getpid()) + {protocol.STACKS.removeprefix("{pid}")!r}), "w")
faulthandler.register(signal.SIGRTMIN + {protocol.STACKS_SIGNAL_OFFSET}, file=file)
"""


def test_where_ptrace_is_refused_the_processs_own_faulthandler_answers(
    use: Callable[..., None], tmp_path: Path
) -> None:
    use(py_spy=REFUSED)
    with program(FAULTHANDLER.format(boards=str(tmp_path)) + SLEEPER) as process:
        sources = StackSources(process=reported_proof(process.pid, "S"), probe_dir=tmp_path)
        found, raw = sources.stacks()
    assert (found[0].source, functions(found)[0]) == ("faulthandler", "step")
    assert "most recent call first" in raw
    assert sources.failures == ["py-spy --nonblocking: Error: Permission Denied", "py-spy: Error: Permission Denied"]


def test_a_stopped_process_is_read_without_ptrace_and_stays_stopped(tmp_path: Path) -> None:
    with program(SLEEPER) as process:
        os.kill(process.pid, signal.SIGSTOP)
        found, _ = StackSources(process=reported_proof(process.pid, "T"), probe_dir=tmp_path).stacks()
        state = reported_proof(process.pid, "T").state
    assert (found[0].source, functions(found)[0], state) == ("py-spy --nonblocking", "step", "T")


def test_a_stopped_process_that_py_spy_cannot_read_is_sent_no_signal(use: Callable[..., None], tmp_path: Path) -> None:
    use(py_spy=REFUSED)
    with program(SLEEPER) as process:
        os.kill(process.pid, signal.SIGSTOP)
        sources = StackSources(process=reported_proof(process.pid, "T"), probe_dir=tmp_path)
        assert sources.stacks() == ((), "")
    refused = "py-spy --nonblocking: Error: Permission Denied"
    assert sources.failures == [refused, "state T: the process receives no signals"]


def stays_stopped(pid: int) -> bool:
    """For longer than a signal takes to act."""
    end_s, states = time.monotonic() + 0.5, set()
    while time.monotonic() < end_s:
        stat = procfs.read_stat(pid)
        states.add(stat.state if stat else "gone")
        time.sleep(0.01)
    return states == {"T"}


@pytest.mark.parametrize("options", [[], ["--native"]])
def test_a_process_that_stopped_itself_after_it_was_seen_running_stays_stopped(options: list[str]) -> None:
    """py-spy fails at once on it, and what it does not hold is not ours to continue."""
    failures: list[str] = []
    with program(SLEEPER) as process:
        os.kill(process.pid, signal.SIGSTOP)
        reported_proof(process.pid, "T")
        # On a loaded machine, py-spy must have the time to fail by itself.
        assert stacks.py_spy(process.pid, options, failures, limit_s=60.0) == ((), "")
        assert stays_stopped(process.pid)
    assert len(failures) == 1


ATTACHES = """#!/usr/bin/env python3
import ctypes, sys, time
ctypes.CDLL(None).ptrace(16, int(sys.argv[-1]), 0, 0)  # PTRACE_ATTACH
time.sleep(600)
"""
TWO_THREADS = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n" + SLEEPER


def test_a_process_that_somebody_stops_while_a_tool_holds_it_stays_stopped(use: Callable[..., None]) -> None:
    use(py_spy=ATTACHES)
    failures: list[str] = []
    with program(TWO_THREADS) as process, ThreadPoolExecutor() as pool:
        asked = pool.submit(stacks.py_spy, process.pid, [], failures, 3.0)
        reported_proof(process.pid, "t")
        os.kill(process.pid, signal.SIGSTOP)
        assert asked.result() == ((), "")
        reported_proof(process.pid, "T")  # a loaded machine takes a while to let go of it
        assert stays_stopped(process.pid)
    assert failures == ["py-spy: no result within 3.0 s"]


SPAWNS = (
    "import os, sys, threading\nprint(flush=True)\n"
    "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])"
)


def test_the_stop_of_a_tool_that_is_killed_is_taken_back(use: Callable[..., None], tmp_path: Path) -> None:
    """A process in the kernel's hands takes it only when it comes out of there, long after the tool has gone."""
    use(py_spy=ATTACHES)
    os.mkfifo(tmp_path / "fifo")
    with program(SPAWNS.replace("sys.argv[1]", repr(str(tmp_path / "fifo")))) as process:
        reported_proof(process.pid, "D")
        assert stacks.py_spy(process.pid, [], [], 2.0) == ((), "")
        (tmp_path / "fifo").write_bytes(b"")
        assert process.wait(PATIENCE_S) == 0


def test_a_process_in_the_kernels_hands_is_never_asked_by_ptrace(use: Callable[..., None], tmp_path: Path) -> None:
    """A parent of vfork is in state D until the child runs its program, which here waits for a FIFO."""
    use(py_spy='#!/bin/sh\necho "Error: $*" >&2\nexit 1\n')
    os.mkfifo(tmp_path / "fifo")
    source = SPAWNS.replace("sys.argv[1]", repr(str(tmp_path / "fifo")))
    with program(source) as process:
        sources = StackSources(process=reported_proof(process.pid, "D"), probe_dir=tmp_path)
        sources.stacks()
    assert [failure.count("--nonblocking") for failure in sources.failures] == [2, 0]


def test_a_process_that_leaves_while_it_is_asked_is_no_trouble(use: Callable[..., None], tmp_path: Path) -> None:
    """The tool itself ends the process, as a rank may at any moment."""
    use(py_spy="#!/bin/sh\nfor last; do :; done\nkill -9 $last\nexit 1\n")
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(SLEEPER) as process:
        (seen,) = sampler.take(1, {0: process.pid}).ranks
    assert (seen.stacks, sampler.trouble) == ((), [])


GIL = "import ctypes\ndef step():\n    print(flush=True)\n    ctypes.PyDLL(None).sleep(600)\nstep()\n"


def test_native_frames_are_asked_for_where_the_interpreters_lock_is_held_in_c(tmp_path: Path) -> None:
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(GIL) as process:
        reported_proof(process.pid, "S")
        (first,) = sampler.take(1, {0: process.pid}).ranks
        (second,) = sampler.take(2, {0: process.pid}).ranks
    assert first.stacks[0].gil
    assert "sleep (libc.so.6)" in first.stacks[0].native
    assert second.stacks[0].native == first.stacks[0].native
    assert second.process is not None
    main = next(task for task in second.process.tasks if task.tid == process.pid)
    assert (main.syscall, main.timed) == ("clock_nanosleep", True), "a wait that we interrupted is still known"


def test_a_wait_that_python_explains_is_never_asked_for_native_frames(tmp_path: Path) -> None:
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(SLEEPER) as process:
        reported_proof(process.pid, "S")
        looks = [sampler.take(number, {0: process.pid}).ranks[0] for number in (1, 2)]
    assert [look.stacks[0].native for look in looks] == [(), ()]


LOCKED = (
    "import threading\nlock = threading.Lock()\ndef step():\n    lock.acquire()\n"
    "    print(flush=True)\n    lock.acquire()\nstep()\n"
)


def test_a_line_that_may_wait_for_a_lock_or_in_native_code_is_asked_for_native_frames_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []
    read = StackSources.native
    monkeypatch.setattr(StackSources, "native", lambda self, stacks: asked.append(1) or read(self, stacks))
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(LOCKED) as process:
        wait_for(lambda: procfs.read_stat(process.pid).state == "S", "it waits for the lock")
        looks = [sampler.take(number, {0: process.pid}).ranks[0].stacks[0] for number in (1, 2)]
    assert [native_wait(look) for look in looks] == [NativeWait.PYTHON_LOCK] * 2
    assert len(asked) == 1


def test_a_line_whose_native_frames_cannot_be_read_is_no_known_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StackSources, "native", lambda _, stacks: tuple(stacks))
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(LOCKED) as process:
        wait_for(lambda: procfs.read_stat(process.pid).state == "S", "it waits for the lock")
        (look,) = sampler.take(1, {0: process.pid}).ranks[0].stacks
    assert native_wait(look) is NativeWait.UNNAMED


PYSTACK = """#!/bin/sh
cat <<'TEXT'

Traceback for thread 71 (python) [Has the GIL] (most recent call last):
    (Python) File "train.py", line 9, in <module>
        step()
    (Python) File "train.py", line 4, in step
        hold()
TEXT
"""


def test_pystack_is_asked_last_where_it_is_installed(use: Callable[..., None], tmp_path: Path) -> None:
    use(py_spy=REFUSED, pystack=PYSTACK)
    with program(SLEEPER) as process:
        found, _ = StackSources(process=reported_proof(process.pid, "S"), probe_dir=tmp_path).stacks()
    assert (found[0].source, found[0].tid, found[0].gil, functions(found)) == (
        "pystack",
        71,
        True,
        ["step", "<module>"],
    )
