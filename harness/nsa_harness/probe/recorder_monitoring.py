"""Reports the events of the program's own code to the recorder through sys.monitoring, from Python 3.12 on."""

from __future__ import annotations

import sys
from typing import Any

from . import values
from .recorder import Activation, Call, OwnCode, Recorder

TOOLS = (5, 3, 4, 2)  # tool numbers of sys.monitoring to try; 0 and 1 belong to debuggers and coverage tools
NAME = "nsa-harness recorder"
_CODES_LIMIT = 65536


class Monitor:
    """The callbacks of sys.monitoring. Code of libraries costs nothing after its first call."""

    def __init__(self, recorder: Recorder, monitoring: Any) -> None:
        self.recorder = recorder
        self._monitoring = monitoring
        self._tool = -1
        # id of a code object -> the code, which keeps the id valid, and what `Recorder.classify` returned.
        self._codes: dict[int, tuple[Any, OwnCode | str | None]] = {}
        # id of a frame -> the suspended activation of a generator or coroutine.
        self._suspended: dict[int, Activation] = {}

    def start(self) -> None:
        """Start monitoring. Raise RuntimeError if other tools use all tool numbers."""
        monitoring, events = self._monitoring, self._monitoring.events
        tool = next((tool for tool in TOOLS if monitoring.get_tool(tool) is None), None)
        if tool is None:
            raise RuntimeError("other tools, such as a debugger or coverage, use sys.monitoring")
        if sys.gettrace() is not None:
            raise RuntimeError("another tool, such as a debugger or coverage, uses sys.settrace")
        self._tool = tool
        monitoring.use_tool_id(tool, NAME)
        self._own_events = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
        self._call_events = events.PY_RETURN | events.PY_YIELD
        callbacks = (
            (events.PY_START, self._on_start),
            (events.PY_RESUME, self._on_resume),
            (events.PY_THROW, self._on_throw),
            (events.LINE, self._on_line),
            (events.PY_RETURN, self._on_return),
            (events.PY_YIELD, self._on_yield),
            (events.PY_UNWIND, self._on_unwind),
            (events.RAISE, self._on_raise),
        )
        self._events = [event for event, _ in callbacks]
        self.recorder.stop_events = self._stop
        for event, callback in callbacks:
            monitoring.register_callback(tool, event, callback)
        # The last three cannot be limited to some code.
        monitoring.set_events(tool, events.PY_START | events.PY_THROW | events.PY_UNWIND | events.RAISE)

    def _on_start(self, code: Any, _offset: int) -> Any:
        try:
            kind = self._kind(code)
            if kind is None or not self.recorder.is_on:
                return self._monitoring.DISABLE
            frame = sys._getframe(1)
            if type(kind) is str:
                self.recorder.begin_call(kind, frame)
            else:
                self.recorder.begin(kind, frame)  # type: ignore[arg-type]
        except Exception as error:
            self.recorder.fail(error)
        return None

    def _on_line(self, code: Any, line: int) -> Any:
        try:
            frame = sys._getframe(1)
            activation = self._current(code, frame)
            if activation is not None:
                self.recorder.execute(activation, frame, line)
                statement = activation.statement
                if statement is not None and statement.is_capped and statement.line == line:
                    return self._monitoring.DISABLE
        except Exception as error:
            self.recorder.fail(error)
        return None

    def _on_return(self, code: Any, _offset: int, result: Any) -> None:
        self._end(code, result=result)

    def _on_unwind(self, code: Any, _offset: int, error: BaseException) -> None:
        if id(code) in self._codes and self._codes[id(code)][1] is not None:
            self._end(code, error=error)

    def _end(self, code: Any, *, result: Any = None, error: BaseException | None = None) -> None:
        try:
            frame = sys._getframe(2)
            call = self._current_call(code, frame)
            if call is not None:
                self.recorder.end_call(call, "" if error is None else values.type_name(type(error)))
                return
            activation = self._current(code, frame)
            if activation is not None:
                self.recorder.end(activation, frame, has_returned=error is None, result=result)
        except Exception as failure:
            self.recorder.fail(failure)

    def _on_yield(self, code: Any, _offset: int, _result: Any) -> None:
        try:
            frame = sys._getframe(1)
            call = self._current_call(code, frame)
            if call is not None:
                self.recorder.end_call(call)
                return
            activation = self._current(code, frame)
            if activation is not None:
                if len(self._suspended) >= _CODES_LIMIT:
                    self._suspended.clear()
                self._suspended[id(frame)] = activation
                self.recorder.suspend(activation)
        except Exception as error:
            self.recorder.fail(error)

    def _on_resume(self, code: Any, _offset: int) -> None:
        try:
            self._resume(code, sys._getframe(1))
        except Exception as error:
            self.recorder.fail(error)

    def _on_throw(self, code: Any, _offset: int, _error: BaseException) -> None:
        try:
            if id(code) in self._codes:
                self._resume(code, sys._getframe(1))
        except Exception as error:
            self.recorder.fail(error)

    def _resume(self, code: Any, frame: Any) -> None:
        activation = self._suspended.pop(id(frame), None)
        if activation is not None and activation.code.code is code and activation.epoch == self.recorder.epoch:
            self.recorder.resume(activation)

    def _on_raise(self, code: Any, _offset: int, error: BaseException) -> None:
        try:
            entry = self._codes.get(id(code))
            if entry is not None and type(entry[1]) is OwnCode:
                activation = self._current(code, sys._getframe(1))
                if activation is not None:
                    self.recorder.raised(activation, error)
        except Exception as failure:
            self.recorder.fail(failure)

    def _current(self, code: Any, frame: Any) -> Activation | None:
        """Return the activation of a frame. Activations above it have ended without an event and are dropped."""
        recorder = self.recorder
        thread = recorder.threads
        if not recorder.is_on or thread.epoch != recorder.epoch:
            return None
        stack, number = thread.stack, id(frame)
        while stack:
            activation = stack[-1]
            if activation.frame_id == number and activation.code.code is code:
                return activation
            if not any(other.frame_id == number and other.code.code is code for other in stack):
                return None
            stack.pop()
        return None

    def _current_call(self, code: Any, frame: Any) -> Call | None:
        calls = self.recorder.threads.calls
        is_current = calls and calls[-1].code is code and calls[-1].frame_id == id(frame)
        return calls[-1] if is_current else None

    def _kind(self, code: Any) -> OwnCode | str | None:
        entry = self._codes.get(id(code))
        if entry is None:
            if len(self._codes) >= _CODES_LIMIT:
                self._codes.clear()
            kind = self.recorder.classify(code)
            if kind is not None:
                events = self._call_events if type(kind) is str else self._own_events
                self._monitoring.set_local_events(self._tool, code, events)
            entry = self._codes[id(code)] = (code, kind)
        return entry[1]

    def _stop(self) -> None:
        monitoring = self._monitoring
        if monitoring.get_tool(self._tool) == NAME:
            monitoring.set_events(self._tool, 0)
            for event in self._events:
                monitoring.register_callback(self._tool, event, None)
            monitoring.free_tool_id(self._tool)
