"""Batches that the program gave up: an exception ended their training pass, it was caught, and another batch came.

Who catches is not seen, and need not be: a program that trains on has caught it. A pass that is tried again, with the
same numbers, loses nothing; nor is a program that raises by itself to leave a batch out, or that runs out of memory and
goes on, in want of being told so.
"""

from __future__ import annotations

import ctypes
import opcode
from collections.abc import Iterator
from typing import Any

from .hooks import is_control_flow
from .places import innermost, is_installed, place_text
from .status_file import StatusFileWriter

MODELS_LIMIT = 64  # between two backward passes
KINDS_LIMIT = 8  # each a type and a line
NUMBERS_BYTES = 64  # the first ones of a batch: a part of it begins so too
DEPTH_LIMIT = 3  # containers inside containers
_RAISE = opcode.opmap["RAISE_VARARGS"]
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_UNKNOWN = b""
_OF_NO_PROGRAM = ("builtins", "torch")  # a type of its own is a way to say something


class _Kind:
    """One type of exception from one line: how many batches it ended, and in which step the first one."""

    __slots__ = ("batches", "place", "step", "type")

    def __init__(self, type_name: str, place: str, step: int) -> None:
        self.type = type_name
        self.place = place
        self.step = step
        self.batches = 0


class GivenUp:
    """What became of the newest training pass. Keeps no tensor, no exception and no frame."""

    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._open: _Kind | None = None  # its pass has failed, and what comes next is not known
        self._batch = _UNKNOWN
        self.models: set[int] = set()  # by identity, that were called since the newest backward pass
        self._done = 0  # passes that went all the way back

    def began(self, module: Any, arguments: Any) -> None:
        """A training pass through a whole model. A batch is known again by its first numbers."""
        if len(self.models) < MODELS_LIMIT:
            self.models.add(id(module))
        batch = _first_numbers(arguments, DEPTH_LIMIT)
        if self._open is not None and _UNKNOWN not in (batch, self._batch):
            self._settle(lost=batch != self._batch)
        self._batch = batch

    def failed(self, error: BaseException | None) -> None:
        if error is None or not (place := self._accident(error)):
            return
        key = type(error).__name__, place
        if key not in self._kinds and len(self._kinds) == KINDS_LIMIT:
            return
        self._open = self._kinds.setdefault(key, _Kind(*key, self._board.step))

    def went_back(self) -> None:
        """A backward pass is done: without another forward before it the program found a way out."""
        self._done += 1
        self._open = None
        self.models.clear()

    def took_another(self) -> None:
        """The data loader gave a batch, or the optimizer stepped."""
        if self._open is not None:
            self._settle(lost=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """At the end. A program of which nothing ever worked may have been asking whether it does."""
        self.took_another()
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

    def _settle(self, *, lost: bool) -> None:
        if self._open is not None:
            self._open.batches += lost
        self._open = None

    def _accident(self, error: BaseException) -> str:
        """The program's own innermost line; "" where it raised by itself, has no part in it, or was out of memory."""
        kind, trace = type(error), error.__traceback__
        if is_control_flow(kind) or kind.__module__.partition(".")[0] not in _OF_NO_PROGRAM or trace is None:
            return ""
        if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
            return ""
        caller = innermost(trace.tb_frame, self._foreign)
        while caller is not None and not self._is_own(caller.f_code):
            caller = caller.f_back
        place = "" if caller is None else place_text(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)
        raised = False
        while trace is not None:
            code = trace.tb_frame.f_code
            raised = self._is_own(code)
            if raised:
                place = place_text(code.co_filename, trace.tb_lineno, code.co_name)
                raised = code.co_code[trace.tb_lasti] == _RAISE
            trace = trace.tb_next
        return "" if raised and not isinstance(error, AssertionError) else place

    def _is_own(self, code: Any) -> bool:
        return not code.co_filename.startswith(self._foreign) and not is_installed(code.co_filename)


def _first_numbers(arguments: Any, depth: int) -> bytes:
    """Of the first tensor in them; where that is on a device, the address of its memory. Empty: there is none."""
    if hasattr(arguments, "data_ptr"):
        return _numbers(arguments)
    items = arguments.values() if isinstance(arguments, dict) else arguments
    if depth and isinstance(arguments, (tuple, list, dict)):
        for item in items:
            if found := _first_numbers(item, depth - 1):
                return found
    return _UNKNOWN


def _numbers(tensor: Any) -> bytes:
    if "strided" not in str(tensor.layout) or not (at := int(tensor.data_ptr())):
        return _UNKNOWN
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return at.to_bytes(8, "little")
    first: bytes = ctypes.string_at(at, min(NUMBERS_BYTES, tensor.numel() * tensor.element_size()))
    return first
