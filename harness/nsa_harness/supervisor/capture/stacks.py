"""Takes the Python stacks of one process by the gentlest source that answers, each with a limit, all within one limit.

The order: py-spy without stopping the process; py-spy with a stop; sources without permission to trace, which are the
faulthandler signal and the job's own worker server; and pystack, if it is installed. Native frames are read only if the
Python line does not show enough.
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
from nsa_harness.supervisor.capture.recorder import STACKS_HANDLER, ask
from nsa_harness.supervisor.launch.reaper import process_of

_NONBLOCKING_S = 1.0
_BLOCKING_S = 0.6
_SIGNAL_S = 0.3
_SERVED_S = 1.0
_PYSTACK_S = 0.6
_NATIVE_S = 1.5  # measured: 0.06 to 1.0 s
_FREEZE_S = 0.2  # a process that runs is stopped within a tick
_ALL_S = 2.4  # time limit of all sources together, per process


@dataclass(kw_only=True)
class StackSources:
    """The sources for one process. `patience` multiplies the limits if many processes are queried at once."""

    process: Process
    boards: Path
    patience: float = 1.0
    arguments: bool = False  # also read the arguments of the call: without the probe no status file shows them
    server: Path | int | None = None  # the process's own worker server
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + _ALL_S * self.patience

    def stacks(self) -> tuple[tuple[Stack, ...], str]:
        """Return the threads and the dump they were read from; nothing if every source failed, see `failures`."""
        for source in (self._nonblocking, self._blocking, self._by_signal, self._from_worker_server, self._pystack):
            stacks, raw = source()
            if stacks:
                return stacks, raw
        return (), ""

    def native(self, stacks: Sequence[Stack]) -> tuple[Stack, ...]:
        """Return the threads with their native frames. Stops the process for up to a second."""
        limit_s = self._left_s(_NATIVE_S)
        try:
            named = parse_native(_py_spy(self.process.pid, ["--native"], limit_s))
        except (CommandFailed, ValueError) as error:
            self.failures.append(f"py-spy --native: {error}")
            return tuple(stacks)
        return tuple(replace(stack, native=named.get(stack.tid or 0, ())) for stack in stacks)

    def _nonblocking(self) -> tuple[tuple[Stack, ...], str]:
        # py-spy shortens variables' values, so that they take no extra time.
        options = ["--nonblocking", *(["--locals"] if self.arguments else [])]
        return py_spy(self.process.pid, options, self.failures, self._left_s(_NONBLOCKING_S))

    def _blocking(self) -> tuple[tuple[Stack, ...], str]:
        if self.process.state in "DTt":  # ptrace cannot seize a stopped process, and waits for one in the kernel
            return (), ""
        return py_spy(self.process.pid, [], self.failures, self._left_s(_BLOCKING_S))

    def _by_signal(self) -> tuple[tuple[Stack, ...], str]:
        """Return the stacks that faulthandler writes on a signal, if the probe has registered it in the process."""
        pid, number = self.process.pid, signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET
        known = process_of(pid)
        target = self.boards / protocol.STACKS.format(pid=pid)
        if self.process.state in "DTt":
            self.failures.append(f"state {self.process.state}: it takes no signal")
            return (), ""
        if known is None or not target.exists() or not procfs.handles_signal(pid, number):
            self.failures.append("no faulthandler of ours in the process")
            return (), ""
        limit_s, before = self._left_s(_SIGNAL_S), target.stat().st_size
        known.send(number)
        raw = _grown(target, before, limit_s)
        if not raw:
            self.failures.append(f"no answer to the faulthandler signal within {limit_s:.1f} s")
        return parse_faulthandler(raw), raw

    def _from_worker_server(self) -> tuple[tuple[Stack, ...], str]:
        """Ask the worker server, which needs the GIL for its answer, and no permission."""
        if self.server is None:
            return (), ""
        try:
            raw = ask(self.server, STACKS_HANDLER, limit_s=self._left_s(_SERVED_S)).decode(errors="replace")
        except (OSError, ValueError) as error:
            self.failures.append(f"worker server: {error}")
            return (), ""
        stacks = parse_faulthandler(raw)
        return tuple(replace(stack, source="worker server") for stack in stacks if stack.frames), raw

    def _pystack(self) -> tuple[tuple[Stack, ...], str]:
        """Run pystack, an optional tool: its absence is not noted."""
        tool = tool_path("pystack")
        if tool is None:
            return (), ""
        try:
            raw = run_command([tool, "remote", "--no-block", str(self.process.pid)], self._left_s(_PYSTACK_S))
            return parse_pystack(raw), raw
        except (CommandFailed, ValueError) as error:
            self.failures.append(str(error))
            return (), ""

    def _left_s(self, limit_s: float) -> float:
        """Return a source's own limit, or less if the time for all sources runs out."""
        return max(0.05, min(limit_s * self.patience, self._deadline - time.monotonic()))


def py_spy(
    pid: int, options: Sequence[str], failures: list[str], limit_s: float = _NONBLOCKING_S
) -> tuple[tuple[Stack, ...], str]:
    """Return the stacks of a process and the dump they were read from, without variables of the program.

    A failure is appended to `failures`.
    """
    source = " ".join(["py-spy", *(option for option in options if option != "--locals")])
    try:
        raw = _py_spy(pid, options, limit_s)
        return parse_py_spy(raw, source), without_variables(raw) if "--locals" in options else raw
    except (CommandFailed, ValueError) as error:
        failures.append(f"{source}: {str(error).removeprefix('py-spy: ')}")
        return (), ""


def py_spy_path() -> str:
    """Return py-spy as installed with nsa-harness, else from PATH."""
    return tool_path("py-spy") or "py-spy"


def tool_path(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def _py_spy(pid: int, options: Sequence[str], limit_s: float) -> str:
    known, held = process_of(pid), False

    def look(tool: int) -> None:
        nonlocal held
        held = _is_held(pid, tool)

    try:
        return run_command([py_spy_path(), "dump", "--json", *options, "--pid", str(pid)], limit_s, look)
    finally:
        if held and known:
            known.send(signal.SIGCONT)  # a killed tracer may leave the process stopped


def _is_held(pid: int, tool: int) -> bool:
    """Whether the tool traces threads of the process, and no signal has stopped the process.

    A program that was stopped by a signal must stay stopped: that state shows as T, a tracer's stop as t. The tool is
    stopped first, so that the state does not change while it is read.
    """
    with contextlib.suppress(OSError):
        os.kill(tool, signal.SIGSTOP)
    wait_for(lambda: (stat := procfs.read_stat(tool)) is None or stat.state in "TZX", _FREEZE_S)
    threads = procfs.tracers(pid)
    return tool in threads.values() and not any(
        (stat := procfs.read_stat(pid, tid)) and stat.state == "T" for tid in threads
    )


def _grown(file: Path, before: int, limit_s: float) -> str:
    """Return what was written after position `before`, once it has stopped growing."""
    sizes = [before]

    def settled() -> bool:
        sizes.append(file.stat().st_size)
        return sizes[-1] > before and sizes[-1] == sizes[-2]

    wait_for(settled, limit_s)
    with file.open("rb") as dump:
        dump.seek(before)
        return dump.read().decode(errors="replace")


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
