"""Reports the events of the program's own code to the recorder through sys.settrace, before Python 3.12."""

from __future__ import annotations

import opcode
import sys
import threading
from typing import Any

from . import values
from .patches import patch
from .recorder import PIECE, Activation, Call, OwnCode, Recorder

_RETURN = opcode.opmap["RETURN_VALUE"]
_YIELD = opcode.opmap["YIELD_VALUE"]
_CODES_LIMIT = 65536


class Tracer:
    """A trace function for every thread. It returns another one for each frame that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # id of a code object -> the code, which keeps the id valid, and what `Recorder.classify` returned.
        self._codes: dict[int, tuple[Any, OwnCode | str | None]] = {}
        self._is_starting = False

    def start(self) -> None:
        """Start tracing. Raise RuntimeError if another tool already uses sys.settrace."""
        if sys.gettrace() is not None or getattr(threading, "_trace_hook", None) is not None:
            raise RuntimeError("another tool, such as a debugger or coverage, uses sys.settrace")
        threading.settrace(self.on_call)
        sys.settrace(self.on_call)
        for module in (sys, threading):
            patch(module, "settrace", PIECE, self.recorder.trouble, before=self._on_other_tool)

    def _on_other_tool(self, _arguments: Any, _options: Any) -> None:
        caller = sys._getframe(2).f_code.co_filename
        if not caller.endswith("threading.py"):
            self.recorder.note(f"the program called sys.settrace in {caller}; what follows may be missing")

    def on_call(self, frame: Any, event: str, _argument: Any) -> Any:
        """Return the trace function for a new frame, or None if it is not recorded."""
        code = frame.f_code
        entry = self._codes.get(id(code))
        if entry is None:
            entry = self._add(code)
        kind = entry[1]
        if kind is None or event != "call":
            return None
        recorder = self.recorder
        if not recorder.is_on:
            return None
        try:
            before = frame.f_trace
            if before is not None:
                return self._resume(before)
            if type(kind) is str:
                frame.f_trace_lines = False
                call = recorder.begin_call(kind, frame)
                return None if call is None else TracedCall(recorder, call).trace
            if kind.shows_locals:  # type: ignore[union-attr]
                return None
            return TracedActivation(recorder, recorder.begin(kind, frame)).trace  # type: ignore[arg-type]
        except Exception as error:
            self.recorder.fail(error)
            return None

    def _resume(self, before: Any) -> Any:
        traced = getattr(before, "__self__", None)
        if type(traced) is TracedActivation and traced.activation.epoch == self.recorder.epoch:
            self.recorder.resume(traced.activation)
            return before
        return None

    def _add(self, code: Any) -> tuple[Any, OwnCode | str | None]:
        if len(self._codes) >= _CODES_LIMIT:
            self._codes.clear()
        kind = None
        try:
            kind = self.recorder.classify(code)
        except Exception as error:
            self.recorder.fail(error)
        entry = self._codes[id(code)] = (code, kind)
        return entry


class TracedActivation:
    """The trace function of a frame of the program."""

    __slots__ = ("activation", "is_raising", "recorder")

    def __init__(self, recorder: Recorder, activation: Activation) -> None:
        self.recorder = recorder
        self.activation = activation
        self.is_raising = False

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        recorder, activation = self.recorder, self.activation
        if not recorder.is_on or activation.epoch != recorder.epoch:
            frame.f_trace_lines = False
            return None
        try:
            if event == "line":
                self.is_raising = False
                recorder.execute(activation, frame, frame.f_lineno)
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
