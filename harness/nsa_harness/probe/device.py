"""How far the GPU is: events at marks of the training thread, asked for by the beat thread, which alone waits.

The host runs ahead of a GPU, so marks of the host say little of it. An event is recorded at most once a beat, costs a
few microseconds, and synchronizes nothing. While a CUDA graph is captured nothing is recorded and nothing asked: a
question from any thread would end the capture.
"""

from __future__ import annotations

import _thread
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from .hooks import compiling_test
from .status_file import StatusFileWriter
from .trouble import TroubleLog

PENDING_LIMIT = 64


def install(torch: Any, board: StatusFileWriter, trouble: TroubleLog) -> DeviceEvents | None:
    """None where this torch was built without CUDA: there is nothing to see, and nothing is paid for it."""
    if getattr(torch.version, "cuda", None) is None and getattr(torch.version, "hip", None) is None:
        return None
    marks = DeviceEvents(torch, board, trouble)
    marks.cover_captures()
    marks.hook()
    return marks


class DeviceEvents:
    def __init__(self, torch: Any, board: StatusFileWriter, trouble: TroubleLog) -> None:
        self._torch = torch
        self._board = board
        self._trouble = trouble
        self._is_compiling = compiling_test(torch)
        self._lock = _thread.allocate_lock()
        self._captures = 0
        self._wanted = False
        self._pending: deque[Any] = deque()
        self._recorded = self._completed = 0
        self._handles: list[Any] = []

    def hook(self) -> None:
        """Global hooks that cost one look at a flag when no event is wanted."""
        from torch.optim import optimizer as optimizers

        module = self._torch.nn.modules.module
        self._handles.append(module.register_module_forward_pre_hook(self.record_if_wanted))
        self._handles.append(optimizers.register_optimizer_step_post_hook(self.record_if_wanted))

    def cover_captures(self) -> None:
        graph = self._torch.cuda.CUDAGraph
        graph.capture_begin = self._covered(graph.capture_begin, +1)
        graph.capture_end = self._covered(graph.capture_end, -1)

    def record_if_wanted(self, *_: Any) -> None:
        """In a thread that trains. Nothing is recorded before the program itself has initialized CUDA."""
        if not self._wanted or self._is_compiling():
            return
        self._wanted = False
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
        """In the beat thread: which events the device has reached since."""
        with self._lock:
            if self._captures:
                return
            before = self._completed
            while self._pending and self._reached(self._pending[0]):
                self._pending.popleft()
                self._completed += 1
        if self._completed != before or self._pending:
            self._board.count_device(self._recorded, self._completed, changed=self._completed != before)
        self._wanted = bool(self._handles) and len(self._pending) < PENDING_LIMIT

    def _reached(self, event: Any) -> bool:
        # A thread that asks CUDA something without a device of its own would open a context on device 0.
        self._torch.cuda.set_device(event.device)
        return bool(event.query())

    def _covered(self, function: Callable[..., Any], change: int) -> Callable[..., Any]:
        """Count the captures in progress: one begins before its begin, and ends after its end or a failed begin."""

        @functools.wraps(function)
        def covered(*arguments: Any, **options: Any) -> Any:
            if change > 0:
                self._count(+1)
                try:
                    return function(*arguments, **options)
                except BaseException:
                    self._count(-1)
                    raise
            try:
                return function(*arguments, **options)
            finally:
                self._count(-1)

        return covered

    def _count(self, change: int) -> None:
        with self._lock:
            self._captures = max(0, self._captures + change)

    def _give_up(self, error: Exception) -> None:
        self._trouble.note("device marks", error)
        for handle in self._handles:
            handle.remove()
        self._handles = []
