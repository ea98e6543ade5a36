"""What is read of a thread that sleeps: how often it woke, what it moved itself, and the loop it sleeps in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from nsa_harness.core.evidence.evidence import Frame, Stack
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.supervisor.capture.process_tree import read_process_tree
from nsa_harness.supervisor.capture.procfs import task_io_bytes
from nsa_harness.supervisor.capture.snapshot import with_polling_loops

LOOP = "while not done:\n    time.sleep(0.2)\n"


def sleeper(pid: int, last_tasks: dict[int, Task]) -> Task:
    return next(task for task in read_process_tree({0: pid}, 0, last_tasks).processes[0].tasks if task.tid == pid)


def test_it_is_counted_how_often_a_thread_woke_and_slept_again() -> None:
    last_tasks: dict[int, Task] = {}
    with subprocess.Popen(
        [sys.executable, "-c", f"import time; done = False\nprint(flush=True)\n{LOOP}"], stdout=-1
    ) as it:
        assert it.stdout is not None
        it.stdout.readline()
        deadline = time.monotonic() + 60
        while (seen := sleeper(it.pid, last_tasks)).wake_count < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        it.kill()
    assert seen.wake_count == 3
    assert seen.io_bytes is not None


def test_bytes_are_counted_for_each_thread() -> None:
    own = os.getpid()
    before = task_io_bytes(own, own) or 0
    Path("/dev/null").write_bytes(b"x" * 10_000)
    assert (task_io_bytes(own, own) or 0) >= before + 10_000
    assert task_io_bytes(own, 1 << 30) is None


def test_the_loop_of_a_sleeping_thread_is_read_unless_its_file_was_written_since_the_launch(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    facts = {"comm": "", "state": "S", "wchan": "", "cpu_s": 0.0}
    tasks = tuple(
        Task(tid=tid, syscall="clock_nanosleep", wakes_at_s=end_s, timed=True, **facts)
        for tid, end_s in ((1, 9.0), (2, None))
    )
    process = Process(pid=1, parent=0, command="", state="S", cpu_s=0.0, io_bytes=0, rss_bytes=0, tasks=tasks)
    frames = (Frame(file=str(program), line=2, function="wait"),)
    stacks = [Stack(thread="", tid=tid, active=False, frames=frames, source="py-spy") for tid in (1, 2)]
    now_ns = time.monotonic_ns()
    assert [one.loop for one in with_polling_loops(stacks, process, now_ns)] == [LOOP.rstrip(), ""]
    os.utime(program, (time.time() + 60, time.time() + 60))
    assert [one.loop for one in with_polling_loops(stacks, process, now_ns - 3 * 10**9)] == ["", ""]
