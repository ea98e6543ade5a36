"""Reports the events of the program's own code to the recorder through sys.settrace, before Python 3.12."""

from __future__ import annotations

import opcode
import sys
import threading
from importlib.machinery import SourceFileLoader
from typing import Any

from . import values
from .places import is_installed
from .recorder import Activation, Call, OwnCode, Recorder

_RETURN = opcode.opmap["RETURN_VALUE"]
_YIELD = opcode.opmap["YIELD_VALUE"]
_CODES_LIMIT = 65536
_OWN_FILES = (__file__, threading.__file__)


class Tracer:
    """A trace function for every thread. It returns another one for each frame that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # id of a code object -> the code, which keeps the id valid, and what `Recorder.classify` returned.
        self._codes: dict[int, tuple[Any, OwnCode | str | None]] = {}

    def start(self) -> None:
        """Start tracing. Raise RuntimeError if another tool already uses sys.settrace."""
        if sys.gettrace() is not None or getattr(threading, "_trace_hook", None) is not None:
            raise RuntimeError("another tool, such as a debugger or coverage, uses sys.settrace")
        trace = self._trace_function()
        self.recorder.stop_events = lambda: sys.settrace(None)
        self._pause_in_imports(trace)
        threading.settrace(trace)
        sys.settrace(trace)
        sys.addaudithook(self._on_audit)

    def _on_audit(self, event: str, _arguments: Any) -> None:
        """Note that the program has called sys.settrace. Python calls this function for each of its audit events."""
        if event == "sys.settrace":
            caller = sys._getframe(1).f_code.co_filename
            if caller not in _OWN_FILES:
                self.recorder.note("the program itself called sys.settrace; what followed in this thread is missing")

    def _pause_in_imports(self, trace: Any) -> None:
        """Trace no call while a module of a library is executed: tracing an import takes longer than the import."""
        execute = SourceFileLoader.exec_module
        paused: set[int] = set()  # threads that are importing a library

        def exec_module(loader: SourceFileLoader, module: Any) -> None:
            thread, before, is_library = threading.get_ident(), sys.gettrace(), is_installed(loader.path)
            if before is not (trace if is_library else None) or (thread in paused) is is_library:
                return execute(loader, module)
            (paused.add if is_library else paused.discard)(thread)
            sys.settrace(None if is_library else trace)
            try:
                return execute(loader, module)
            finally:
                (paused.discard if is_library else paused.add)(thread)
                if sys.gettrace() is (None if is_library else trace) and self.recorder.is_on:
                    sys.settrace(before)

        SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign,assignment]

    def _trace_function(self) -> Any:
        """Return the trace function for new frames. It returns None for a frame that is not recorded."""
        find, begin = self._codes.get, self._begin

        def on_call(frame: Any, event: str, _argument: Any) -> Any:
            entry = find(id(frame.f_code))
            return None if entry is not None and entry[1] is None else begin(frame, entry, event)

        return on_call

    def _begin(self, frame: Any, entry: tuple[Any, OwnCode | str | None] | None, event: str) -> Any:
        recorder = self.recorder
        try:
            if not recorder.is_on:
                recorder.stop_events()
                return None
            kind = (entry or self._add(frame.f_code))[1]
            if kind is None or event != "call":
                return None
            before = frame.f_trace
            if before is not None:
                return self._resume(before)
            if type(kind) is str:
                call = recorder.begin_call(kind, frame)
                frame.f_trace_lines = False
                return None if call is None else TracedCall(recorder, call).trace
            if kind.shows_locals:  # type: ignore[union-attr]
                recorder.note_skipped(kind)  # type: ignore[arg-type]
                return None
            activation = recorder.begin(kind, frame)  # type: ignore[arg-type]
            return None if activation is None else TracedActivation(recorder, activation).trace
        except Exception as error:
            recorder.fail(error)
            return None

    def _add(self, code: Any) -> tuple[Any, OwnCode | str | None]:
        if len(self._codes) >= _CODES_LIMIT:
            self._codes.clear()
        entry = self._codes[id(code)] = (code, self.recorder.classify(code))
        return entry

    def _resume(self, before: Any) -> Any:
        traced = getattr(before, "__self__", None)
        if type(traced) is TracedActivation and traced.activation.epoch == self.recorder.epoch:
            self.recorder.resume(traced.activation)
            return before
        return None


class TracedActivation:
    """The trace function of a frame of the program."""

    __slots__ = ("activation", "is_raising", "recorder")

    def __init__(self, recorder: Recorder, activation: Activation) -> None:
        self.recorder = recorder
        self.activation = activation
        self.is_raising = False

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        recorder, activation = self.recorder, self.activation
        if activation.epoch != recorder.epoch:
            frame.f_trace_lines = False
            return None
        try:
            if not recorder.is_on:
                recorder.stop_events()
                return None
            if event == "line":
                line = frame.f_lineno
                statement = activation.code.statements.get(line)
                if statement is not None and statement.is_capped and activation.statement is statement:
                    return self.trace
                self.is_raising = False
                recorder.execute(activation, frame, line)
            elif event == "return":
                last = activation.code.opcodes[frame.f_lasti]
                if last == _YIELD and not self.is_raising:
                    recorder.suspend(activation)
                else:
                    recorder.end(activation, frame, has_returned=last == _RETURN, result=argument)
            elif event == "exception":
                self.is_raising = True
                recorder.raised(activation, argument[1])
        except Exception as error:
            recorder.fail(error)
            return None
        return self.trace


class TracedCall:
    """The trace function of a frame of a library in which it communicates."""

    __slots__ = ("call", "error", "recorder")

    def __init__(self, recorder: Recorder, call: Call) -> None:
        self.recorder = recorder
        self.call = call
        self.error = ""

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        try:
            if event == "exception":
                self.error = values.type_name(argument[0])
            elif event == "return":
                code = frame.f_code.co_code
                has_returned = code[frame.f_lasti] in (_RETURN, _YIELD)
                self.recorder.end_call(self.call, "" if has_returned else self.error)
                return None
        except Exception as error:
            self.recorder.fail(error)
            return None
        return self.trace
