"""Records how a process ends, such as by an exit call, an exception or a signal.

This module is loaded before torch in every rank, so it imports only modules that are loaded already or load quickly.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import os
import sys
import time

from .. import protocol
from .patches import TroubleLog, patch, remove_probe_frames
from .places import chain, frame_place, innermost
from .status_file import StatusFileWriter

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import IO, Any

    from .frame_values import FrameValues
    from .names import ModuleNames

FRAMES_LIMIT = 200
MESSAGE_LIMIT = 4000  # characters of an exception's message
CHAIN_LIMIT = 4  # recorded causes of an exception
STOPPED_LIMIT = 16  # recorded processes that the program stopped


class ExitEvidence:
    """A recorder of the last exception, and of all stacks at a fatal signal. The program's hooks are still called."""

    def __init__(self, status_file: StatusFileWriter, directory: str, trouble: TroubleLog) -> None:
        self._status_file = status_file
        self._directory = directory
        self._trouble = trouble
        self._pid = os.getpid()
        self._written_exception: BaseException | None = None
        # The exception that the program was handling when it called exit, and the time of the call.
        self._exit_exception: tuple[BaseException, int] | None = None
        # Closed before the exception is written, in case the program has used up all file descriptors.
        self._reserve: int | None = None
        self._stacks: IO[bytes] | None = None  # must stay open: faulthandler has only its file descriptor
        self.names: ModuleNames | None = None  # the modules that were called; None before torch is imported
        self.values: FrameValues | None = None  # None before torch is imported, and if no values may be read

    def install(self) -> None:
        self._trouble.attempt("excepthook", self._chain_excepthook)
        self._trouble.attempt("faulthandler", self._enable_faulthandler)
        self._trouble.attempt("last exception", self._reserve_descriptor)
        atexit.register(self._at_exit)

    def _reserve_descriptor(self) -> None:
        self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _chain_excepthook(self) -> None:
        def uncaught(arguments: tuple[Any, ...], _options: Any) -> None:
            _, error, traceback = arguments
            self._trouble.attempt("last exception", lambda: self._write_exception(error, traceback))
            if self.names is not None:  # torch is imported, and the probe has patched it
                self._trouble.attempt("tracebacks", lambda: remove_probe_frames(error))

        patch(sys, "excepthook", "last exception", self._trouble, before=uncaught)

    def _enable_faulthandler(self) -> None:
        """Make faulthandler dump stacks on fatal signals and on the instrumentation's own signal."""
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
            # A forked child must die as it would without the probe.
            os.register_at_fork(after_in_child=faulthandler.disable)

    def remember_exception(self, error: BaseException | None) -> None:
        """Remember the exception handled at a call of exit. It is written at the exit, which may not come."""
        if error is not None:
            self._exit_exception = error, time.monotonic_ns()

    def write_exit_exception(self) -> None:
        """Write the remembered exception unless an uncaught exception has already been written."""
        if self._written_exception is None and self._exit_exception is not None:
            error, at_ns = self._exit_exception
            self._write_exception(error, error.__traceback__, at_ns)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._trouble.attempt("last exception", self.write_exit_exception)
        self._trouble.attempt("last exception", self._write_last_value)
        self._trouble.attempt("exit", self._note_exit)
        if "torch.distributed" in sys.modules:
            self._trouble.attempt("flight at exit", self._write_flight)

    def _note_exit(self) -> None:
        self._status_file.write_event(self._status_file.event_code("exit", "atexit"))
        self._status_file.write_end(protocol.END_ATEXIT)

    def _write_flight(self) -> None:
        from .heartbeat import FlightRecorder

        FlightRecorder(self._directory).write()

    def _write_last_value(self) -> None:
        """Write the uncaught exception that Python stores in sys.last_value."""
        error = getattr(sys, "last_value", None)
        if self._written_exception is None and isinstance(error, BaseException):
            self._write_exception(error, error.__traceback__)

    def _write_exception(self, error: BaseException, traceback: TracebackType | None, at_ns: int | None = None) -> None:
        if os.getpid() != self._pid or isinstance(error, SystemExit):
            return
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        import json

        self._written_exception = error
        record = _exception_record(error, traceback)
        self._status_file.write_event(self._status_file.event_code("raised", record["type"]))
        self._status_file.write_end(protocol.END_RAISED)
        if (values := self.values) is not None:
            self._trouble.attempt("values", lambda: values.write_exception(traceback))
        record.update(at_ns=time.monotonic_ns() if at_ns is None else at_ns, hints=[], chain=[])
        # Only the interpreter stores an exception here. A program that calls sys.excepthook itself may go on.
        record.update(is_uncaught=getattr(sys, "last_value", None) is error)
        self._trouble.attempt("exception chain", lambda: record.update(chain=_chain(error)))
        self._trouble.attempt("exception hints", lambda: record.update(hints=self._hints(error, traceback)))
        self._trouble.attempt("exception hints", lambda: record["hints"].extend(_refusal_hints(error)))
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

        return hints(
            error, traceback, self.names.models(), self.names.new_modules(), foreign_code(sys.modules["torch"])
        )


def _refusal_hints(error: BaseException) -> list[dict[str, Any]]:
    from .refusals import hints

    return hints(error)


def _exception_record(error: BaseException, traceback: TracebackType | None) -> dict[str, Any]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"type": name, "message": str(error)[:MESSAGE_LIMIT], "frames": _frames(traceback)}


def _chain(error: BaseException) -> list[dict[str, Any]]:
    """Return a record of each exception that led to `error`, nearest first."""
    chain: list[dict[str, Any]] = []
    while len(chain) < CHAIN_LIMIT:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            break
        chain.append({**_exception_record(cause, cause.__traceback__), "explicit": cause is error.__cause__})
        error = cause
    return chain


def _frames(traceback: TracebackType | None) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append({"file": code.co_filename, "line": traceback.tb_lineno, "function": code.co_name})
        traceback = traceback.tb_next
    return frames[::-1][:FRAMES_LIMIT]


class StopSignals:
    """A recorder of the processes that the program itself stops with os.kill, and of the lines that do so.

    The kernel does not tell who stopped a process. Nothing outside the job is expected to resume one that the program
    stopped.
    """

    def __init__(self, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
        self._status_file = status_file
        self._trouble = trouble
        self._foreign = _foreign_files()
        self._pid = os.getpid()
        self._seen: set[int] = set()

    def install(self) -> None:
        patch(os, "kill", "stop signals", self._trouble, before=lambda words, _: self._note(*words))

    def _note(self, pid: int, number: int) -> None:
        if number not in protocol.STOP_SIGNALS or os.getpid() != self._pid:
            return
        if pid not in self._seen and len(self._seen) < STOPPED_LIMIT:
            self._seen.add(pid)
            self._status_file.write_fact(f"{protocol.FACT_STOPPED}{pid}", chain(sys._getframe(3), self._foreign))


def _foreign_files() -> tuple[str, ...]:
    """Return the paths of code that is not the program's own. The standard library acts for the program's line."""
    harness = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.dirname(os.__file__) + os.sep, harness + os.sep, "<frozen "


class ExitCalls:
    """A recorder of the line in the program that calls sys.exit or os._exit.

    No other hook sees these calls. If a program exits with a failure while it handles an exception, this exception is
    recorded as the reason. Children of mp.spawn and many main functions exit in this way.
    """

    def __init__(self, status_file: StatusFileWriter, trouble: TroubleLog, evidence: ExitEvidence) -> None:
        self._status_file = status_file
        self._trouble = trouble
        self._evidence = evidence
        self._pid = os.getpid()
        self._main_thread = _thread.get_ident()
        self._foreign = _foreign_files()  # argparse, for example, calls sys.exit on behalf of the program's line

    def install(self) -> None:
        patch(
            sys, "exit", "exit calls", self._trouble, before=lambda words, _: self._note_exit_call(words, thread=True)
        )
        patch(
            os, "_exit", "exit calls", self._trouble, before=lambda words, _: self._note_exit_call(words, thread=False)
        )

    def watch_shutdown(self) -> None:
        """Arrange to record the time at which the interpreter starts to shut down.

        The callback runs before the interpreter joins threads and runs atexit handlers, which may hang. Call this
        method after torch has imported threading. Python has no public hook that runs this early.
        """
        sys.modules["threading"]._register_atexit(self._on_shutdown)

    def _on_shutdown(self) -> None:
        if os.getpid() == self._pid:
            self._status_file.is_exiting = True
            self._trouble.attempt("last exception", self._evidence.write_exit_exception)
            if self._evidence.values is not None:
                self._trouble.attempt("values", self._evidence.values.write_module)
            shutdown = self._status_file.event_code("exit", "shutdown")
            self._trouble.attempt("shutdown", lambda: self._status_file.write_event(shutdown))

    def _note_exit_call(self, arguments: tuple[Any, ...], *, thread: bool) -> None:
        """Record the line of an exit call. `thread`: it is sys.exit, which counts only in the main thread."""
        if (thread and _thread.get_ident() != self._main_thread) or os.getpid() != self._pid:
            return  # a forked child has no status file
        frame = sys._getframe(3)
        self._trouble.attempt("exit calls", lambda: self._note_line(frame))
        if self._evidence.values is not None:
            self._evidence.values.write_departure(frame)
        if arguments[:1] not in ((), (None,), (0,)):
            self._evidence.remember_exception(sys.exc_info()[1])
        if not thread:
            self._trouble.attempt("last exception", self._evidence.write_exit_exception)

    def _note_line(self, frame: Any) -> None:
        caller = innermost(frame, self._foreign) or frame
        self._status_file.write_last_line(frame_place(caller))
        self._status_file.write_fact(protocol.FACT_EXITED_FROM, chain(caller, self._foreign))
