"""Measures the progress of the GPU with CUDA events.

Training threads record them, and the heartbeat thread queries them. The host runs ahead of a GPU, so the host's
progress events do not show how far the GPU is. A CUDA event is recorded at most once per heartbeat, costs a few
microseconds, and synchronizes nothing. While a CUDA graph is captured, no CUDA event is recorded or queried, because a
query from any thread would abort the capture.
"""

from __future__ import annotations

import _thread
from collections import deque
from typing import Any

from .patches import TroubleLog, compiling_test, patch
from .status_file import StatusFileWriter

PENDING_LIMIT = 64


def install(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> DeviceEvents | None:
    """Start measuring GPU progress. Return None if torch has no CUDA or HIP support."""
    if getattr(torch.version, "cuda", None) is None and getattr(torch.version, "hip", None) is None:
        return None
    events = DeviceEvents(torch, status_file, trouble)
    events.watch_captures()
    events.hook()
    return events


class DeviceEvents:
    """The CUDA events that show how far this process's GPU has progressed."""

    def __init__(self, torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
        self._torch = torch
        self._status_file = status_file
        self._trouble = trouble
        self._is_compiling = compiling_test(torch)
        self._lock = _thread.allocate_lock()
        self._captures = 0
        self._requested = False
        self._pending: deque[Any] = deque()
        self._recorded = self._completed = 0
        self._handles: list[Any] = []

    def hook(self) -> None:
        """Register global torch hooks that record a CUDA event when one is requested."""
        from torch.optim import optimizer as optimizers

        module = self._torch.nn.modules.module
        self._handles.append(module.register_module_forward_pre_hook(self.record_if_requested))
        self._handles.append(optimizers.register_optimizer_step_post_hook(self.record_if_requested))

    def watch_captures(self) -> None:
        """Patch CUDAGraph to count the graph captures in progress."""

        def begin_failed(_state: object, _arguments: Any, _options: Any, _result: Any, error: object) -> None:
            if error is not None:
                self._count(-1)

        graph = self._torch.cuda.CUDAGraph
        patch(
            graph,
            "capture_begin",
            "device progress",
            self._trouble,
            before=lambda *_: self._count(+1),
            after=begin_failed,
        )
        patch(graph, "capture_end", "device progress", self._trouble, after=lambda *_: self._count(-1))

    def record_if_requested(self, *_: Any) -> None:
        """Record a CUDA event if the heartbeat thread has requested one."""
        # The compiler is asked first: torch.compile would compile again whenever `_requested` changes.
        if self._is_compiling() or not self._requested:
            return
        self._requested = False
        try:
            cuda = self._torch.cuda
            if not cuda.is_initialized() or cuda.is_current_stream_capturing():
                return
            event = cuda.Event()
            event.record()
            self._pending.append(event)
            self._recorded += 1
        except Exception as error:
            self._give_up(error)

    def poll(self) -> None:
        """Count the CUDA events that the GPU has reached, and request the next one."""
        with self._lock:
            if self._captures:
                return
            before = self._completed
            while self._pending and self._reached(self._pending[0]):
                self._pending.popleft()
                self._completed += 1
        if self._completed != before or self._pending:
            self._status_file.write_device_counts(self._recorded, self._completed, changed=self._completed != before)
        self._requested = bool(self._handles) and len(self._pending) < PENDING_LIMIT

    def _reached(self, event: Any) -> bool:
        # A thread that queries CUDA without having set a device would open a context on device 0.
        self._torch.cuda.set_device(event.device)
        return bool(event.query())

    def _count(self, change: int) -> None:
        with self._lock:
            self._captures = max(0, self._captures + change)

    def _give_up(self, error: Exception) -> None:
        self._trouble.note("device progress", error)
        for handle in self._handles:
            handle.remove()
        self._handles = []
