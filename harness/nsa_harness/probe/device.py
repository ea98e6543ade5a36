"""How far the GPU is: CUDA events that the training thread records, and that only the heartbeat thread queries.

The host runs ahead of a GPU, so the host's progress events show little of the GPU's. An event is recorded at most once
per heartbeat, costs a few microseconds, and synchronizes nothing. While a CUDA graph is captured, no event is recorded
or queried: a query from any thread would end the capture.
"""

from __future__ import annotations

import _thread
from collections import deque
from typing import Any

from .patches import TroubleLog, compiling_test, patch
from .status_file import StatusFileWriter

PENDING_LIMIT = 64


def install(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> DeviceEvents | None:
    """Install the hooks, or return None in a torch that was built without CUDA."""
    if getattr(torch.version, "cuda", None) is None and getattr(torch.version, "hip", None) is None:
        return None
    events = DeviceEvents(torch, status_file, trouble)
    events.watch_captures()
    events.hook()
    return events


class DeviceEvents:
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
        """Register global hooks, which only read a flag while no event is requested."""
        from torch.optim import optimizer as optimizers

        module = self._torch.nn.modules.module
        self._handles.append(module.register_module_forward_pre_hook(self.record_if_requested))
        self._handles.append(optimizers.register_optimizer_step_post_hook(self.record_if_requested))

    def watch_captures(self) -> None:
        """Count the captures in progress: from before their begin until after their end, or after a failed begin."""

        def begin_failed(_state: object, _arguments: Any, _options: Any, _result: Any, error: object) -> None:
            if error is not None:
                self._count(-1)

        graph = self._torch.cuda.CUDAGraph
        patch(
            graph,
            "capture_begin",
            "device marks",
            self._trouble,
            before=lambda *_: self._count(+1),
            after=begin_failed,
        )
        patch(graph, "capture_end", "device marks", self._trouble, after=lambda *_: self._count(-1))

    def record_if_requested(self, *_: Any) -> None:
        """Record an event in a training thread, once the program itself has initialized CUDA."""
        if not self._requested or self._is_compiling():
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
        """Query in the heartbeat thread which events the device has reached."""
        with self._lock:
            if self._captures:
                return
            before = self._completed
            while self._pending and self._reached(self._pending[0]):
                self._pending.popleft()
                self._completed += 1
        if self._completed != before or self._pending:
            self._status_file.count_device(self._recorded, self._completed, changed=self._completed != before)
        self._requested = bool(self._handles) and len(self._pending) < PENDING_LIMIT

    def _reached(self, event: Any) -> bool:
        # A thread that queries CUDA without having set a device would open a context on device 0.
        self._torch.cuda.set_device(event.device)
        return bool(event.query())

    def _count(self, change: int) -> None:
        with self._lock:
            self._captures = max(0, self._captures + change)

    def _give_up(self, error: Exception) -> None:
        self._trouble.note("device marks", error)
        for handle in self._handles:
            handle.remove()
        self._handles = []
