"""Where growing memory was allocated: what is alive after one step and after a later step, by the allocating line.

Loaded only if the launch asks for it. A mode of torch's dispatcher follows tensors from their creation, also those that
only a graph keeps alive. tracemalloc follows everything else.
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

# Optimizer steps after which tracing begins: what a program and torch keep from their first steps is not followed. The
# allocations of one step are counted, and later those of nine steps: what each step replaces is in both counts.
BEGIN = 8
FIRST, SECOND = BEGIN + 1, BEGIN + 9
_FRAMES = 12
_LINES = 8
_PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep

_Line = tuple[str, int]


class Growth:
    """Counts living allocations in one process, twice. A forked child counts nothing."""

    def __init__(self, torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
        self._torch, self._status_file, self._trouble = torch, status_file, trouble
        self._foreign = foreign_code(torch)
        self._steps = 0
        self._made: dict[Any, tuple[_Line, int]] = {}  # weak reference to a storage -> its line and size
        self._mode: Any = None
        self._counted: list[Counter[_Line]] = []

    def watch(self) -> None:
        from torch.optim import optimizer as optimizers

        self._handle = optimizers.register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        """Stop following allocations."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        tracemalloc.stop()

    def records(self) -> Iterable[dict[str, Any]]:
        """Return one record with the lines that grew most, if the program reached both counts."""
        if len(self._counted) < 2:
            return ()
        grown = (self._counted[1] - self._counted[0]).most_common(_LINES)
        lines = [{"place": place_text(file, line, ""), "bytes": size} for (file, line), size in grown]
        return ({"at": "grown", "first": FIRST, "last": SECOND, "lines": lines},)

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        if self._steps in (BEGIN, FIRST, SECOND) and self._status_file.live:
            self._trouble.attempt("growth", self._begin if self._steps == BEGIN else self._count)

    def _begin(self) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode

        note, tensor = self._note, self._torch.Tensor

        class Made(TorchDispatchMode):  # type: ignore[misc]
            """Notes the storage of every tensor that an operator returns."""

            def __torch_dispatch__(self, operator: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
                result = operator(*arguments, **(options or {}))
                for value in result if isinstance(result, (list, tuple)) else (result,):
                    if isinstance(value, tensor):
                        note(StorageWeakRef(value.untyped_storage()), value)
                return result

        self._mode = Made()
        self._mode.__enter__()
        tracemalloc.start(_FRAMES)

    def _note(self, storage: Any, tensor: Any) -> None:
        """Note a new storage. Views and tensors changed in place have a storage that is known."""
        if storage in self._made:
            return
        frame = innermost_own(sys._getframe(2), self._foreign)
        if frame is not None:
            size_bytes = tensor.untyped_storage().nbytes()
            self._made[storage] = (frame.f_code.co_filename, frame.f_lineno), size_bytes

    def _count(self) -> None:
        alive: Counter[_Line] = Counter()
        for trace in tracemalloc.take_snapshot().traces:
            line = _line(trace.traceback, self._foreign)
            if line is not None:
                alive[line] += trace.size
        for storage, (line, size_bytes) in list(self._made.items()):
            if storage.expired():
                del self._made[storage]
            else:
                alive[line] += size_bytes
        self._counted.append(alive)
        if self._steps == SECOND:
            self.stop()


def _line(traceback: Iterable[Any], foreign: tuple[str, ...]) -> _Line | None:
    """Return the program's innermost line, or None for an allocation of the probe. The outermost frame comes first."""
    own: _Line | None = None
    for frame in traceback:
        if frame.filename.startswith(_PROBE):
            return None
        if is_own(frame.filename, foreign):
            own = frame.filename, frame.lineno
    return own
