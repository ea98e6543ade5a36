"""Tracebacks as they would be without the probe, whose functions stand around some of torch's.

Every Python function that an exception passes is in its traceback, so they are left out where one is rendered: by the
module `traceback`, which logging, multiprocessing and torchrun use too, and by the interpreter at the end of a thread
or of the program. The exception itself is not touched before that: it is evidence.
"""

from __future__ import annotations

import os
import sys

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Any

_PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WALKS = ("walk_tb", "_walk_tb_with_full_positions")  # each yields the frame first; the second one since 3.11
_CHAIN_LIMIT = 32


def hide() -> None:
    """Once torch is there: it has loaded both modules."""
    rendering: Any = sys.modules["traceback"]
    for name in _WALKS:
        if hasattr(rendering, name):
            setattr(rendering, name, _unseen(getattr(rendering, name)))
    threads: Any = sys.modules["threading"]
    previous = threads.excepthook

    def excepthook(ended: Any) -> None:
        leave_out(ended.exc_value)
        previous(ended)

    threads.excepthook = excepthook


def _unseen(walk: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def walk_without_guests(traceback: TracebackType | None) -> Iterator[Any]:
        return (one for one in walk(traceback) if not _is_ours(one[0]))

    walk_without_guests.__doc__ = walk.__doc__
    return walk_without_guests


def leave_out(error: BaseException | None) -> None:
    """Our frames out of an exception that nobody will catch any more, and out of what it was raised from."""
    for _ in range(_CHAIN_LIMIT):
        if error is None:
            return
        error.__traceback__ = without_guests(error.__traceback__)
        error = error.__cause__ or error.__context__


def without_guests(traceback: TracebackType | None) -> TracebackType | None:
    """The same traceback, shortened in place; None where all of it is ours."""
    while traceback is not None and _is_ours(traceback.tb_frame):
        traceback = traceback.tb_next
    kept = traceback
    while kept is not None:
        while kept.tb_next is not None and _is_ours(kept.tb_next.tb_frame):
            kept.tb_next = kept.tb_next.tb_next
        kept = kept.tb_next
    return traceback


def _is_ours(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.startswith(_PROBE))
