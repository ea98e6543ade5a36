"""Makes a rank observable from outside, mainly through a heartbeat thread."""

from __future__ import annotations

import _thread
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .. import protocol
from .patches import TroubleLog
from .places import foreign_code, frame_place, innermost_own, place_text
from .status_file import StatusFileWriter

INTERVAL_S = 0.25
LINES_LIMIT, WRITTEN_LINES = 512, 24  # lines of the program that are counted, and that are written at the end
THREAD_NAME = "nsa-harness-beat"


class Heartbeat:
    """A daemon thread that shows that Python still runs. It calls each of `pieces` until that raises."""

    def __init__(
        self,
        status_file: StatusFileWriter,
        directory: str,
        trouble: TroubleLog,
        pieces: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        self._status_file = status_file
        self._trouble = trouble
        self._flight = FlightRecorder(directory)
        self._pieces = {"last line": self._sample_line, **(pieces or {})}
        self._last_answered = 0
        self._last_counts = (0, 0)
        self._last_position: object = None
        self._line_counts: Counter[Any] = Counter()  # (code, line) -> number of heartbeats after the first step
        self._main_thread = threading.main_thread().ident or 0
        self._foreign = foreign_code(sys.modules["torch"])
        self._counter: Callable[..., bytes] | None = self._flight.summary_function()

    def start(self) -> None:
        threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()

    def _run(self) -> None:
        # A signal to the process must interrupt the thread that the program expects, not this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while self._status_file.is_writing:
            self._trouble.attempt("heartbeat", self._beat)
            time.sleep(INTERVAL_S)

    def _beat(self) -> None:
        status_file = self._status_file
        last_request = status_file.last_request()
        if last_request > self._last_answered:
            self._trouble.attempt("flight", self._flight.write)
            self._last_answered = last_request
        status_file.write_heartbeat(self._last_answered)
        for name, piece in list(self._pieces.items()):
            if not self._trouble.attempt(name, piece):
                del self._pieces[name]
        torch = sys.modules["torch"]
        if not torch.distributed.is_initialized():
            return
        if status_file.rank < 0:
            status_file.write_identity(torch.distributed.get_rank(), torch.distributed.get_world_size())
        if self._counter is not None and not self._trouble.attempt("collective counters", self._count):
            self._counter = None

    def _sample_line(self) -> None:
        """Record which line of the program the main thread is executing."""
        if self._status_file.is_exiting:
            return  # the line of an exit handler is not the line from which the program exited
        frame = innermost_own(sys._current_frames().get(self._main_thread), self._foreign)
        if frame is None:
            return
        position = frame.f_code, frame.f_lineno
        if self._status_file.step > 1 and (position in self._line_counts or len(self._line_counts) < LINES_LIMIT):
            self._line_counts[position] += 1
        if position == self._last_position:
            return
        self._last_position = position
        self._status_file.write_last_line(frame_place(frame))

    def line_records(self) -> list[dict[str, Any]]:
        """Return one record with the lines that the main thread executed at the heartbeats after its first step."""
        counts = self._line_counts.most_common(WRITTEN_LINES)
        lines = [[place_text(code.co_filename, line, code.co_name), count] for (code, line), count in counts]
        return [{"at": "lines", "samples": self._line_counts.total(), "lines": lines}] if lines else []

    def _count(self) -> None:
        """Record the number of collectives enqueued and completed so far. This costs about 0.3 ms."""
        assert self._counter is not None
        groups = json.loads(self._counter(includeCollectives=False)).get("pg_status") or {}
        counts = _sum(groups, "last_enqueued_collective"), _sum(groups, "last_completed_collective")
        if counts != self._last_counts:
            self._last_counts = counts
            self._status_file.write_collective_counts(*counts)


def _sum(groups: Any, key: str) -> int:
    return sum(max(0, int(group.get(key, 0))) for group in groups.values())


# torch's flight recorder, copied to a file: the latest collectives of each group.

ENTRIES_LIMIT = 512  # latest entries that are written, in addition to all collectives that are not finished


class FlightRecorder:
    """A writer that dumps this process's flight recorder, which belongs to torch, to a file."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def summary_function(self) -> Callable[..., bytes] | None:
        """Return torch's function that dumps the flight recorder as JSON, or None if this torch has none."""
        c10d = sys.modules.get("torch._C._distributed_c10d")
        return getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)

    def write(self) -> None:
        """Dump the flight recorder to a file, if this torch version has one."""
        record = self._record()
        if record is None:
            return
        entries = record.get("entries") or []  # oldest first
        oldest = len(entries) - ENTRIES_LIMIT
        record["entries"] = [entry for index, entry in enumerate(entries) if index >= oldest or not _is_retired(entry)]
        path = os.path.join(self._directory, protocol.FLIGHT.format(pid=os.getpid()))
        # The main thread writes the file at its exit, perhaps while the heartbeat thread still writes it.
        incomplete = f"{path}.{_thread.get_native_id()}.new"
        descriptor = os.open(incomplete, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file, default=str)
        os.replace(incomplete, path)

    def _record(self) -> dict[str, Any] | None:
        """Return the contents of the flight recorder, or None if this torch has none.

        They come from the JSON dump. torch can also dump a pickle with stacks, but collecting the first stack takes
        more than a second.
        """
        dump = self.summary_function()
        record = json.loads(dump()) if dump is not None else None
        return record if isinstance(record, dict) else None


def _is_retired(entry: dict[str, Any]) -> bool:
    return str(entry.get("retired")).lower() == "true"


# torch's own worker server on a Unix socket. Its threads run no Python, so it answers even while a thread holds the
# GIL.

NO_LOGGING = 3  # above every level at which the server logs


def start_worker_server(torch: Any, directory: str) -> None:
    """Start torch's worker server. Raise an exception if this torch has none.

    The server object is never destroyed. Its destructor ends the process, and a forked child that exits would destroy
    its parent's server as well (torch 2.13: "failed to listen" in a thread, then abort).
    """
    path = os.path.join(directory, protocol.SOCKET.format(pid=os.getpid()))
    server_type = sys.modules["torch._C._distributed_c10d"]._WorkerServer
    level = ctypes.c_int.in_dll(ctypes.CDLL(_library(torch)), "FLAGS_caffe2_log_level")
    errors: list[Exception] = []

    def start() -> None:
        # The server's threads inherit this signal mask: a signal must interrupt the thread that the program expects.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        previous_level, level.value = level.value, NO_LOGGING  # the server would log its start to the program's stderr
        try:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_start_server(server_type, path)))
            os.chmod(path, 0o600)
        except Exception as error:
            errors.append(error)
        finally:
            level.value = previous_level

    _run_in_thread(start)
    if errors:
        raise errors[0]


def _start_server(server_type: Any, path: str) -> Any:
    """Return a server on the socket at `path`, which is reached through a file descriptor if it is too long."""
    if len(os.fsencode(path)) <= protocol.SOCKET_PATH_LIMIT:
        return server_type(path)
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return server_type(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def _library(torch: Any) -> str:
    return os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")


def _run_in_thread(start: Callable[[], None]) -> None:
    """Run `start`, which changes the signal mask of its thread, in a new thread, and wait for it to finish."""
    finished_lock = _thread.allocate_lock()
    finished_lock.acquire()

    def run() -> None:
        try:
            start()
        finally:
            finished_lock.release()

    thread = threading.Thread(target=run, name="nsa-harness-server", daemon=True)
    thread.start()
    finished_lock.acquire()
    thread.join()
