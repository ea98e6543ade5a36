"""Records which lines of the program each process executes, in the order of their first execution.

Python 3.12 or later reports them through sys.monitoring. A line costs about a microsecond when a process executes it
for the first time, and nothing afterwards, except on Python 3.12 (see protocol.COVERAGE_SINCE). Older versions record
nothing.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

from .. import protocol
from .places import is_installed
from .record_file import RecordFile, thread_name

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .patches import TroubleLog

PIECE = "coverage"
TOOLS = (3, 4)  # tool numbers of sys.monitoring that Python does not reserve for a purpose; the probe uses two

_HARNESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _ThreadNumber(_thread._local):
    """The calling thread's number in the coverage file, or None before its first line."""

    number: int | None = None


class Coverage:
    """A monitor that adds each line of the program to the coverage file when it is executed for the first time.

    Every function that starts is reported once. If it belongs to the program, its lines are reported from then on, each
    once. Reporting all lines from the beginning would take far longer, because most lines belong to libraries.
    """

    def __init__(self, monitoring: Any, tool: int, directory: str, trouble: TroubleLog) -> None:
        self._monitoring = monitoring
        self._tool = tool
        self._disable = monitoring.DISABLE
        self._trouble = trouble
        path = os.path.join(directory, protocol.COVERAGE.format(pid=os.getpid()))
        self._file = RecordFile(path, -1, -1, protocol.COVERAGE_SIZE)
        self._lines: set[tuple[str, int]] = set()
        self._threads = 0
        self._caller = _ThreadNumber()
        self._lock = _thread.allocate_lock()
        self._is_on = True

    def start(self) -> None:
        """Begin to record. The functions that the calling thread is executing are included."""
        monitoring, events = self._monitoring, self._monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._on_start)
        monitoring.register_callback(self._tool, events.LINE, self._on_line)
        frame: Any = sys._getframe(1)
        while frame is not None:
            if is_program(frame.f_code.co_filename):
                monitoring.set_local_events(self._tool, frame.f_code, events.LINE)
            frame = frame.f_back
        monitoring.set_events(self._tool, events.PY_START)
        os.register_at_fork(after_in_child=self._stop)

    def _on_start(self, code: Any, _offset: int) -> Any:
        try:
            if self._is_on and is_program(code.co_filename):
                self._monitoring.set_local_events(self._tool, code, self._monitoring.events.LINE)
        except Exception as failure:
            self._give_up(failure)
        return self._disable

    def _on_line(self, code: Any, line: int) -> Any:
        try:
            if self._is_on:
                self._add(code.co_filename, line)
        except Exception as failure:
            self._give_up(failure)
        return self._disable

    def _add(self, file: str, line: int) -> None:
        """Add a line that the calling thread executes. Raise RuntimeError if the file has no room for the line."""
        written = self._file
        with self._lock:
            # A line is reported again if several functions have it, or if another tool restarts all events.
            if (file, line) in self._lines:
                return
            self._lines.add((file, line))
            thread = self._caller.number
            if thread is None:
                thread = self._caller.number = self._threads
                self._threads += 1
                written.write(protocol.RECORD_THREAD, (thread, written.string(thread_name())))
            path = written.string(os.path.abspath(file))
            written.write(protocol.RECORD_LINE, (thread, path, line, time.monotonic_ns()))
        if written.is_full:
            raise RuntimeError(f"the program executed more lines than fit into {protocol.COVERAGE_SIZE} bytes")

    def _stop(self) -> None:
        """Stop in a forked child, such as a data loader worker, which would write to its parent's file."""
        self._is_on = False

    def _give_up(self, failure: Exception) -> None:
        self._is_on = False
        self._trouble.note(PIECE, failure)
        self._monitoring.set_events(self._tool, 0)


def is_program(file: str) -> bool:
    """Return whether a file belongs to the program, rather than to Python, torch, an installed package or the
    harness.
    """
    if file.startswith(("<", _HARNESS)) or is_installed(file):
        return False
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return not (torch and file.startswith(os.path.dirname(torch) + os.sep))


def start_coverage(directory: str, trouble: TroubleLog) -> None:
    """Record the lines that this process executes, if its Python does so at no cost or an environment variable asks.

    Raise RuntimeError if debuggers or other tools use both tool numbers.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    default = "on" if sys.version_info >= protocol.COVERAGE_SINCE else "off"
    if monitoring is None or os.environ.get(protocol.ENV_COVERAGE, default) == "off":
        return
    tool = next((tool for tool in TOOLS if monitoring.get_tool(tool) is None), None)
    if tool is None:
        names = " and ".join(str(monitoring.get_tool(tool)) for tool in TOOLS)
        raise RuntimeError(f"{names} use the tools {TOOLS[0]} and {TOOLS[1]} of sys.monitoring")
    monitoring.use_tool_id(tool, "nsa-harness coverage")
    Coverage(monitoring, tool, directory, trouble).start()
