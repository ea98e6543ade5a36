"""The end of a process: its exit call, its last exception, stacks on a fatal signal, and the flight recorder at exit.

Loaded before torch in every rank, so it imports only what the interpreter has loaded or loads quickly.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import os
import sys
import time

from .. import protocol
from .patches import TroubleLog, leave_out, patch
from .places import chain, frame_place, innermost
from .status_file import StatusFileWriter

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import IO, Any

    from .names import ModuleNames

FRAMES_LIMIT = 200
MESSAGE_LIMIT = 4000
CHAIN_LIMIT = 4


class ExitEvidence:
    """Writes the evidence of a process's end: its last exception, stacks on a fatal signal, and the flight recorder.

    Every hook that the program installed itself is called as it would be without the probe.
    """

    def __init__(self, status_file: StatusFileWriter, directory: str, trouble: TroubleLog) -> None:
        self._status_file = status_file
        self._directory = directory
        self._trouble = trouble
        self._pid = os.getpid()
        self._raised: BaseException | None = None
        self._exited_for: tuple[BaseException, int] | None = None  # handled at the exit call, and the call's time
        self._stacks: IO[bytes] | None = None  # held open: faulthandler knows only its descriptor
        self.names: ModuleNames | None = None  # the modules that were called; None before torch is imported

    def install(self) -> None:
        self._trouble.attempt("excepthook", self._chain_excepthook)
        self._trouble.attempt("faulthandler", self._enable_faulthandler)
        atexit.register(self._at_exit)

    def _chain_excepthook(self) -> None:
        def uncaught(arguments: tuple[Any, ...], _options: Any) -> None:
            _, error, traceback = arguments
            self._trouble.attempt("raised", lambda: self._write_raised(error, traceback))
            if self.names is not None:  # torch is imported, and the probe has patched it
                self._trouble.attempt("tracebacks", lambda: leave_out(error))

        patch(sys, "excepthook", "raised", self._trouble, before=uncaught)

    def _enable_faulthandler(self) -> None:
        """Have faulthandler dump stacks on fatal signals and on the probe's signal, unless the program uses either."""
        import _signal  # type: ignore[import-not-found]

        path = os.path.join(self._directory, protocol.STACKS.format(pid=self._pid))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._stacks = os.fdopen(descriptor, "ab", buffering=0)
        enables_fatal, dump_signal = not faulthandler.is_enabled(), _signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET
        if enables_fatal:
            faulthandler.enable(file=self._stacks.fileno(), all_threads=True)
        if _signal.getsignal(dump_signal) == _signal.SIG_DFL:
            faulthandler.register(dump_signal, file=self._stacks.fileno(), all_threads=True, chain=False)
            os.register_at_fork(after_in_child=lambda: faulthandler.unregister(dump_signal))
        if enables_fatal:
            # A forked child dies as it would without the probe.
            os.register_at_fork(after_in_child=faulthandler.disable)

    def remember_exception(self, error: BaseException | None) -> None:
        """Remember the exception that the program handles while it calls sys.exit or os._exit with a failure.

        It is written only when the process exits: SystemExit can be caught.
        """
        if error is not None:
            self._exited_for = error, time.monotonic_ns()

    def write_exited_for(self) -> None:
        """Write the remembered exception, unless an uncaught exception was written."""
        if self._raised is None and self._exited_for is not None:
            error, at_ns = self._exited_for
            self._write_raised(error, error.__traceback__, at_ns)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._trouble.attempt("raised", self.write_exited_for)
        self._trouble.attempt("raised", self._write_last_value)
        self._trouble.attempt("exit", self._note_exit)
        if "torch.distributed" in sys.modules:
            self._trouble.attempt("flight at exit", self._write_flight)

    def _note_exit(self) -> None:
        self._status_file.note(self._status_file.what("exit", "atexit"))
        self._status_file.end(protocol.END_ATEXIT)

    def _write_flight(self) -> None:
        from .heartbeat import FlightRecorder

        FlightRecorder(self._directory).write()

    def _write_last_value(self) -> None:
        """Write the exception that the interpreter stores even if the program replaced sys.excepthook."""
        error = getattr(sys, "last_value", None)
        if self._raised is None and isinstance(error, BaseException):
            self._write_raised(error, error.__traceback__)

    def _write_raised(self, error: BaseException, traceback: TracebackType | None, at_ns: int | None = None) -> None:
        if os.getpid() != self._pid or isinstance(error, SystemExit):
            return
        import json

        self._raised = error
        record = _exception_record(error, traceback)
        self._status_file.note(self._status_file.what("raised", record["type"]))
        self._status_file.end(protocol.END_RAISED)
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


def _exception_record(error: BaseException, traceback: TracebackType | None) -> dict[str, Any]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"type": name, "message": str(error)[:MESSAGE_LIMIT], "frames": _frames(traceback)}


def _chain(error: BaseException) -> list[dict[str, Any]]:
    """Return the exceptions from which `error` was raised, or during which it was raised, nearest first."""
    chain: list[dict[str, Any]] = []
    while len(chain) < CHAIN_LIMIT:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        chain.append({**_exception_record(before, before.__traceback__), "explicit": before is error.__cause__})
        error = before
    return chain


def _frames(traceback: TracebackType | None) -> list[dict[str, Any]]:
    """Return the innermost FRAMES_LIMIT frames, innermost first."""
    frames: list[dict[str, Any]] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append({"file": code.co_filename, "line": traceback.tb_lineno, "function": code.co_name})
        traceback = traceback.tb_next
    return frames[::-1][:FRAMES_LIMIT]


class ExitCalls:
    """Patches sys.exit and os._exit, and notes the program's line that called either.

    Neither call raises an exception that another hook would see, and the heartbeat's last sample may be a quarter of a
    second old. A program that exits with a failure while it handles an exception exits because of that exception, as
    children of mp.spawn and many main functions do.
    """

    def __init__(self, status_file: StatusFileWriter, trouble: TroubleLog, evidence: ExitEvidence) -> None:
        self._status_file = status_file
        self._trouble = trouble
        self._evidence = evidence
        self._pid = os.getpid()
        self._main_thread = _thread.get_ident()
        harness = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        # The standard library is foreign here, too: argparse exits on behalf of the line that called it.
        self._foreign = (os.path.dirname(os.__file__) + os.sep, harness + os.sep, "<frozen ")

    def install(self) -> None:
        patch(
            sys,
            "exit",
            "leaving",
            self._trouble,
            before=lambda words, _: self._note_exit_call(words, thread=True),
        )
        patch(
            os,
            "_exit",
            "leaving",
            self._trouble,
            before=lambda words, _: self._note_exit_call(words, thread=False),
        )

    def watch_shutdown(self) -> None:
        """Note the start of the interpreter's exit, before it joins threads and runs atexit handlers, which may hang.

        Call it after torch has imported threading. Python has no public hook that runs as early.
        """
        sys.modules["threading"]._register_atexit(self._shut_down)

    def _shut_down(self) -> None:
        if os.getpid() == self._pid:
            self._status_file.over = True
            self._trouble.attempt("raised", self._evidence.write_exited_for)
            self._trouble.attempt("end", lambda: self._status_file.note(self._status_file.what("exit", "shutdown")))

    def _note_exit_call(self, arguments: tuple[Any, ...], *, thread: bool) -> None:
        """Note the line that calls sys.exit (`thread`: in another thread it ends only that thread) or os._exit."""
        if (thread and _thread.get_ident() != self._main_thread) or os.getpid() != self._pid:
            return  # a forked child has no status file
        frame = sys._getframe(3)
        self._trouble.attempt("leaving", lambda: self._note_line(frame))
        if arguments[:1] not in ((), (None,), (0,)):
            self._evidence.remember_exception(sys.exc_info()[1])
        if not thread:
            self._trouble.attempt("raised", self._evidence.write_exited_for)

    def _note_line(self, frame: Any) -> None:
        caller = innermost(frame, self._foreign) or frame
        self._status_file.saw(frame_place(caller))
        self._status_file.fact(protocol.FACT_EXITED_FROM, chain(caller, self._foreign))
