"""Records exceptions that the program catches, and batches that it drops because of them.

CaughtExceptions learns of them through forward hooks, and on Python 3.12 or later also through sys.monitoring. This
module stores no reference to an exception, a frame or a tensor.
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

HANDLERS_LIMIT = 4  # handler lines that are recorded per kind of exception
CAUGHT_LIMIT = 8  # kinds that are recorded; a kind is an exception type and the line that raised it


class CaughtExceptions:
    """A record, kept in the status file, of the exceptions that the program caught and how often it did so."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._chains = Chains(status_file, foreign)
        self._kinds: dict[tuple[str, str], _Kind] = {}
        # (id of the exception, step) of the last exception. One exception passes the hooks of several nested modules.
        self._last: tuple[int, int] | None = None
        # id of a function's code -> the code, the kind of the last exception that it handled, and the handler's line.
        self._last_handled: dict[int, tuple[Any, _Kind, str]] = {}

    def note_forward_exit(self) -> None:
        """Record the exception, if any, that is propagating out of a module's forward method."""
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
            return  # the exception has not reached a line of the program yet
        self._last = key
        # An exception that torch raised is attributed to the program's line that called torch.
        place = inner[-1] if inner else frame_place(caller)
        record = self._kind(type(error).__name__, place, trace.tb_frame, inner)
        if record is not None:
            record.left_forward = True
            record.count_again(self._status_file.step)

    def note_handler(self, error: BaseException, frame: Any, offset: int) -> None:
        """Record that the program handles `error` in `frame`.

        `offset` is the handler's instruction. The handler may be a `finally` block or the end of a `with` block, which
        the exception only passes through.
        """
        trace = error.__traceback__
        while trace is not None and trace.tb_frame is not frame:
            trace = trace.tb_next
        if trace is None or is_control_flow(type(error)):
            return
        inner = self._lines_inside(trace)
        record = self._kind(type(error).__name__, inner[-1], frame.f_back, inner)
        if record is None:
            return
        line = record.note_handler(frame.f_code, offset)
        self._last_handled[id(frame.f_code)] = frame.f_code, record, line
        # An exception counts once, even if it passes several handlers. If it left a forward, it was counted there.
        if record.is_first(line) and not (record.left_forward and self._last == (id(error), self._status_file.step)):
            record.count_again(self._status_file.step)

    def note_reraise(self, code: Any) -> None:
        """Record that a function reraised the exception it handled last."""
        if id(code) in self._last_handled:
            _, record, line = self._last_handled[id(code)]
            record.write_handler(line, handled=False)

    def is_own(self, file: str) -> bool:
        return is_own(file, self._foreign)

    def _lines_inside(self, trace: Any) -> list[str]:
        """Return the lines of the program's own code in a traceback, outermost first."""
        lines: list[str] = []
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_own(code.co_filename, self._foreign):
                lines.append(place_text(code.co_filename, trace.tb_lineno, code.co_name))
            trace = trace.tb_next
        return lines

    def _kind(self, kind: str, place: str, outside: Any, inner: list[str]) -> _Kind | None:
        """Return the record for exceptions of type `kind` raised at line `place`, or None if there are too many
        records.

        `inner` are the program's lines in the traceback, and `outside` is the frame that called the outermost of them.
        """
        record = self._kinds.get((kind, place))
        if record is None and len(self._kinds) < CAUGHT_LIMIT:
            node = self._chains.find(outside).node if outside is not None else 0
            for line in inner:
                node = self._status_file.node_number(self._status_file.string_number(line), node)
            record = _Kind(self._status_file, len(self._kinds) + 1, f"{kind} {place}", node)
            self._kinds[kind, place] = record
        return record


def _left_another_module(trace: Any) -> bool:
    """Return whether the exception has left an inner module's forward. Its id could be that of an older one."""
    calls, inner = trace.tb_frame.f_code, trace.tb_next
    while inner is not None and inner.tb_frame.f_code is not calls:
        inner = inner.tb_next
    return inner is not None


class _Kind:
    """All exceptions of one type that were raised at the same line."""

    def __init__(self, status_file: StatusFileWriter, number: int, text: str, node: int) -> None:
        self._status_file = status_file
        self._number, self._node = number, node
        self._count = 0
        self.left_forward = False  # it left a module's forward, and was counted there
        self._lines: dict[tuple[int, int], tuple[Any, str]] = {}  # (id of the code, instruction) -> the code, its line
        self._handlers: dict[str, int] = {}  # handler line -> offset of its record in the status file
        status_file.write_fact(f"{protocol.FACT_CAUGHT}{number}", f"{status_file.step} {text}")
        self._at = status_file.write_fact(f"{protocol.FACT_CAUGHT_AGAIN}{number}", self._numbers(status_file.step))

    def count_again(self, step: int) -> None:
        self._count += 1
        if self._at:
            self._status_file.overwrite_fact(self._at, self._numbers(step))

    def note_handler(self, code: Any, offset: int) -> str:
        """Record that the program handled this exception at `offset` in `code`, and return the handler's line."""
        _, line = self._lines.get((id(code), offset)) or self._add_handler(code, offset)
        self.write_handler(line, handled=True)
        return line

    def is_first(self, line: str) -> bool:
        return line == next(iter(self._handlers), None)

    def write_handler(self, line: str, *, handled: bool) -> None:
        at = self._handlers.get(line)
        if at:
            self._status_file.overwrite_fact(at, f"{int(handled)}{int(self.left_forward)}")

    def _add_handler(self, code: Any, offset: int) -> tuple[Any, str]:
        """Add the handler at `offset` in `code`, and return `code` and the handler's line."""
        line = next((line for _, end, line in code.co_lines() if end > offset and line), code.co_firstlineno)
        place = place_text(code.co_filename, line, code.co_name)
        index = len(self._handlers)
        if place not in self._handlers and index < HANDLERS_LIMIT:
            label = f"{self._number}.{index}"
            self._handlers[place] = self._status_file.write_fact(
                f"{protocol.FACT_HANDLED}{label}", f"00 {label} {place}"
            )
        if len(self._lines) < HANDLERS_LIMIT * HANDLERS_LIMIT:
            self._lines[id(code), offset] = code, place
        return code, place

    def _numbers(self, step: int) -> str:
        return f"{self._number} {self._count:010d} {step:010d} {self._node:010d}"


def is_control_flow(kind: type[BaseException]) -> bool:
    """Return whether exceptions of this type are control flow, such as StopIteration."""
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return True
    parts = f"{kind.__module__}.{kind.__qualname__}".split(".")
    return parts[0] == "torch" and kind.__module__ != "torch._C" and any(part.startswith("_") for part in parts)


# Handled exceptions, reported by sys.monitoring.

PIECE = "handled exceptions"
TOOLS = (4, 3)  # tool numbers of sys.monitoring that Python does not reserve for a purpose
CODES_LIMIT = 16384


def monitor(monitoring: Any, exceptions: CaughtExceptions, trouble: TroubleLog) -> None:
    """Report every handled exception through sys.monitoring. Raise RuntimeError if both tool numbers are in use."""
    tool = next((tool for tool in TOOLS if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise RuntimeError(f"tools {TOOLS[1]} and {TOOLS[0]} of sys.monitoring are taken")
    monitoring.use_tool_id(tool, "nsa-harness")
    HandledExceptions(monitoring, tool, exceptions, trouble).start()


class HandledExceptions:
    """A monitor that reports each exception that the program handles or reraises.

    Uses callbacks of sys.monitoring. An exception in a library costs about 0.2 us, because Python cannot disable these
    callbacks per code object. Code that raises nothing costs nothing.
    """

    def __init__(self, monitoring: Any, tool: int, exceptions: CaughtExceptions, trouble: TroubleLog) -> None:
        self._monitoring = monitoring
        self._tool = tool
        self._exceptions = exceptions
        self._trouble = trouble
        # id of a code object -> the code, and whether it is the program's own. The reference keeps the id valid.
        self._codes: dict[int, tuple[Any, bool]] = {}

    def start(self) -> None:
        events = self._monitoring.events
        self._monitoring.register_callback(self._tool, events.EXCEPTION_HANDLED, self._on_handled)
        self._monitoring.register_callback(self._tool, events.RERAISE, self._on_reraise)
        self._monitoring.set_events(self._tool, events.EXCEPTION_HANDLED | events.RERAISE)

    def _on_handled(self, code: Any, offset: int, error: BaseException) -> None:
        """Report that an exception handler in the program's own code has started to run."""
        try:
            if self._is_own(code):
                self._exceptions.note_handler(error, sys._getframe(1), offset)
        except Exception as failure:
            self._give_up(failure)

    def _on_reraise(self, code: Any, _offset: int, _error: BaseException) -> None:
        try:
            if self._is_own(code):
                self._exceptions.note_reraise(code)
        except Exception as failure:
            self._give_up(failure)

    def _is_own(self, code: Any) -> bool:
        entry = self._codes.get(id(code))
        if entry is None:
            if len(self._codes) >= CODES_LIMIT:
                self._codes.clear()
            entry = self._codes[id(code)] = code, self._exceptions.is_own(code.co_filename)
        return entry[1]

    def _give_up(self, failure: Exception) -> None:
        self._trouble.note(PIECE, failure)
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)


# Dropped batches.

MODELS_LIMIT = 64  # models that are remembered between two backward passes
KINDS_LIMIT = 8  # recorded pairs of an exception type and a line
NUMBERS_BYTES = 64  # bytes at the start of a batch that identify it, to recognise a repeated batch
DEPTH_LIMIT = 3  # containers inside containers
_RAISE = opcode.opmap["RAISE_VARARGS"]
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_UNKNOWN = b""
# A program that defines its own exception type raises it on purpose. Only these packages' exceptions are accidents.
_ACCIDENT_PACKAGES = ("builtins", "torch")


class _DroppedBatches:
    """The batches that the program dropped because of one kind of exception."""

    __slots__ = ("batches", "place", "step", "type")

    def __init__(self, type_name: str, place: str, step: int) -> None:
        self.type = type_name
        self.place = place
        self.step = step
        self.batches = 0


class DroppedBatchCounter:
    """A counter of the batches that the program skipped after an exception.

    A batch is skipped if an exception ends its training pass and another batch follows. Three cases do not count: the
    pass is repeated with the same batch, the program itself raised the exception to skip a batch, or the exception was
    an out-of-memory error.
    """

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._kinds: dict[tuple[str, str], _DroppedBatches] = {}
        self._failed_pass: _DroppedBatches | None = (
            None  # a pass has failed, and it is not known whether its batch is dropped
        )
        self._batch = _UNKNOWN
        self.models: set[int] = set()  # ids of the models that were called since the last backward pass
        self._successful_passes = 0  # passes that ended with a backward pass

    def note_forward(self, module: Any, arguments: Any) -> None:
        """Record that a whole model's forward pass begins.

        If a training pass has failed before, compare the first bytes of both batches: if they differ, the earlier batch
        was dropped, otherwise it is repeated.
        """
        if len(self.models) < MODELS_LIMIT:
            self.models.add(id(module))
        batch = _first_numbers(arguments, DEPTH_LIMIT)
        if self._failed_pass is not None and _UNKNOWN not in (batch, self._batch):
            self._settle(dropped=batch != self._batch)
        self._batch = batch

    def note_failure(self, error: BaseException | None) -> None:
        if error is None or not (place := self._accident(error)):
            return
        key = type(error).__name__, place
        if key not in self._kinds and len(self._kinds) == KINDS_LIMIT:
            return
        self._failed_pass = self._kinds.setdefault(key, _DroppedBatches(*key, self._status_file.step))

    def note_success(self) -> None:
        """Record that a backward pass succeeded."""
        self._successful_passes += 1
        self._failed_pass = None
        self.models.clear()

    def note_next_batch(self) -> None:
        """Count the current batch as dropped if training on it has failed."""
        if self._failed_pass is not None:
            self._settle(dropped=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one record for each kind of exception that dropped batches, unless no pass ever succeeded."""
        self.note_next_batch()
        if self._successful_passes:
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
        if self._failed_pass is not None:
            self._failed_pass.batches += dropped
        self._failed_pass = None

    def _accident(self, error: BaseException) -> str:
        """Return the line of the program where `error` occurred, or "" if the program raised it deliberately.

        An out-of-memory error counts as deliberate, and so does every exception that the program raised itself, except
        by a failed `assert`.
        """
        kind, trace = type(error), error.__traceback__
        if is_control_flow(kind) or kind.__module__.partition(".")[0] not in _ACCIDENT_PACKAGES or trace is None:
            return ""
        if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            return ""
        caller: Any = trace.tb_frame
        while caller is not None and not is_own(caller.f_code.co_filename, self._foreign):
            caller = caller.f_back
        place, is_raised_here = frame_place(caller), False
        while trace is not None:
            code = trace.tb_frame.f_code
            is_raised_here = is_own(code.co_filename, self._foreign)
            if is_raised_here:
                place = place_text(code.co_filename, trace.tb_lineno, code.co_name)
                is_raised_here = code.co_code[trace.tb_lasti] == _RAISE
            trace = trace.tb_next
        return "" if is_raised_here and not isinstance(error, AssertionError) else place


def _first_numbers(arguments: Any, depth: int) -> bytes:
    """Return the first bytes of the first tensor in `arguments`, or its address on a device, at most `depth` deep."""
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
