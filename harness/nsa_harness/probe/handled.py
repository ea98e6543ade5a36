"""Exceptions that the program's own code caught, as the interpreter itself tells them: Python 3.12 and later."""

from __future__ import annotations

import sys
from typing import Any

from .hooks import CaughtExceptions
from .places import is_installed
from .trouble import TroubleLog

PIECE = "handled exceptions"
TOOLS = (4, 3)  # of sys.monitoring, those that nobody is promised
CODES_LIMIT = 16384


def install(monitoring: Any, caught: CaughtExceptions, trouble: TroubleLog) -> None:
    """Raises RuntimeError where other tools have taken all there are."""
    tool = next((tool for tool in TOOLS if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise RuntimeError(f"tools {TOOLS[1]} and {TOOLS[0]} of sys.monitoring are taken")
    monitoring.use_tool_id(tool, "nsa-harness")
    HandledExceptions(monitoring, tool, caught, trouble).start()


class HandledExceptions:
    """Told of every exception that code goes on with, or past: about 0.2 us where the code is a library's.

    These events cannot be disabled for a code object. Nothing is asked of code that raises nothing.
    """

    def __init__(self, monitoring: Any, tool: int, caught: CaughtExceptions, trouble: TroubleLog) -> None:
        self._monitoring = monitoring
        self._tool = tool
        self._caught = caught
        self._trouble = trouble
        # By identity, whether it is the program's own. Held: no other code comes to lie where one of them does.
        self._codes: dict[int, tuple[Any, bool]] = {}

    def start(self) -> None:
        events = self._monitoring.events
        self._monitoring.register_callback(self._tool, events.EXCEPTION_HANDLED, self._handled)
        self._monitoring.register_callback(self._tool, events.RERAISE, self._raised_again)
        self._monitoring.set_events(self._tool, events.EXCEPTION_HANDLED | events.RERAISE)

    def _handled(self, code: Any, offset: int, error: BaseException) -> None:
        """An `except` begins, or what is done on the way past it: `finally`, the end of `with`, another type."""
        try:
            if self._is_own(code):
                self._caught.handled(error, sys._getframe(1), offset)
        except Exception as failure:
            self._give_up(failure)

    def _raised_again(self, code: Any, _offset: int, _error: BaseException) -> None:
        try:
            if self._is_own(code):
                self._caught.passed_on(code)
        except Exception as failure:
            self._give_up(failure)

    def _is_own(self, code: Any) -> bool:
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= CODES_LIMIT:
                self._codes.clear()
            file = code.co_filename
            known = code, not self._caught.is_foreign(file) and not is_installed(file)
            self._codes[id(code)] = known
        return known[1]

    def _give_up(self, failure: Exception) -> None:
        self._trouble.note(PIECE, failure)
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)
