"""Exceptions that leave a module's forward: a program that catches one and goes on shows nothing of it later."""

from __future__ import annotations

import sys
from typing import Any

from .. import protocol
from .board import Board
from .places import innermost, place_text

TELLINGS = 8  # a program that catches them all the time is told by its first ones


class Caught:
    """Says on the board what was raised, where and in which step. Holds on to no exception, and so to no frame."""

    def __init__(self, board: Board, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        self._told = 0
        self._last: tuple[int, int] | None = None  # the same exception passes one module after the other

    def look(self) -> None:
        """Called from a forward hook: the frame before the hook's is torch's, which handles the exception if any."""
        error = sys.exc_info()[1]
        trace = error.__traceback__ if error is not None else None
        if trace is None or trace.tb_frame is not sys._getframe(2) or self._told == TELLINGS:
            return
        key = (id(error), self._board.step)
        if key == self._last:
            return
        self._last = key
        frame, line = self._place(trace)
        if frame is None:
            return
        self._told += 1
        place = place_text(frame.f_code.co_filename, line, frame.f_code.co_name)
        name = f"{protocol.FACT_CAUGHT}{self._told}"
        self._board.fact(name, f"{self._board.step} {type(error).__name__} {place}")

    def _place(self, trace: Any) -> tuple[Any, int]:
        """The user's line that raised; of what torch raised the line that called it."""
        found = innermost(trace.tb_frame, self._foreign)
        line = found.f_lineno if found is not None else 0
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(self._foreign):
                found, line = trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
        return found, line
