"""What makes a rank observable from outside: the heartbeat thread, the flight recorder, torch's worker server."""

from __future__ import annotations

import _thread
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .. import protocol
from .patches import TroubleLog
from .places import foreign_code, frame_place, innermost_own
from .status_file import StatusFileWriter

INTERVAL_S = 0.25
THREAD_NAME = "nsa-harness-beat"


class Heartbeat:
    """A daemon thread that shows that Python still runs, counts collectives and answers requests.

    `pieces` are called at every heartbeat, each under its name. A piece that fails is never called again.
    """

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
        self._answered = 0
        self._counted = (0, 0)
        self._seen: object = None
        self._main_thread = threading.main_thread().ident or 0
        self._foreign = foreign_code(sys.modules["torch"])
        self._counter: Callable[..., bytes] | None = self._flight.summary_function()

    def start(self) -> None:
        threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()

    def _run(self) -> None:
        # A signal to the process must interrupt the thread that the program expects, not this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while self._status_file.live:
            self._trouble.attempt("beat", self._once)
            time.sleep(INTERVAL_S)

    def _once(self) -> None:
        status_file = self._status_file
        requested = status_file.requested()
        if requested > self._answered:
            self._trouble.attempt("flight", self._flight.write)
            self._answered = requested
        status_file.heartbeat(self._answered)
        for name, piece in list(self._pieces.items()):
            if not self._trouble.attempt(name, piece):
                del self._pieces[name]
        torch = sys.modules["torch"]
        if not torch.distributed.is_initialized():
            return
        if status_file.rank < 0:
            status_file.identify(torch.distributed.get_rank(), torch.distributed.get_world_size())
        if self._counter is not None and not self._trouble.attempt("collective counters", self._count):
            self._counter = None

    def _sample_line(self) -> None:
        """Write the main thread's innermost line of the program, for a rank that is killed before it can be asked."""
        if self._status_file.over:
            return  # an exit handler's line is not the line that the program exited from
        frame = innermost_own(sys._current_frames().get(self._main_thread), self._foreign)
        if frame is None or (frame.f_code, frame.f_lineno) == self._seen:
            return
        self._seen = (frame.f_code, frame.f_lineno)
        self._status_file.saw(frame_place(frame))

    def _count(self) -> None:
        """Write the sums over all process groups. Costs about 0.3 ms; sends nothing and asks no device."""
        assert self._counter is not None
        groups = json.loads(self._counter(includeCollectives=False)).get("pg_status") or {}
        counted = _sum(groups, "last_enqueued_collective"), _sum(groups, "last_completed_collective")
        if counted != self._counted:
            self._counted = counted
            self._status_file.count_collectives(*counted)


def _sum(groups: Any, key: str) -> int:
    """Sum a counter. The recorder writes numbers as strings, and -1 for a group that has done nothing yet."""
    return sum(max(0, int(group.get(key, 0))) for group in groups.values())


# torch's flight recorder, copied to a file: the latest collectives of each group.

ENTRIES_LIMIT = 512  # the latest entries that are kept, in addition to all that are still open


class FlightRecorder:
    def __init__(self, directory: str) -> None:
        self._directory = directory

    def summary_function(self) -> Callable[..., bytes] | None:
        """Return this torch's JSON dump of the recorder, or None. Its older name dates from NCCL-only times."""
        c10d = sys.modules.get("torch._C._distributed_c10d")
        return getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)

    def write(self) -> None:
        """Write the recorder to a file, under another name until it is complete. Without a recorder, write none."""
        record = self._record()
        if record is None:
            return
        entries = record.get("entries") or []  # oldest first
        oldest = len(entries) - ENTRIES_LIMIT
        record["entries"] = [entry for index, entry in enumerate(entries) if index >= oldest or not _is_retired(entry)]
        path = os.path.join(self._directory, protocol.FLIGHT.format(pid=os.getpid()))
        incomplete = f"{path}.new"
        descriptor = os.open(incomplete, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file, default=str)
        os.replace(incomplete, path)

    def _record(self) -> dict[str, Any] | None:
        """Return the JSON form. The pickled form has stacks, but takes over a second to collect the first of them."""
        dump = self.summary_function()
        record = json.loads(dump()) if dump is not None else None
        return record if isinstance(record, dict) else None


def _is_retired(entry: dict[str, Any]) -> bool:
    return str(entry.get("retired")).lower() == "true"


# torch's own worker server on a unix socket. Its threads are not Python's, so it answers while a thread holds the GIL.

QUIET = 3  # above every level at which the server logs


def start_worker_server(torch: Any, directory: str) -> None:
    """Listen until the process ends. Raises if this torch has no worker server.

    The server ends the process when it is destroyed, and a forked child that exits would destroy it for its parent
    (torch 2.13: "failed to listen" in a thread, then abort). Therefore it is never destroyed.
    """
    path = os.path.join(directory, protocol.SOCKET.format(pid=os.getpid()))
    server_type = sys.modules["torch._C._distributed_c10d"]._WorkerServer
    level = ctypes.c_int.in_dll(ctypes.CDLL(_library(torch)), "FLAGS_caffe2_log_level")
    errors: list[Exception] = []

    def start() -> None:
        # The server's threads inherit this mask: a signal must interrupt the thread that the program expects.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        before, level.value = level.value, QUIET  # the server logs its start to stderr, which belongs to the program
        try:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_listening(server_type, path)))
            os.chmod(path, 0o600)
        except Exception as error:
            errors.append(error)
        finally:
            level.value = before

    _run_in_thread(start)
    if errors:
        raise errors[0]


def _listening(server_type: Any, path: str) -> Any:
    """Return a server at `path`, which it reaches through the directory's descriptor if it is too long for a socket."""
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
    """Run `start` in a thread that ends at once, so that the program's signal mask does not change."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            start()
        finally:
            done.release()

    thread = threading.Thread(target=run, name="nsa-harness-server", daemon=True)
    thread.start()
    done.acquire()
    thread.join()
