"""Records which statements the program executes, with their values and communication.

Python reports every line of the program's own code: before 3.12 through sys.settrace (recorder_tracing.py), later
through sys.monitoring (recorder_monitoring.py). This module turns the reports into the records of protocol.py. Code of
libraries is not recorded, except for the calls that communicate.
"""

from __future__ import annotations

import _random
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from .. import protocol
from . import values
from .coverage import is_program
from .patches import TroubleLog
from .places import STANDARD_LIBRARY
from .record_file import FIRST_SIZE, RecordFile, thread_name
from .recorder_calls import Arguments, operation_of
from .recorder_statements import SOURCE_LIMIT, Statement, statements_of

PIECE = "recording"
VALUES_LIMIT = 3000  # executions of a statement whose values are recorded
EXECUTIONS_LIMIT = 30_000  # executions of a statement that are recorded
CHECKED_CALLS = 20  # executions of a call after which it is known whether it draws random numbers
CHILDREN_SHARE = 16  # the recording of a child process is smaller than that of a rank by this factor
MESSAGE_LIMIT = 300  # characters of the message of an exception
_NESTED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit)
_HAS_OWN_VARIABLES = 1  # CO_OPTIMIZED
_KEEPS_VARIABLES = sys.version_info[:2] == (3, 12)  # where frame.f_locals is a dictionary that the frame keeps


class ThreadState(threading.local):
    """The activations and the communication that a thread is in."""

    def __init__(self) -> None:
        self.stack: list[Activation] = []
        self.calls: list[Call] = []
        self.number = 0
        self.epoch = 0


class SourceFile:
    """A source file of the program, divided into statements."""

    def __init__(self, path: str, name: str) -> None:
        self.path = os.path.abspath(path)
        self.statements: dict[int, Statement] = {}
        try:
            with open(name, "rb") as file:
                self.statements = statements_of(file.read(SOURCE_LIMIT + 1))
        except (OSError, SyntaxError, ValueError, RecursionError):
            pass

    def statement(self, line: int) -> Statement:
        found = self.statements.get(line)
        if found is None:
            found = self.statements[line] = Statement(line)
        return found


class OwnCode:
    """A function of the program, or the top level of a module."""

    __slots__ = ("arguments", "code", "count", "file", "numbers", "opcodes", "shows_locals", "statements")

    def __init__(self, code: Any, file: SourceFile) -> None:
        self.code = code
        self.file = file
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        self.arguments = [values.Path(name, name, ()) for name in code.co_varnames[:count]]
        self.numbers: tuple[int, int] = (-1, 0)  # the epoch of the file, and the number of this code there
        self.opcodes = code.co_code
        self.count = 0  # calls so far
        self.statements = file.statements
        # A debugger that reads the variables of such a function changes the dictionary that the program got.
        lines = {line for _, _, line in code.co_lines() if line} if code.co_flags & _HAS_OWN_VARIABLES else set()
        self.shows_locals = any(self.statements[line].shows_locals for line in lines if line in self.statements)


class Activation:
    """One call of a function of the program that is still running."""

    __slots__ = (
        "code", "draws", "epoch", "error", "error_order", "frame_id", "has_values", "is_truncated", "number", "order",
        "start", "statement", "thread",
    )  # fmt: skip

    def __init__(self, code: OwnCode, thread: ThreadState, epoch: int, number: int, frame_id: int) -> None:
        self.code = code
        self.thread = thread
        self.epoch = epoch
        self.number = number
        self.frame_id = frame_id
        self.statement: Statement | None = None
        self.start = -1  # instruction at which the statement began
        self.order = 0  # of the current execution
        self.has_values = False
        self.draws: list[tuple[str, str]] | None = None  # states of the generators before the statement
        self.error = 0  # id of an exception that nothing has handled yet
        self.error_order = 0
        self.is_truncated = False


class Call:
    """One call that communicates and has not returned yet."""

    __slots__ = ("code", "depth", "frame_id", "order")

    def __init__(self, code: Any, frame_id: int, order: int, depth: int) -> None:
        self.code = code
        self.frame_id = frame_id
        self.order = order
        self.depth = depth  # activations of the thread


class Recorder:
    """A recorder of this process. Its methods are called for each event in the program's own code."""

    def __init__(self, directory: str, trouble: TroubleLog, *, with_values: bool) -> None:
        self.trouble = trouble
        self.experiment: Any = None
        self.with_values = with_values
        self.is_on = True
        self.stop_events: Callable[[], object] = int  # stops the events of this thread
        self.epoch = 1  # increases in each forked child
        self.threads = ThreadState()
        self._directory = directory
        self._next_order = itertools.count(1).__next__
        self._next_number = itertools.count(1).__next__
        self._files: dict[str, SourceFile] = {}
        self._file: RecordFile | None = None
        self._rank_unknown = False
        self._arguments = Arguments()
        self._codes = 0
        self._lock = threading.Lock()
        harness = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        self._foreign = (harness + os.sep, "<")
        os.register_at_fork(after_in_child=self.continue_in_child)

    # What the program's functions are.

    def classify(self, code: Any) -> OwnCode | str | None:
        """Return the description of a function of the program, the operation of a library's function, or None."""
        file = code.co_filename
        if file.startswith(self._foreign) or code.co_name in _NESTED:
            return None
        if not is_program(file):
            return operation_of(code) or None
        source = self._files.get(file)
        if source is None:
            if not os.path.isfile(file):
                return None
            source = self._files[file] = SourceFile(file, file)
        return OwnCode(code, source)

    # Events.

    def begin(self, code: OwnCode, frame: Any) -> Activation | None:
        """Record that a function of the program begins. Return None if it was called too often."""
        thread = self._thread()
        stack = thread.stack
        file = self._open()
        code.count += 1
        if code.count > EXECUTIONS_LIMIT:
            if stack:
                self._truncate(stack[-1], file)
            return None
        activation = Activation(code, thread, self.epoch, self._next_number(), id(frame))
        epoch, number = code.numbers
        if epoch != self.epoch:
            number = self._add_code(code, file)
        has_values = activation.has_values = (
            self.with_values and code.count <= VALUES_LIMIT and not file.is_nearly_full and self._is_readable(code)
        )
        arguments = self._values(code.arguments, frame) if has_values else []
        parent = stack[-1].order if stack else 0
        if self._rank_unknown and not stack:
            file.write_worker(worker_number())
        file.write(protocol.RECORD_ENTER, [activation.number, number, thread.number, parent, *arguments])
        stack.append(activation)
        return activation

    def resume(self, activation: Activation) -> None:
        """Continue an activation of a generator or coroutine, which had been suspended."""
        thread = self._thread()
        activation.thread = thread
        thread.stack.append(activation)

    def suspend(self, activation: Activation) -> None:
        self._pop(activation)

    def execute(self, activation: Activation, frame: Any, line: int) -> None:
        """Record that a line of an activation is executed. Most lines begin a statement."""
        code = activation.code
        statement = code.statements.get(line) or code.file.statement(line)
        at = frame.f_lasti
        current = activation.statement
        if statement is current and at > activation.start:
            return  # another line of the statement, such as an argument of a call
        file = self._file or self._open()
        if current is not None and activation.has_values:
            self._finish(activation, current, frame, file)
        activation.statement, activation.start = statement, at
        statement.count += 1
        if self.experiment is not None:
            new_line = self.experiment.before(frame, statement.line, statement.count)
            if new_line:  # the frame continues there, and Python does not report this line
                statement = activation.statement = code.file.statement(new_line)
                activation.start = frame.f_lasti
                statement.count += 1
        if activation.error and not statement.is_cleanup:
            self._handled(activation, file)
        count = statement.count
        if count > VALUES_LIMIT:
            activation.has_values = False
            if count > EXECUTIONS_LIMIT:
                statement.is_capped = self.experiment is None
                self._truncate(activation, file)
                return
            order = activation.order = self._next_order()
            file.write(protocol.RECORD_EXECUTE, (activation.number, order, statement.line, 0))
            return
        has_values = activation.has_values = self.with_values and not file.is_nearly_full and self._is_readable(code)
        order = activation.order = self._next_order()
        numbers = [activation.number, order, statement.line, has_values]
        if has_values and statement.reads:
            numbers += self._values(statement.reads, frame)
        file.write(protocol.RECORD_EXECUTE, numbers)
        if count == 1:
            file.count_progress()
        if statement.calls and has_values and (statement.draws or statement.can_draw or count <= CHECKED_CALLS):
            activation.draws = generator_states(statement.can_draw or statement.draws)

    def end(self, activation: Activation, frame: Any, *, has_returned: bool, result: Any = None) -> None:
        """Record that an activation returned or that an exception left it."""
        file = self._open()
        if activation.statement is not None and activation.has_values:
            self._finish(activation, activation.statement, frame, file)
        if self.experiment is not None:
            self.experiment.ended(frame)
        if activation.error and has_returned:
            self._handled(activation, file)
        kind = text = identity = 0
        if has_returned:
            is_read = self.with_values and activation.code.count <= VALUES_LIMIT and not file.is_nearly_full
            name, shown, identity = values.read(result) if is_read else ("", "", 0)
            kind, text = file.string(name), file.string(shown)
        file.write(protocol.RECORD_LEAVE, [activation.number, has_returned, kind, text, identity])
        self._pop(activation)

    def raised(self, activation: Activation, error: Any) -> None:
        """Record an exception in an activation. An exception passes through each function that it leaves."""
        kind = type(error)
        if not issubclass(kind, BaseException) or id(error) == activation.error or issubclass(kind, _CONTROL_FLOW):
            return
        activation.error, activation.error_order = id(error), activation.order
        activation.draws = None
        file = self._open()
        text = values.message(error)[:MESSAGE_LIMIT]
        file.write(protocol.RECORD_RAISED, [activation.order, file.string(values.type_name(kind)), file.string(text)])

    def begin_call(self, operation: str, frame: Any) -> Call | None:
        """Record a call that communicates. Return None if another such call of the same function made it."""
        thread = self._thread()
        stack, calls = thread.stack, thread.calls
        if not stack or (calls and calls[-1].depth == len(stack)):
            return None
        file, order = self._open(), self._next_order()
        numbers = self._arguments.numbers(operation, frame, file.string)
        file.write(protocol.RECORD_COMMUNICATION, [order, stack[-1].order, *numbers])
        file.count_progress()
        call = Call(frame.f_code, id(frame), order, len(stack))
        calls.append(call)
        return call

    def end_call(self, call: Call, error: str = "") -> None:
        """Record that a call that communicates returned, or that an exception of the type `error` left it."""
        file = self._open()
        file.write(protocol.RECORD_RETURNED, [call.order, file.string(error)])
        calls = self.threads.calls
        if call in calls:
            del calls[calls.index(call) :]
        if self._rank_unknown and call.code.co_name == "init_process_group" and not error:
            self._write_rank(file)

    # Parts of the recording.

    def _thread(self) -> ThreadState:
        thread = self.threads
        if thread.epoch != self.epoch:
            thread.stack, thread.calls = [], []
            file, number = self._open(), self._next_number()
            thread.number, thread.epoch = number, self.epoch
            file.write(protocol.RECORD_THREAD, [number, file.string(thread_name())])
        return thread

    def _open(self) -> RecordFile:
        """Return the file of this process, which is created when the first function of the program begins."""
        if self._file is None:
            with self._lock:
                if self._file is None:
                    path = os.path.join(self._directory, protocol.RECORDING.format(pid=os.getpid()))
                    rank, world_size = rank_from_environment()
                    self._rank_unknown = rank < 0
                    limit, first_size = _size_limit(self._directory), FIRST_SIZE
                    if self._rank_unknown:  # there can be many child processes
                        limit, first_size = limit // CHILDREN_SHARE, FIRST_SIZE // CHILDREN_SHARE
                    self._file = RecordFile(path, rank, world_size, limit, first_size)
                    self._file.string("")
        return self._file

    def _write_rank(self, file: RecordFile) -> None:
        self._rank_unknown = False
        try:
            c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
            file.write_identity(int(c10d.get_rank()), int(c10d.get_world_size()))
            file.set_limit(_size_limit(self._directory))
        except Exception as error:
            self.trouble.note(PIECE, error)

    def _add_code(self, code: OwnCode, file: RecordFile) -> int:
        number = self._next_number()
        code.numbers = self.epoch, number
        path, name = file.string(code.file.path), file.string(code.code.co_qualname)
        file.write(protocol.RECORD_CODE, [number, path, name, code.code.co_firstlineno])
        return number

    def _values(self, paths: Sequence[values.Path], frame: Any) -> list[int]:
        """Return four numbers for each value, as in RECORD_EXECUTE."""
        local, shared = values.frame_variables(frame)
        numbers: list[int] = []
        string, read, missing = self._open().string, values.read_data, values.MISSING
        for path in paths:
            found = path.find(local, shared) if path.steps else local.get(path.root, missing)
            if found is missing and not path.steps:
                found = shared.get(path.root, missing)
            if found is not missing:
                value = read(found)
                if value is not None:
                    numbers += (string(path.name), string(value[0]), string(value[1]), value[2])
        if _KEEPS_VARIABLES and frame.f_code.co_flags & _HAS_OWN_VARIABLES:
            local.clear()  # only a copy, which would keep the values alive until the function ends
        return numbers

    def _is_readable(self, code: OwnCode) -> bool:
        """Return whether reading the variables of a function changes nothing that the program can see."""
        return not (_KEEPS_VARIABLES and code.shows_locals)

    def _finish(self, activation: Activation, statement: Statement, frame: Any, file: RecordFile) -> None:
        """Record what the last statement of an activation assigned and drew, unless an exception ended it."""
        if activation.error_order == activation.order:
            activation.draws = None
            return
        if statement.writes:
            written = self._values(statement.writes, frame)
            if written:
                file.write(protocol.RECORD_WRITES, [activation.order, *written])
        if activation.draws is not None:
            before, activation.draws = activation.draws, None
            after = dict(generator_states(len(before) > 1))
            for name, old in before:
                new = after.get(name, old)
                if old and old != new:
                    statement.draws = True
                    strings = [file.string(text) for text in (name, old, new)]
                    file.write(protocol.RECORD_DRAW, [activation.order, *strings])

    def _truncate(self, activation: Activation, file: RecordFile) -> None:
        if not activation.is_truncated:
            activation.is_truncated = True
            file.write(protocol.RECORD_TRUNCATED, [activation.number])

    def _handled(self, activation: Activation, file: RecordFile) -> None:
        file.write(protocol.RECORD_HANDLED, [activation.error_order])
        activation.error = 0

    def _pop(self, activation: Activation) -> None:
        stack = activation.thread.stack
        if stack and stack[-1] is activation:
            stack.pop()
        elif activation in stack:
            del stack[stack.index(activation) :]

    # Failures and forks.

    def fail(self, error: BaseException) -> None:
        """Stop recording after a mistake of the recorder. The program continues.

        An exception that a signal handler of the program raised belongs to the program, so it is raised again.
        """
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        file = "" if trace is None else trace.tb_frame.f_code.co_filename
        if not file.startswith((*self._foreign, STANDARD_LIBRARY)):
            self.note("a signal handler raised an exception; what followed may be missing")
            raise error
        self.is_on = False
        self.trouble.note(PIECE, error)
        self.stop_events()

    def note(self, reason: str) -> None:
        """Record that a part of the recording is missing, in the recording and in the trouble file."""
        self.trouble.note(PIECE, RuntimeError(reason))
        if self._file is not None:
            self._file.write(protocol.RECORD_PROBLEM, [self._file.string(reason)])

    def note_skipped(self, code: OwnCode) -> None:
        """Record in the recording that a function is not recorded because it calls locals()."""
        code.count += 1
        if code.count == 1:
            file = self._open()
            file.write(protocol.RECORD_PROBLEM, [file.string(f"{code.code.co_qualname} calls locals()")])

    def continue_in_child(self) -> None:
        """Continue in a forked process, which gets a file of its own."""
        self._lock = threading.Lock()
        self._file = None
        self._arguments = Arguments()
        self.epoch += 1


def _size_limit(directory: str) -> int:
    """Return the most bytes of one recording. All recordings together must leave three quarters of the disk free."""
    space = os.statvfs(directory)
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = space.f_bavail * space.f_frsize // (4 * max(1, int(processes) if processes.isdecimal() else 1))
    return max(1 << 16, min(protocol.RECORDING_LIMIT, share))


def worker_number() -> int:
    """Return the number of the DataLoader worker that this process is, plus 1, or -1 if it is none."""
    worker: Any = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
    return -1 if worker is None else worker.id + 1


def rank_from_environment() -> tuple[int, int]:
    is_owner = os.environ.get(protocol.ENV_OWNER) == str(os.getpid())
    try:
        return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if is_owner else (-1, -1)
    except (KeyError, ValueError):
        return (0, 1) if is_owner and protocol.ENV_SOLO in os.environ else (-1, -1)


def generator_states(all_generators: bool) -> list[tuple[str, str]]:
    """Return the states of torch's default generator and, if wanted, of `random` and numpy, as checksums."""
    states = []
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    if generator is not None:
        states.append(("torch", values.read(generator)[1]))
    else:
        states.append(("torch", ""))
    if all_generators:
        random: Any = sys.modules.get("random")
        instance = getattr(random, "_inst", None)
        if instance is not None and type(instance) is random.Random:
            state = _random.Random.getstate(instance)
            states.append(("random", f"state {hash(state) & 0xFFFFFFFF:08x}"))
        numpy: Any = sys.modules.get("numpy.random.mtrand")
        instance = getattr(numpy, "_rand", None)
        if instance is not None and type(instance) is numpy.RandomState:
            state = instance.get_state()
            states.append(("numpy", f"state {zlib.crc32(state[1].tobytes(), state[2]):08x}"))
    return states
