"""Exceptions that the program survives: what it raised and caught, where, how often, and which batches it dropped.

CaughtExceptions takes them from forward hooks on any Python, and from sys.monitoring on Python 3.12 and later. Nothing
here keeps an exception, a frame or a tensor.
"""

from __future__ import annotations

import ctypes
import opcode
import sys
from collections.abc import Iterator
from typing import Any

from .. import protocol
from .chains import Chains
from .patches import TroubleLog
from .places import frame_place, innermost, is_installed, is_own, place_text
from .status_file import StatusFileWriter

HANDLERS_LIMIT = 4  # lines per kind that handle it
CAUGHT_LIMIT = 8  # kinds; a kind is an exception type and the line that raised it


class CaughtExceptions:
    """Writes to the status file which exceptions were raised, where, in which steps and how often."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._chains = Chains(status_file, foreign)
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._last: tuple[int, int] | None = None  # an exception passes one module's hook after the other
        # By the identity of a function's code, which is held: the last exception that the function handled.
        self._handled: dict[int, tuple[Any, _Kind, str]] = {}

    def note_forward_exit(self) -> None:
        """Count the exception that leaves a module's forward, if one does. Called by the forward hook.

        The frame before the hook's is torch's, which is handling the exception.
        """
        kind, error, _ = sys.exc_info()
        trace = error.__traceback__ if error is not None else None
        if kind is None or trace is None or trace.tb_frame is not sys._getframe(2) or is_control_flow(kind):
            return
        key = (id(error), self._status_file.step)
        if key == self._last and _left_another_module(trace):
            return
        inner = self._lines_inside(trace)
        caller = innermost(trace.tb_frame, self._foreign)
        if not inner and (caller is None or is_installed(caller.f_code.co_filename)):
            return  # it has passed no line of the program yet
        self._last = key
        # An exception that torch raised is attributed to the program's line that called torch.
        place = inner[-1] if inner else frame_place(caller)
        known = self._kind(type(error).__name__, place, trace.tb_frame, inner)
        if known is not None:
            known.left_forward = True
            known.count_again(self._status_file.step)

    def handled(self, error: BaseException, frame: Any, offset: int) -> None:
        """Note that `frame`, in the program's code, handles `error` from this instruction on.

        The handler may only be on the exception's way: a `finally`, or the end of a `with`.
        """
        trace = error.__traceback__
        while trace is not None and trace.tb_frame is not frame:
            trace = trace.tb_next
        if trace is None or is_control_flow(type(error)):
            return
        inner = self._lines_inside(trace)
        known = self._kind(type(error).__name__, inner[-1], frame.f_back, inner)
        if known is None:
            return
        line = known.handled_at(frame.f_code, offset)
        self._handled[id(frame.f_code)] = frame.f_code, known, line
        # An exception counts once, however many handlers it passes. One that left a forward was counted there.
        if known.is_first(line) and not (known.left_forward and self._last == (id(error), self._status_file.step)):
            known.count_again(self._status_file.step)

    def passed_on(self, code: Any) -> None:
        """Note that this function raised again the exception that it handled last."""
        if id(code) in self._handled:
            _, known, line = self._handled[id(code)]
            known.write_handler(line, handled=False)

    def is_own(self, file: str) -> bool:
        return is_own(file, self._foreign)

    def _lines_inside(self, trace: Any) -> list[str]:
        """Return the program's own lines from `trace` inwards, outermost first."""
        lines: list[str] = []
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_own(code.co_filename, self._foreign):
                lines.append(place_text(code.co_filename, trace.tb_lineno, code.co_name))
            trace = trace.tb_next
        return lines

    def _kind(self, kind: str, place: str, outside: Any, inner: list[str]) -> _Kind | None:
        """Return the record of this type and place, or None if there are too many."""
        known = self._kinds.get((kind, place))
        if known is None and len(self._kinds) < CAUGHT_LIMIT:
            node = self._chains.of(outside).node if outside is not None else 0
            for line in inner:
                node = self._status_file.node(self._status_file.string(line), node)
            known = _Kind(self._status_file, len(self._kinds) + 1, f"{kind} {place}", node)
            self._kinds[kind, place] = known
        return known


def _left_another_module(trace: Any) -> bool:
    """Whether the exception left a module inside this one before. A new exception may have an old one's address."""
    calls, inner = trace.tb_frame.f_code, trace.tb_next
    while inner is not None and inner.tb_frame.f_code is not calls:
        inner = inner.tb_next
    return inner is not None


class _Kind:
    """One kind of exception in the status file: the first occurrence, the count, the latest step, the handlers."""

    def __init__(self, status_file: StatusFileWriter, number: int, text: str, node: int) -> None:
        self._status_file = status_file
        self._number, self._node = number, node
        self._count = 0
        self.left_forward = False  # it left a module's forward, and was counted there
        self._lines: dict[tuple[int, int], tuple[Any, str]] = {}  # by code and instruction; the code is held
        self._handlers: dict[str, int] = {}  # line -> where its record is in the status file
        status_file.fact(f"{protocol.FACT_CAUGHT}{number}", f"{status_file.step} {text}")
        self._at = status_file.fact(f"{protocol.FACT_CAUGHT_AGAIN}{number}", self._numbers(status_file.step))

    def count_again(self, step: int) -> None:
        self._count += 1
        if self._at:
            self._status_file.rewrite(self._at, self._numbers(step))

    def handled_at(self, code: Any, offset: int) -> str:
        """Write that the handler at this instruction handles the exception, and return the handler's line."""
        _, line = self._lines.get((id(code), offset)) or self._learn(code, offset)
        self.write_handler(line, handled=True)
        return line

    def is_first(self, line: str) -> bool:
        return line == next(iter(self._handlers), None)

    def write_handler(self, line: str, *, handled: bool) -> None:
        at = self._handlers.get(line)
        if at:
            self._status_file.rewrite(at, f"{int(handled)}{int(self.left_forward)}")

    def _learn(self, code: Any, offset: int) -> tuple[Any, str]:
        """Add the handler at this instruction. The end of an `except` block is a handler of its own, in its line."""
        line = next((line for _, end, line in code.co_lines() if end > offset and line), code.co_firstlineno)
        place = place_text(code.co_filename, line, code.co_name)
        index = len(self._handlers)
        if place not in self._handlers and index < HANDLERS_LIMIT:
            label = f"{self._number}.{index}"
            self._handlers[place] = self._status_file.fact(f"{protocol.FACT_HANDLED}{label}", f"00 {label} {place}")
        if len(self._lines) < HANDLERS_LIMIT * HANDLERS_LIMIT:
            self._lines[id(code), offset] = code, place
        return code, place

    def _numbers(self, step: int) -> str:
        return f"{self._number} {self._count:010d} {step:010d} {self._node:010d}"


def is_control_flow(kind: type[BaseException]) -> bool:
    """Whether an exception of this type reports no error: the end of an iteration, a private signal inside torch.

    The private errors of torch's C code count as errors: they are those with public names.
    """
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return True
    parts = f"{kind.__module__}.{kind.__qualname__}".split(".")
    return parts[0] == "torch" and kind.__module__ != "torch._C" and any(part.startswith("_") for part in parts)


# Handled exceptions, as sys.monitoring reports them.

PIECE = "handled exceptions"
TOOLS = (4, 3)  # tool numbers of sys.monitoring that Python reserves for no purpose
CODES_LIMIT = 16384


def monitor(monitoring: Any, caught: CaughtExceptions, trouble: TroubleLog) -> None:
    """Pass every handled exception to `caught`. Raises RuntimeError if other tools have taken both tool numbers."""
    tool = next((tool for tool in TOOLS if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise RuntimeError(f"tools {TOOLS[1]} and {TOOLS[0]} of sys.monitoring are taken")
    monitoring.use_tool_id(tool, "nsa-harness")
    HandledExceptions(monitoring, tool, caught, trouble).start()


class HandledExceptions:
    """Callbacks of sys.monitoring for handled exceptions. Costs about 0.2 us per exception in a library's code.

    These events cannot be disabled per code object. Code that raises nothing costs nothing.
    """

    def __init__(self, monitoring: Any, tool: int, caught: CaughtExceptions, trouble: TroubleLog) -> None:
        self._monitoring = monitoring
        self._tool = tool
        self._caught = caught
        self._trouble = trouble
        # By identity, whether the code is the program's own. The code is held, so that its address is not used again.
        self._codes: dict[int, tuple[Any, bool]] = {}

    def start(self) -> None:
        events = self._monitoring.events
        self._monitoring.register_callback(self._tool, events.EXCEPTION_HANDLED, self._handled)
        self._monitoring.register_callback(self._tool, events.RERAISE, self._raised_again)
        self._monitoring.set_events(self._tool, events.EXCEPTION_HANDLED | events.RERAISE)

    def _handled(self, code: Any, offset: int, error: BaseException) -> None:
        """A handler begins: an `except`, or a `finally` or the end of a `with` that the exception passes."""
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
            known = self._codes[id(code)] = code, self._caught.is_own(code.co_filename)
        return known[1]

    def _give_up(self, failure: Exception) -> None:
        self._trouble.note(PIECE, failure)
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)


# Dropped batches.

MODELS_LIMIT = 64  # between two backward passes
KINDS_LIMIT = 8  # exception types, each with a line
NUMBERS_BYTES = 64  # the beginning of a batch, by which a repeated batch is recognised
DEPTH_LIMIT = 3  # containers inside containers
_RAISE = opcode.opmap["RAISE_VARARGS"]
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_UNKNOWN = b""
_NOT_THE_PROGRAMS = ("builtins", "torch")  # an exception type of its own is how a program gives up on purpose


class _DroppedBatches:
    """Exceptions of one type from one line: how many batches they ended, and the step of the first."""

    __slots__ = ("batches", "place", "step", "type")

    def __init__(self, type_name: str, place: str, step: int) -> None:
        self.type = type_name
        self.place = place
        self.step = step
        self.batches = 0


class DroppedBatches:
    """Counts batches that the program dropped: an exception ended their training pass, and another batch followed.

    No hook sees who catches the exception, and none need to: a program that trains on has caught it. These do not
    count: a pass that is repeated with the same batch, an exception that the program raises itself to skip a batch, and
    a program that runs out of memory and goes on.
    """

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._kinds: dict[tuple[str, str], _DroppedBatches] = {}
        self._open: _DroppedBatches | None = None  # a pass has failed, and the next batch is not known yet
        self._batch = _UNKNOWN
        self.models: set[int] = set()  # by identity, the models called since the last backward pass
        self._done = 0  # passes that ended with a backward pass

    def pass_began(self, module: Any, arguments: Any) -> None:
        """A whole model's forward begins. A repeated batch is recognised by its first numbers."""
        if len(self.models) < MODELS_LIMIT:
            self.models.add(id(module))
        batch = _first_numbers(arguments, DEPTH_LIMIT)
        if self._open is not None and _UNKNOWN not in (batch, self._batch):
            self._settle(dropped=batch != self._batch)
        self._batch = batch

    def pass_failed(self, error: BaseException | None) -> None:
        if error is None or not (place := self._accident(error)):
            return
        key = type(error).__name__, place
        if key not in self._kinds and len(self._kinds) == KINDS_LIMIT:
            return
        self._open = self._kinds.setdefault(key, _DroppedBatches(*key, self._status_file.step))

    def backward_done(self) -> None:
        """A backward pass is done. If no forward preceded it, the program recovered from the exception."""
        self._done += 1
        self._open = None
        self.models.clear()

    def next_batch_began(self) -> None:
        """The data loader returned a batch, or the optimizer stepped."""
        if self._open is not None:
            self._settle(dropped=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record per kind at exit. A program in which no pass ever succeeded may only be probing what works."""
        self.next_batch_began()
        if self._done:
            for kind in self._kinds.values():
                if kind.batches:
                    yield {
                        "at": "given up",
                        "type": kind.type,
                        "place": kind.place,
                        "batches": kind.batches,
                        "step": kind.step,
                    }

    def _settle(self, *, dropped: bool) -> None:
        if self._open is not None:
            self._open.batches += dropped
        self._open = None

    def _accident(self, error: BaseException) -> str:
        """Return the program's innermost line, or "" if the exception is no accident.

        It is none if the program raised it itself, has no line in it, or was out of memory.
        """
        kind, trace = type(error), error.__traceback__
        if is_control_flow(kind) or kind.__module__.partition(".")[0] not in _NOT_THE_PROGRAMS or trace is None:
            return ""
        if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            return ""
        caller: Any = trace.tb_frame
        while caller is not None and not is_own(caller.f_code.co_filename, self._foreign):
            caller = caller.f_back
        place, raised = frame_place(caller), False
        while trace is not None:
            code = trace.tb_frame.f_code
            raised = is_own(code.co_filename, self._foreign)
            if raised:
                place = place_text(code.co_filename, trace.tb_lineno, code.co_name)
                raised = code.co_code[trace.tb_lasti] == _RAISE
            trace = trace.tb_next
        return "" if raised and not isinstance(error, AssertionError) else place


def _first_numbers(arguments: Any, depth: int) -> bytes:
    """Return the first bytes of the first tensor in `arguments`, or its address on a device; empty without a tensor."""
    if hasattr(arguments, "data_ptr"):
        return _numbers(arguments)
    items = arguments.values() if isinstance(arguments, dict) else arguments
    if depth and isinstance(arguments, (tuple, list, dict)):
        for item in items:
            if numbers := _first_numbers(item, depth - 1):
                return numbers
    return _UNKNOWN


def _numbers(tensor: Any) -> bytes:
    if "strided" not in str(tensor.layout) or not (at := int(tensor.data_ptr())):
        return _UNKNOWN
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return at.to_bytes(8, "little")
    first: bytes = ctypes.string_at(at, min(NUMBERS_BYTES, tensor.numel() * tensor.element_size()))
    return first
