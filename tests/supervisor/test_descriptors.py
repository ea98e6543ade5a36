"""What a thread stands in, and who could end it: asked of real processes in real waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from living import PATIENCE_S, program

from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.supervisor.capture import descriptors, procfs
from nsa_harness.supervisor.capture.descriptors import HolderSearch, SocketTable, lock_holders


def seen(pid: int, settled: Callable[[Task], bool]) -> tuple[Process, Task]:
    """A process and its main thread as soon as that stands where it is meant to stand."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        process = procfs.read_process(pid, 0)
        assert process is not None
        told = HolderSearch(sockets=SocketTable(owners={})).with_holders(process)
        task = next(task for task in told.tasks if task.tid == pid)
        if settled(task) or time.monotonic() > deadline:
            return told, task


def in_call(*names: str) -> Callable[[Task], bool]:
    return lambda task: task.syscall in names and task.state in "SD"


FULL_PIPE = "import os; r, w = os.pipe(); print()\nwhile True: os.write(w, b'x' * 4096)"


def test_a_full_pipe_is_named_and_so_is_the_only_process_that_could_read_it() -> None:
    with program(FULL_PIPE) as process:
        told, task = seen(process.pid, in_call("write"))
    assert task.target.startswith("pipe:[")
    assert task.held_by == (process.pid,)
    assert {f"{task.target} r", f"{task.target} w"} <= set(told.open_ends)


def test_a_read_of_a_pipe_names_the_child_that_could_write() -> None:
    source = (
        "import os, signal; r, w = os.pipe(); pid = os.fork()\n"
        "if pid == 0: signal.pause()\n"
        "os.close(w); print(); os.read(r, 1)"
    )
    with program(source) as process:
        _, task = seen(process.pid, in_call("read"))
        children = tuple(stat.pid for stat in procfs.descendants(process.pid))
    assert (task.fd is not None, task.held_by) == (True, children)


@pytest.mark.parametrize(
    "wait",
    ["select.select([r], [], [])", "p = select.poll(); p.register(r); p.poll()"],
    ids=["select", "poll"],
)
def test_a_poll_of_a_pipe_is_followed_to_its_writer(wait: str) -> None:
    source = f"import os, select; r, w = os.pipe(); print(); {wait.replace('p.poll()', 'p.poll(None)')}"
    with program(source.replace("p.register(r)", "p.register(r, select.POLLIN)")) as process:
        _, task = seen(process.pid, in_call("select", "pselect6", "poll", "ppoll"))
    assert task.target.startswith("pipe:[")
    assert task.held_by == (process.pid,)


def test_an_open_of_a_fifo_that_nobody_else_opens_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with program("import os, sys; print(); os.open(sys.argv[1], os.O_RDONLY)", str(fifo)) as process:
        # Of a process that is just being looked through, who holds what is not known for a moment.
        _, task = seen(process.pid, lambda task: task.syscall == "openat" and task.held_by is not None)
    assert (task.target, task.held_by) == (str(fifo), ())


def test_a_read_of_a_fifo_names_its_living_writer(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); print(); os.read(fd, 1)"
    with subprocess.Popen(
        [sys.executable, "-ISc", "import sys, signal; f = open(sys.argv[1], 'wb'); signal.pause()", str(fifo)]
    ) as writer:
        with program(reader, str(fifo)) as process:
            told, task = seen(process.pid, in_call("read"))
        writer.kill()
    assert (task.target, task.held_by) == (str(fifo), (writer.pid,))
    assert f"{fifo} r" in told.open_ends


TAKES = "import fcntl, signal, sys; f = open(sys.argv[1], 'a'); {before}fcntl.{call}(f, fcntl.LOCK_EX); {after}"


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_a_wait_for_a_file_lock_names_its_holder(tmp_path: Path, call: str) -> None:
    path = str(tmp_path / "lock")
    holds = TAKES.format(call=call, before="", after="print(); signal.pause()")
    waits = TAKES.format(call=call, before="print(); ", after="")
    with program(holds, path) as holder, program(waits, path) as process:
        _, task = seen(process.pid, in_call("flock", "fcntl"))
    assert (task.target, task.held_by) == (path, (holder.pid,))


ORPHAN = """
import fcntl, os, signal, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
pid = os.fork()
if pid == 0:
    signal.pause()
print(pid, flush=True)
"""


@contextmanager
def orphan(path: str) -> Iterator[int]:
    """A process that inherited a locked file from a parent that is gone."""
    with subprocess.Popen([sys.executable, "-IS", "-c", ORPHAN, path], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        heir = int(parent.stdout.readline())
        parent.wait(timeout=PATIENCE_S)
    try:
        yield heir
    finally:
        os.kill(heir, signal.SIGKILL)


def test_a_lock_whose_taker_has_left_is_held_by_who_inherited_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with orphan(path) as heir, program(TAKES.format(call="flock", before="print(); ", after=""), path) as process:
        _, task = seen(process.pid, in_call("flock"))
    assert task.held_by == (heir,)


def test_the_table_of_locks_is_read_by_who_waits() -> None:
    table = (
        "1: FLOCK  ADVISORY  WRITE 71 fe:00:1179 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 88 fe:00:1179 0 EOF\n"
        "2: POSIX  ADVISORY  READ  72 fe:00:1180 0 EOF\n"
        "3: POSIX  ADVISORY  READ  0 fe:00:1181 0 EOF\n"
        "3: -> POSIX  ADVISORY  WRITE 89 fe:00:1181 0 EOF\n"
    )
    assert (lock_holders(table, 88), lock_holders(table, 72), lock_holders(table, 89)) == ((71,), (), ())
    assert lock_holders("torn", 88) == ()


@pytest.mark.parametrize(
    "wait", ["os.waitpid(pid, 0)", "os.wait()", "os.waitid(os.P_PID, pid, os.WEXITED)"], ids=["pid", "any", "waitid"]
)
def test_a_wait_for_a_child_names_the_child(wait: str) -> None:
    source = f"import os, signal; pid = os.fork()\nif pid == 0: signal.pause()\nprint(); {wait}"
    with program(source) as process:
        _, task = seen(process.pid, in_call("wait4", "waitid"))
        children = tuple(stat.pid for stat in procfs.descendants(process.pid))
    assert len(children) == 1
    assert task.held_by == children


def test_a_wait_on_something_that_nobody_holds_says_nothing_of_holders() -> None:
    with program("import time; print(); time.sleep(600)") as process:
        _, task = seen(process.pid, in_call("clock_nanosleep"))
    assert (task.fd, task.target, task.held_by) == (None, "", None)


def test_a_file_of_a_server_that_may_not_answer_is_never_asked_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDWR)
    info = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
    assert f"{fifo} rw" in descriptors.open_descriptors(os.getpid())
    monkeypatch.setattr(descriptors, "_remote_mounts", lambda _: frozenset({mount}))
    assert f"{fifo} rw" not in descriptors.open_descriptors(os.getpid())
    os.close(fd)


def test_whoever_was_not_read_in_time_may_hold_the_other_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(descriptors, "_SEARCH_LIMIT_S", -1.0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with program("import os, sys; print(); os.open(sys.argv[1], os.O_RDONLY)", str(fifo)) as process:
        _, task = seen(process.pid, lambda task: task.syscall == "openat" and "fifo" in task.target)
        holders = HolderSearch(sockets=SocketTable(owners={}))
        found = procfs.read_process(process.pid, 0)
        assert found is not None
        holders.with_holders(found)
    assert (task.target, task.held_by) == (str(fifo), None)
    assert holders.failures == ["descriptors of the host: not all read within -1 s"]


SEMAPHORE = (
    "import multiprocessing, os, signal; one = multiprocessing.get_context('fork').Semaphore(0); pid = os.fork()\n"
    "if pid == 0: signal.pause()\n"
    "print(); one.acquire()"
)


def test_a_semaphore_of_several_processes_names_its_file_and_who_else_has_it() -> None:
    with program(SEMAPHORE) as process:
        _, task = seen(process.pid, in_call("futex"))
        children = tuple(stat.pid for stat in procfs.descendants(process.pid))
    assert task.target.startswith("/dev/shm/sem.")
    assert (task.timed, task.held_by) == (False, children)


def test_a_lock_between_threads_is_nobody_elses() -> None:
    with program("import threading; one = threading.Lock(); one.acquire(); print(); one.acquire()") as process:
        _, task = seen(process.pid, in_call("futex"))
    assert (task.target, task.held_by) == ("", None)
