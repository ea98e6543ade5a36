"""Reports the events of the program's own code to the recorder through sys.monitoring, from Python 3.12 on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import values
from .recorder import Activation, Call, OwnCode, Recorder

TOOLS = (5, 3, 4, 2)  # tool numbers of sys.monitoring to try; 0 and 1 belong to debuggers and coverage tools
NAME = "nsa-harness recorder"
_CODES_LIMIT = 65536
_UNKNOWN = (None, None)  # of a code object that was never classified


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
        self.recorder.stop_events = self._stop
        actions: dict[int, Callable[..., Any]] = {
            events.PY_START: self._on_start,
            events.PY_RESUME: self._on_resume,
            events.PY_THROW: self._on_resume,
            events.LINE: self._on_line,
            events.PY_RETURN: self._on_return,
            events.PY_YIELD: self._on_yield,
            events.PY_UNWIND: self._on_unwind,
            events.RAISE: self._on_raise,
        }
        self._events = tuple(actions)
        for event, action in actions.items():
            monitoring.register_callback(tool, event, self._guarded(action))
        # The last three cannot be limited to some code.
        monitoring.set_events(tool, events.PY_START | events.PY_THROW | events.PY_UNWIND | events.RAISE)

    def _guarded(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callback that calls `action` with the code, the frame and the event's last argument."""
        recorder, frame_of = self.recorder, sys._getframe

        def on_event(code: Any, *arguments: Any) -> Any:
            result = None
            try:
                result = action(code, frame_of(1), arguments[-1])
            except Exception as error:
                recorder.fail(error)
            if recorder.experiment is not None and (shared := recorder.experiment.take_error()) is not None:
                raise shared
            return result

        return on_event

    def _on_start(self, code: Any, frame: Any, _offset: int) -> Any:
        kind = self._kind(code)
        if kind is None or not self.recorder.is_on:
            return self._monitoring.DISABLE
        if type(kind) is str:
            self.recorder.begin_call(kind, frame)
        else:
            self.recorder.begin(kind, frame)  # type: ignore[arg-type]
        return None

    def _on_line(self, code: Any, frame: Any, line: int) -> Any:
        activation = self._current(code, frame)
        if activation is not None:
            self.recorder.execute(activation, frame, line)
            statement = activation.statement
            if statement is not None and statement.is_capped and statement.line == line:
                return self._monitoring.DISABLE
        return None

    def _on_return(self, code: Any, frame: Any, result: Any) -> None:
        if (call := self._current_call(code, frame)) is not None:
            self.recorder.end_call(call)
        elif (activation := self._current(code, frame)) is not None:
            self.recorder.end(activation, frame, has_returned=True, result=result)

    def _on_unwind(self, code: Any, frame: Any, error: BaseException) -> None:
        if self._codes.get(id(code), _UNKNOWN)[1] is None:
            return
        if (call := self._current_call(code, frame)) is not None:
            self.recorder.end_call(call, values.type_name(type(error)))
        elif (activation := self._current(code, frame)) is not None:
            self.recorder.end(activation, frame, has_returned=False)

    def _on_yield(self, code: Any, frame: Any, _result: Any) -> None:
        if (call := self._current_call(code, frame)) is not None:
            self.recorder.end_call(call)
        elif (activation := self._current(code, frame)) is not None:
            if len(self._suspended) >= _CODES_LIMIT:
                self._suspended.clear()
            self._suspended[id(frame)] = activation
            self.recorder.suspend(activation)

    def _on_resume(self, code: Any, frame: Any, _detail: object) -> None:
        activation = self._suspended.pop(id(frame), None)
        if activation is not None and activation.code.code is code and activation.epoch == self.recorder.epoch:
            self.recorder.resume(activation)

    def _on_raise(self, code: Any, frame: Any, error: BaseException) -> None:
        if type(self._codes.get(id(code), _UNKNOWN)[1]) is OwnCode:
            activation = self._current(code, frame)
            if activation is not None:
                self.recorder.raised(activation, error)

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
