"""The last words of a process: its last exception, stacks on a fatal signal, the recorder and a mark at exit."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time

from .. import protocol
from .status_file import StatusFileWriter
from .trouble import TroubleLog

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import IO, Any

    from .names import ModuleNames

FRAMES_LIMIT = 200
MESSAGE_LIMIT = 4000
CHAIN_LIMIT = 4


class Endings:
    """Guests at the exits: whatever the program installed there itself is called as if we were not."""

    def __init__(self, board: StatusFileWriter, directory: str, trouble: TroubleLog) -> None:
        self._board = board
        self._directory = directory
        self._trouble = trouble
        self._pid = os.getpid()
        self._raised: BaseException | None = None
        self._left_for: tuple[BaseException, int] | None = None  # what was handled as the program left, and when
        self._stacks: IO[bytes] | None = None  # held open: the signal handler knows only its descriptor
        self.names: ModuleNames | None = None  # of the modules that were called, once somebody knows them

    def install(self) -> None:
        self._trouble.attempt("excepthook", self._chain_excepthook)
        self._trouble.attempt("faulthandler", self._enable_faulthandler)
        atexit.register(self._at_exit)

    def _chain_excepthook(self) -> None:
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._trouble.attempt("raised", lambda: self._write_raised(error, traceback))
            if self.names is not None:  # torch is there, and hooks around it are
                self._trouble.attempt("tracebacks", lambda: leave_out(error))
                traceback = error.__traceback__
            previous(kind, error, traceback)

        sys.excepthook = excepthook

    def _enable_faulthandler(self) -> None:
        """Fatal signals unless the program was started with its own faulthandler, ours if nobody has that signal."""
        import _signal  # type: ignore[import-not-found]

        path = os.path.join(self._directory, protocol.STACKS.format(pid=self._pid))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._stacks = os.fdopen(descriptor, "ab", buffering=0)
        fatal, asked = not faulthandler.is_enabled(), _signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET
        if fatal:
            faulthandler.enable(file=self._stacks.fileno(), all_threads=True)
        if _signal.getsignal(asked) == _signal.SIG_DFL:
            faulthandler.register(asked, file=self._stacks.fileno(), all_threads=True, chain=False)
            os.register_at_fork(after_in_child=lambda: faulthandler.unregister(asked))
        if fatal:
            os.register_at_fork(after_in_child=self._leave_the_child_alone)

    def _leave_the_child_alone(self) -> None:
        """A forked child dies as it would without us, unless the program turned faulthandler on in the meantime."""
        faulthandler.disable()

    def leaves(self, error: BaseException | None) -> None:
        """The program asks to end, with a failure. Whether it does is seen at the end: SystemExit can be caught."""
        if error is not None:
            self._left_for = error, time.monotonic_ns()

    def has_left(self) -> None:
        if self._raised is None and self._left_for is not None:
            error, at_ns = self._left_for
            self._write_raised(error, error.__traceback__, at_ns)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._trouble.attempt("raised", self.has_left)
        self._trouble.attempt("raised", self._write_raised_behind_our_back)
        self._trouble.attempt("exit", self._mark_exit)
        if "torch.distributed" in sys.modules:
            self._trouble.attempt("flight at exit", self._write_flight)

    def _mark_exit(self) -> None:
        self._board.note(self._board.what("exit", "atexit"))
        self._board.end(protocol.END_ATEXIT)

    def _write_flight(self) -> None:
        from .flight import FlightRecorder

        FlightRecorder(self._directory).write()

    def _write_raised_behind_our_back(self) -> None:
        """A program that replaced sys.excepthook and calls no other: the interpreter still keeps the exception."""
        error = getattr(sys, "last_value", None)
        if self._raised is None and isinstance(error, BaseException):
            self._write_raised(error, error.__traceback__)

    def _write_raised(self, error: BaseException, traceback: TracebackType | None, at_ns: int | None = None) -> None:
        if os.getpid() != self._pid or isinstance(error, SystemExit):
            return
        import json

        self._raised = error
        record = _described(error, traceback)
        self._board.note(self._board.what("raised", record["type"]))
        self._board.end(protocol.END_RAISED)
        record.update(at_ns=time.monotonic_ns() if at_ns is None else at_ns, hints=[], chain=[])
        self._trouble.attempt("chain", lambda: record.update(chain=_chain(error)))
        self._trouble.attempt("hints", lambda: record.update(hints=self._hints(error, traceback)))
        path = os.path.join(self._directory, protocol.RAISED.format(pid=self._pid))
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file)
        os.replace(f"{path}.new", path)

    def _hints(self, error: BaseException, traceback: TracebackType | None) -> list[Any]:
        if self.names is None:
            return []
        from .exception_hints import hints
        from .places import foreign_code

        return hints(error, traceback, self.names.models(), self.names.fresh(), foreign_code(sys.modules["torch"]))


def _described(error: BaseException, traceback: TracebackType | None) -> dict[str, Any]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"type": name, "message": str(error)[:MESSAGE_LIMIT], "frames": _frames(traceback)}


def _chain(error: BaseException) -> list[dict[str, Any]]:
    """What it was raised from, or while what was handled; the nearest first."""
    chain: list[dict[str, Any]] = []
    while len(chain) < CHAIN_LIMIT:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        chain.append({**_described(before, before.__traceback__), "explicit": before is error.__cause__})
        error = before
    return chain


def _frames(traceback: TracebackType | None) -> list[dict[str, Any]]:
    """Innermost first; of an endless recursion the innermost ones."""
    frames: list[dict[str, Any]] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append({"file": code.co_filename, "line": traceback.tb_lineno, "function": code.co_name})
        traceback = traceback.tb_next
    return frames[::-1][:FRAMES_LIMIT]


# Every Python function that an exception passes is in its traceback, ours around torch's too. They are left out where
# one is rendered: by `traceback`, which logging, multiprocessing and torchrun use too, and by the interpreter at the
# end of a thread or of the program. The exception itself is not touched before that: it is evidence.

_PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WALKS = ("walk_tb", "_walk_tb_with_full_positions")  # each yields the frame first; the second one since 3.11
_CHAIN_LIMIT = 32


def hide_probe() -> None:
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
