"""What the kernel says about processes: asked of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from living import PATIENCE_S, program

from nsa_harness.core.evidence.host import Task, sigterm_reaction
from nsa_harness.supervisor.capture import procfs


def main_task(pid: int, origin_ns: int, settled: Callable[[Task], bool]) -> Task:
    """The main thread of a process as soon as it stands where it is meant to stand."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        process = procfs.read_process(pid, origin_ns)
        assert process is not None
        task = next(task for task in process.tasks if task.tid == pid)
        if settled(task) or time.monotonic() > deadline:
            return task


def test_a_sleep_is_read_with_its_end() -> None:
    origin_ns = time.monotonic_ns()
    with program("import time; print(); time.sleep(600)") as process:
        task = main_task(process.pid, origin_ns, lambda task: (task.syscall, task.state) == ("clock_nanosleep", "S"))
    assert (task.syscall, task.timed, task.state) == ("clock_nanosleep", True, "S")
    assert task.wakes_at_s is not None
    assert 590.0 < task.wakes_at_s < 600.0 + PATIENCE_S


LOCKED = "import threading; lock = threading.Lock(); lock.acquire(); print(); lock.acquire({})"


def test_a_lock_without_a_timeout_never_wakes_by_itself() -> None:
    with program(LOCKED.format("")) as process:
        task = main_task(process.pid, 0, lambda task: task.syscall == "futex")
    assert (task.syscall, task.timed, task.wakes_at_s) == ("futex", False, None)


def test_a_lock_with_a_timeout_is_timed_and_its_end_is_readable() -> None:
    origin_ns = time.monotonic_ns()
    with program(LOCKED.format("timeout=600")) as process:
        task = main_task(process.pid, origin_ns, lambda task: task.syscall == "futex")
    assert (task.syscall, task.timed) == ("futex", True)
    assert task.wakes_at_s is None or 590.0 < task.wakes_at_s < 600.0 + PATIENCE_S


@pytest.mark.parametrize(
    ("source", "syscall", "timed"),
    [
        ("import os; r, w = os.pipe(); print(); os.read(r, 1)", "read", False),
        ("import select; print(); select.select([], [], [], 600)", "select", True),
        ("import select, os; r, w = os.pipe(); print(); select.select([r], [], [])", "select", False),
        ("import select; p = select.poll(); print(); p.poll()", "poll", False),
        ("import select; p = select.poll(); print(); p.poll(600000)", "poll", True),
        ("import select; p = select.epoll(); print(); p.poll()", "epoll_wait", False),
    ],
)
def test_a_wait_is_named_and_its_timeout_is_seen(source: str, syscall: str, timed: bool) -> None:
    with program(source) as process:
        task = main_task(process.pid, 0, lambda task: syscall in task.syscall)
    assert syscall in task.syscall or (syscall == "select" and task.syscall == "pselect6")
    assert task.timed is timed


@pytest.mark.parametrize("call", ["select.select([], [], [], 600.5)", "p.poll(600500)"])
def test_the_time_limit_of_a_poll_is_read(call: str) -> None:
    with program(f"import select; p = select.poll(); print(); {call}") as process:
        task = main_task(process.pid, 0, lambda task: task.timeout_s is not None)
    assert task.timeout_s == 600.5


def test_what_a_thread_has_read_is_a_part_of_its_bytes() -> None:
    with program("import time; open('/dev/zero', 'rb').read(1 << 20); print(); time.sleep(600)") as process:
        task = main_task(process.pid, 0, lambda task: task.syscall == "clock_nanosleep")
    assert task.read_bytes is not None
    assert task.io_bytes is not None
    assert 1 << 20 <= task.read_bytes <= task.io_bytes


def test_a_busy_process_is_running_and_its_cpu_grows() -> None:
    with program("print()\nwhile True: pass") as process:
        first = procfs.read_stat(process.pid)
        assert first is not None
        deadline = time.monotonic() + PATIENCE_S
        later = first
        while later.cpu_s <= first.cpu_s and time.monotonic() < deadline:
            later = procfs.read_stat(process.pid) or later
        task = main_task(process.pid, 0, lambda task: task.syscall == "running")
    assert later.cpu_s > first.cpu_s
    assert (task.syscall, task.timed, task.wakes_at_s) == ("running", None, None)


def test_a_stopped_process_is_seen_as_stopped() -> None:
    with program("import os, signal; print(); os.kill(os.getpid(), signal.SIGSTOP)") as process:
        os.waitpid(process.pid, os.WUNTRACED)
        stat = procfs.read_stat(process.pid)
        task = main_task(process.pid, 0, lambda task: task.syscall != "running")
    assert stat is not None
    assert (stat.state, task.syscall) == ("T", "kill")  # it stopped itself


def test_a_command_with_brackets_and_blanks_does_not_confuse_the_fields(tmp_path: Path) -> None:
    nasty = tmp_path / "a) b ("
    nasty.symlink_to("/bin/sleep")
    with subprocess.Popen([str(nasty), "600"]) as process:
        stat = procfs.read_stat(process.pid)
        process.kill()
    assert stat is not None
    assert (stat.parent, stat.command) == (os.getpid(), "a) b (")


def test_what_is_gone_is_none_or_empty() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert procfs.read_stat(gone.pid) is None
    assert procfs.read_process(gone.pid, 0) is None
    assert procfs.environment(gone.pid) == {}
    assert procfs.peak_rss_bytes(gone.pid) is None
    assert procfs.io_bytes(gone.pid) is None
    assert procfs.handles_signal(gone.pid, signal.SIGUSR1) is False
    assert procfs.descendants(gone.pid) == []


def test_descendants_come_parents_first_and_the_root_is_not_one_of_them() -> None:
    source = (
        "import os, signal\nif os.fork() == 0:\n    if os.fork() == 0:\n        print(flush=True)\n    signal.pause()\n"
        "signal.pause()"
    )
    with program(source) as process:
        found = procfs.descendants(process.pid)
        assert [stat.parent for stat in found] == [process.pid, found[0].pid]
        for stat in found:
            os.kill(stat.pid, signal.SIGKILL)


def test_the_environment_a_process_was_started_with() -> None:
    environment = {"A": "1=2", "EMPTY": "", "PATH": os.environ["PATH"]}
    # `cat` answers once it runs; in the middle of its exec a process has no environment.
    with subprocess.Popen(["/bin/cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"ready\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        found = procfs.environment(process.pid)
        process.kill()
    assert found == environment


def test_a_handled_signal_is_told_from_a_default_and_an_ignored_one() -> None:
    source = "import signal; signal.signal(10, print); signal.signal(12, signal.SIG_IGN); print(); signal.pause()"
    with program(source) as process:
        handled = [procfs.handles_signal(process.pid, number) for number in (10, 12, 15)]
    assert handled == [True, False, False]


MASKED = """
import os, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, print)
os.kill(os.getpid(), signal.SIGTERM)
print()
signal.pause()
"""


def test_what_a_process_does_with_signals_is_read_without_sending_one() -> None:
    with program(MASKED) as process:
        seen = procfs.read_process(process.pid, 0)
    assert seen is not None
    assert seen.signals is not None
    masks = (seen.signals.pending, seen.signals.blocked, seen.signals.ignored, seen.signals.caught)
    wanted = (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1)
    assert [bool(mask >> (number - 1) & 1) for mask, number in zip(masks, wanted, strict=True)] == [True] * 4
    assert sigterm_reaction(seen) == "it blocks SIGTERM: only SIGKILL ends it; sent and not taken yet: SIGTERM"


def test_memory_and_bytes_of_a_process_of_our_own_are_readable() -> None:
    process = procfs.read_process(os.getpid(), 0)
    assert process is not None
    assert process.rss_bytes > 1 << 20
    assert (procfs.peak_rss_bytes(os.getpid()) or 0) >= process.rss_bytes // 2
    before = procfs.io_bytes(os.getpid())
    Path("/proc/self/stat").read_bytes()
    after = procfs.io_bytes(os.getpid())
    assert before is not None
    assert after is not None
    assert after > before


def test_without_tasks_only_the_process_is_read() -> None:
    process = procfs.read_process(os.getpid(), 0, tasks=False)
    assert process is not None
    assert (process.tasks, process.pid, process.parent) == ((), os.getpid(), os.getppid())
