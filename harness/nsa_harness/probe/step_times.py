"""Measures how long a rank computes in each training step, outside of collectives.

In synchronous training, all ranks take equally long for a step, because the fast ranks wait in collectives for the slow
one. Only the time outside of collectives shows which rank is slow. DDP waits inside the backward pass, in C++, so a
backward pass counts as a wait whenever the training thread neither uses a CPU nor waits for one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from operator import sub
from typing import Any

from .hooks import FetchTimes
from .patches import TroubleLog, patch

WINDOW = 64  # steps between two samples whose times are kept
_US = 1000

_ident, _now_ns, _cpu_ns = threading.get_ident, time.monotonic_ns, time.thread_time_ns


class StepTimes:
    """The times of the main thread in the latest training steps.

    Nothing is measured on a GPU: the host runs ahead of it, so the times of the host do not show how long the rank
    computed.
    """

    def __init__(self, torch: Any, fetches: FetchTimes) -> None:
        self._fetches = fetches
        self._uses_gpu = torch.cuda.is_initialized
        self._thread = threading.main_thread().ident
        # Totals of the main thread.
        self.waited_ns = 0  # in calls that wait for other ranks, outside of backward passes
        self._blocked_ns = 0  # in backward passes, neither using a CPU nor waiting for one
        self._backward_ns = 0  # CPU time of backward passes
        self._backward_depth = 0  # a reentrant checkpoint runs a backward pass inside a backward pass
        self._backward_began = (0, 0, 0, 0)
        self._delay_file: int | None = None
        self._last: tuple[int, ...] | None = None
        self._steps: deque[tuple[int, ...]] = deque(maxlen=WINDOW)

    def watch_buffers(self, torch: Any, trouble: TroubleLog) -> None:
        """Count the time in which DDP copies the buffers of rank 0 to all ranks, in C++, as a wait."""

        def after(began_ns: Any, *_: Any) -> None:
            if _ident() == self._thread:
                self.waited_ns += _now_ns() - began_ns

        wrapper = torch.nn.parallel.DistributedDataParallel
        patch(wrapper, "_sync_buffers", "step times", trouble, before=lambda *_: _now_ns(), after=after)

    def begin_backward(self) -> None:
        if _ident() == self._thread:
            self._backward_depth += 1
            if self._backward_depth == 1:
                self._backward_began = _now_ns(), _cpu_ns(), self._delayed_ns(), self.waited_ns

    def end_backward(self) -> None:
        if _ident() == self._thread and self._backward_depth:
            self._backward_depth -= 1
            if not self._backward_depth:
                began_ns, began_cpu_ns, began_delayed_ns, self.waited_ns = self._backward_began
                delayed_ns, computed_ns = self._delayed_ns() - began_delayed_ns, _cpu_ns() - began_cpu_ns
                self._backward_ns += computed_ns
                self._blocked_ns += max(0, _now_ns() - began_ns - computed_ns - delayed_ns)

    def end_step(self) -> None:
        """Note the times of this step, unless it ends in a backward pass, on another thread or with a GPU."""
        if _ident() != self._thread or self._backward_depth or self._uses_gpu():
            self._last = None
            return
        waited_ns, fetched_ns = self.waited_ns, self._fetches.waited_ns
        totals = _now_ns(), waited_ns, self._blocked_ns, self._delayed_ns(), self._backward_ns, fetched_ns
        if self._last is not None and self._delay_file != -1:
            self._steps.append(tuple(map(sub, totals, self._last)))
        self._last = totals

    def record(self) -> dict[str, list[int]]:
        """Return the number of steps since the last record and their median times in microseconds, or {} if there are
        none.

        The times are those of the whole step, outside of waits for other ranks (at least and at most), computing in
        backward passes, and waiting for batches. Time in which the thread was ready to run but had no CPU depends on
        the load of the machine and does not count. Some of it may have passed inside of waits for other ranks, so it is
        not known exactly how much of it passed outside.
        """
        if not self._steps:
            return {}
        rows = []
        for passed, waited, blocked, delayed, backward, fetched in self._steps:
            outside = passed - waited - blocked
            rows.append((passed, max(0, outside - delayed), outside - max(0, delayed - waited), backward, fetched))
        self._steps.clear()
        columns = [[row[column] for row in rows] for column in range(len(rows[0]))]
        return {"times_us": [len(rows), *(sorted(column)[len(rows) // 2] // _US for column in columns)]}

    def _delayed_ns(self) -> int:
        """Return how long the main thread was ready to run but had no CPU. The file stays open, which is faster."""
        if self._delay_file is None:
            try:
                self._delay_file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._delay_file = -1
        return 0 if self._delay_file == -1 else int(os.pread(self._delay_file, 64, 0).split()[1])
