"""Finds lines of the program whose allocated memory grows during training.

This module is loaded only if the launch requests it. A dispatch mode of torch follows tensors from their creation,
including tensors that only an autograd graph keeps alive. tracemalloc follows all other memory.
"""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .patches import TroubleLog
from .places import foreign_code, innermost_own, is_own, place_text
from .status_file import StatusFileWriter

# Tracing begins after this optimizer step, so memory that the program and torch allocate once is not followed. Living
# allocations are counted after one and after nine traced steps. Memory that each step replaces is in both counts.
BEGIN = 8
FIRST, SECOND = BEGIN + 1, BEGIN + 9
_FRAMES = 12  # frames per allocation that tracemalloc stores
_LINES = 8  # lines in the record
_PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep

_Line = tuple[str, int]


class Growth:
    """A search for lines of the program whose allocated memory grows between two optimizer steps."""

    def __init__(self, torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
        self._torch, self._status_file, self._trouble = torch, status_file, trouble
        self._foreign = foreign_code(torch)
        self._steps = 0
        self._storages: dict[
            Any, tuple[_Line, int]
        ] = {}  # weak reference to a storage -> its allocating line and size in bytes
        self._mode: Any = None
        self._counts: list[Counter[_Line]] = []

    def watch(self) -> None:
        from torch.optim import optimizer as optimizers

        self._handle = optimizers.register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        """Stop tracking the program's memory allocations."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        tracemalloc.stop()

    def records(self) -> Iterable[dict[str, Any]]:
        """Return one record of the lines whose memory grew the most, or () if no steps were compared."""
        if len(self._counts) < 2:
            return ()
        growth = (self._counts[1] - self._counts[0]).most_common(_LINES)
        lines = [{"place": place_text(file, line, ""), "bytes": size} for (file, line), size in growth]
        return ({"at": "grown", "first": FIRST, "last": SECOND, "lines": lines},)

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        if self._steps in (BEGIN, FIRST, SECOND) and self._status_file.is_writing:
            self._trouble.attempt("growth", self._begin if self._steps == BEGIN else self._count)

    def _begin(self) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode

        note, tensor = self._note_storage, self._torch.Tensor

        class StorageRecorder(TorchDispatchMode):  # type: ignore[misc]
            """A dispatch mode that records which line allocated each tensor's storage."""

            def __torch_dispatch__(self, operator: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
                result = operator(*arguments, **(options or {}))
                for value in result if isinstance(result, (list, tuple)) else (result,):
                    if isinstance(value, tensor):
                        note(StorageWeakRef(value.untyped_storage()), value)
                return result

        self._mode = StorageRecorder()
        self._mode.__enter__()
        tracemalloc.start(_FRAMES)

    def _note_storage(self, storage: Any, tensor: Any) -> None:
        """Record which line of the program allocated `storage`, unless the storage is already recorded."""
        if storage in self._storages:
            return
        frame = innermost_own(sys._getframe(2), self._foreign)
        if frame is not None:
            size_bytes = tensor.untyped_storage().nbytes()
            self._storages[storage] = (frame.f_code.co_filename, frame.f_lineno), size_bytes

    def _count(self) -> None:
        alive: Counter[_Line] = Counter()
        for trace in tracemalloc.take_snapshot().traces:
            line = _line(trace.traceback, self._foreign)
            if line is not None:
                alive[line] += trace.size
        for storage, (line, size_bytes) in list(self._storages.items()):
            if storage.expired():
                del self._storages[storage]
            else:
                alive[line] += size_bytes
        self._counts.append(alive)
        if self._steps == SECOND:
            self.stop()


def _line(traceback: Iterable[Any], foreign: tuple[str, ...]) -> _Line | None:
    """Return the innermost line of a traceback that belongs to the program, or None if there is none."""
    own: _Line | None = None
    for frame in traceback:
        if frame.filename.startswith(_PROBE):
            return None
        if is_own(frame.filename, foreign):
            own = frame.filename, frame.lineno
    return own
