"""Reads the Python stacks of a process, from the source that disturbs the process least.

The order is: py-spy without stopping the process; py-spy with a stop; the sources that need no permission to trace,
which are the faulthandler signal and the job's own worker server; and pystack, if it is installed. Each source has a
time limit, and all sources together have another. Native frames are read only if the Python line does not show enough.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Stack
from nsa_harness.core.evidence.host import Process
from nsa_harness.core.evidence.stacks import (
    parse_faulthandler,
    parse_native,
    parse_py_spy,
    parse_pystack,
    without_variables,
)
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.node import CommandFailed, run_command
from nsa_harness.supervisor.capture.recorder import STACKS_HANDLER, query
from nsa_harness.supervisor.launch.reaper import process_identity

_NONBLOCKING_S = 1.0
_BLOCKING_S = 0.6
_SIGNAL_S = 0.3
_SERVER_S = 1.0
_PYSTACK_S = 0.6
_NATIVE_S = 1.5  # measured duration: 0.06 to 1.0 s
_STOP_S = 0.2  # a running process is stopped within a scheduler tick
_TOTAL_S = 2.4  # time limit per process for all sources together


@dataclass(kw_only=True)
class StackSources:
    """A reader of the Python stacks of one process, which tries several sources in turn."""

    process: Process
    probe_dir: Path
    limit_factor: float = 1.0  # multiplies the time limits, if many processes are queried in parallel
    with_arguments: bool = False  # also read the arguments of calls, which no status file shows without the probe
    server: Path | int | None = None  # the process's own worker server
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + _TOTAL_S * self.limit_factor

    def stacks(self) -> tuple[tuple[Stack, ...], str]:
        """Return the Python stacks and the text from which they were parsed, or () and "" if every source failed."""
        for source in (
            self._nonblocking,
            self._blocking,
            self._from_faulthandler,
            self._from_worker_server,
            self._pystack,
        ):
            stacks, raw = source()
            if stacks:
                return stacks, raw
        return (), ""

    def native(self, stacks: Sequence[Stack]) -> tuple[Stack, ...]:
        """Return the stacks with their native frames. The process is stopped for up to a second."""
        limit_s = self._remaining_s(_NATIVE_S)
        try:
            frames_by_thread = parse_native(run_py_spy(self.process.pid, ["--native"], limit_s))
        except (CommandFailed, ValueError) as error:
            self.failures.append(f"py-spy --native: {error}")
            return tuple(stacks)
        return tuple(replace(stack, native=frames_by_thread.get(stack.tid or 0, ())) for stack in stacks)

    def _nonblocking(self) -> tuple[tuple[Stack, ...], str]:
        # py-spy shortens the values of variables, so reading them takes no extra time.
        options = ["--nonblocking", *(["--locals"] if self.with_arguments else [])]
        return py_spy(self.process.pid, options, self.failures, self._remaining_s(_NONBLOCKING_S))

    def _blocking(self) -> tuple[tuple[Stack, ...], str]:
        if self.process.state in "DTt":  # ptrace cannot stop a stopped process, and would wait for one in state D
            return (), ""
        return py_spy(self.process.pid, [], self.failures, self._remaining_s(_BLOCKING_S))

    def _from_faulthandler(self) -> tuple[tuple[Stack, ...], str]:
        """Return the stacks that faulthandler writes when it receives a signal."""
        pid, number = self.process.pid, signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET
        identity = process_identity(pid)
        target = self.probe_dir / protocol.STACKS.format(pid=pid)
        if self.process.state in "DTt":
            self.failures.append(f"state {self.process.state}: the process receives no signals")
            return (), ""
        if identity is None or not target.exists() or not procfs.handles_signal(pid, number):
            self.failures.append("nsa-harness's faulthandler is not registered in the process")
            return (), ""
        limit_s, size_before = self._remaining_s(_SIGNAL_S), target.stat().st_size
        identity.send_signal(number)
        raw = _new_output(target, size_before, limit_s)
        if not raw:
            self.failures.append(f"no response to the faulthandler signal within {limit_s:.1f} s")
        return parse_faulthandler(raw), raw

    def _from_worker_server(self) -> tuple[tuple[Stack, ...], str]:
        if self.server is None:
            return (), ""
        try:
            raw = query(self.server, STACKS_HANDLER, limit_s=self._remaining_s(_SERVER_S)).decode(errors="replace")
        except (OSError, ValueError) as error:
            self.failures.append(f"worker server: {error}")
            return (), ""
        stacks = parse_faulthandler(raw)
        return tuple(replace(stack, source="worker server") for stack in stacks if stack.frames), raw

    def _pystack(self) -> tuple[tuple[Stack, ...], str]:
        tool = tool_path("pystack")
        if tool is None:
            return (), ""
        try:
            raw = run_command([tool, "remote", "--no-block", str(self.process.pid)], self._remaining_s(_PYSTACK_S))
            return parse_pystack(raw), raw
        except (CommandFailed, ValueError) as error:
            self.failures.append(str(error))
            return (), ""

    def _remaining_s(self, limit_s: float) -> float:
        """Return `limit_s`, or the time that remains for all sources together if that is less."""
        return max(0.05, min(limit_s * self.limit_factor, self._deadline - time.monotonic()))


def py_spy(
    pid: int, options: Sequence[str], failures: list[str], limit_s: float = _NONBLOCKING_S
) -> tuple[tuple[Stack, ...], str]:
    """Return the stacks that py-spy reads, and their text. If it fails, the reason is added to `failures`."""
    source = " ".join(["py-spy", *(option for option in options if option != "--locals")])
    try:
        raw = run_py_spy(pid, options, limit_s)
        return parse_py_spy(raw, source), without_variables(raw) if "--locals" in options else raw
    except (CommandFailed, ValueError) as error:
        failures.append(f"{source}: {str(error).removeprefix('py-spy: ')}")
        return (), ""


def py_spy_path() -> str:
    return tool_path("py-spy") or "py-spy"


def tool_path(name: str) -> str | None:
    installed_path = Path(sys.executable).parent / name
    return str(installed_path) if installed_path.exists() else shutil.which(name)


def run_py_spy(pid: int, options: Sequence[str], limit_s: float) -> str:
    """Return the output of `py-spy dump --json`. Raise CommandFailed if py-spy fails or takes too long."""
    identity, was_traced = process_identity(pid), False

    def check_tracing(tool: int) -> None:
        nonlocal was_traced
        was_traced = _is_traced(pid, tool)

    try:
        return run_command([py_spy_path(), "dump", "--json", *options, "--pid", str(pid)], limit_s, check_tracing)
    finally:
        if was_traced and identity:
            identity.send_signal(signal.SIGCONT)  # py-spy was killed and may have left the process stopped


def _is_traced(pid: int, tool: int) -> bool:
    """Return whether the tool with pid `tool`, such as py-spy, is tracing the process and keeping it stopped."""
    # A program that a signal has stopped (state T, not t) must stay stopped.
    # The tool is stopped first, so that the state does not change while it is read.
    with contextlib.suppress(OSError):
        os.kill(tool, signal.SIGSTOP)
    wait_for(lambda: (stat := procfs.read_stat(tool)) is None or stat.state in "TZX", _STOP_S)
    threads = procfs.tracers(pid)
    return tool in threads.values() and not any(
        (stat := procfs.read_stat(pid, tid)) and stat.state == "T" for tid in threads
    )


def _new_output(file: Path, size_before: int, limit_s: float) -> str:
    """Wait until the file stops growing, and return what follows its first `size_before` bytes."""
    sizes = [size_before]

    def stopped_growing() -> bool:
        sizes.append(file.stat().st_size)
        return sizes[-1] > size_before and sizes[-1] == sizes[-2]

    wait_for(stopped_growing, limit_s)
    with file.open("rb") as dump:
        dump.seek(size_before)
        return dump.read().decode(errors="replace")


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until `condition` returns True. Return False if that takes longer than `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
