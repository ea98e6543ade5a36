"""The liveness beat: a daemon thread that shows Python still runs here, counts collectives and answers requests."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .flight import FlightRecorder
from .places import foreign_code, innermost_own, place_text
from .status_file import StatusFileWriter
from .trouble import TroubleLog

INTERVAL_S = 0.25
THREAD_NAME = "nsa-harness-beat"


class Heartbeat:
    """`pieces` are called at every beat, each by its name; one that fails is never called again."""

    def __init__(
        self,
        board: StatusFileWriter,
        directory: str,
        trouble: TroubleLog,
        pieces: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        self._board = board
        self._trouble = trouble
        self._flight = FlightRecorder(directory)
        self._pieces = {"last line": self._look, **(pieces or {})}
        self._answered = 0
        self._counted = (0, 0)
        self._seen: object = None
        self._main_thread = threading.main_thread().ident or 0
        self._foreign = foreign_code(sys.modules["torch"])
        self._counter: Callable[..., bytes] | None = self._flight.summary_function()

    def start(self) -> None:
        threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()

    def _run(self) -> None:
        # A signal for the process must interrupt the thread the program expects, not this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while self._board.live:
            self._trouble.attempt("beat", self._once)
            time.sleep(INTERVAL_S)

    def _once(self) -> None:
        board = self._board
        wanted = board.requested()
        if wanted > self._answered:
            self._trouble.attempt("flight", self._flight.write)
            self._answered = wanted
        board.beat(self._answered)
        for name, piece in list(self._pieces.items()):
            if not self._trouble.attempt(name, piece):
                del self._pieces[name]
        torch = sys.modules["torch"]
        if not torch.distributed.is_initialized():
            return
        if board.rank < 0:
            board.identify(torch.distributed.get_rank(), torch.distributed.get_world_size())
        if self._counter is not None and not self._trouble.attempt("collective counters", self._count):
            self._counter = None

    def _look(self) -> None:
        """The main thread's innermost line of the user's, for a rank that is killed before it can be asked."""
        if self._board.over:
            return  # what runs at exit is not the line that the program left from
        frame = innermost_own(sys._current_frames().get(self._main_thread), self._foreign)
        if frame is None or (frame.f_code, frame.f_lineno) == self._seen:
            return
        self._seen = (frame.f_code, frame.f_lineno)
        self._board.saw(place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))

    def _count(self) -> None:
        """Sums over the process groups; about 0.3 ms, nothing is sent and no device is asked."""
        assert self._counter is not None
        groups = json.loads(self._counter(includeCollectives=False)).get("pg_status") or {}
        counted = _sum(groups, "last_enqueued_collective"), _sum(groups, "last_completed_collective")
        if counted != self._counted:
            self._counted = counted
            self._board.count_collectives(*counted)


def _sum(groups: Any, key: str) -> int:
    """The recorder writes numbers as strings, and -1 for a group that has done nothing yet."""
    return sum(max(0, int(group.get(key, 0))) for group in groups.values())
