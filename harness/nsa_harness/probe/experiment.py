"""Changes one value or one decision of the program, to find out whether it is the cause of a failure.

The recorder calls `Experiment.before` before each statement of the user's code, and `Experiment.ended` when a function
ends. An experiment has one intervention, which is one of these kinds:

    undo       the effect of an extra call: restore the value that the calling statement found
    generator  the state of random generators becomes that of the reference rank
    scalar     the value of a name becomes that of the reference rank
    length     a sequence is cut to its length on the reference rank
    branch     the next statement becomes that of the reference rank
    raise      an exception that one rank raises in a statement is raised on the others (Python >= 3.12), after the
               statement or, if the program would not catch it there, before it
    hash_seed  PYTHONHASHSEED is set, so that sets have the same order on all ranks

The reference rank publishes its values during the run, in a file of the probe directory. Whatever was applied, found
equal or refused is recorded in another file of this directory. In a control run, every rank waits for these values in
the same way and then changes nothing, which shows whether the waiting alone lets the ranks go on.
"""

from __future__ import annotations

import _thread
import builtins
import json
import marshal
import os
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from .. import protocol
from .assignment import (
    Holder,
    Refusal,
    find_holder,
    first_items,
    generator_states,
    jump,
    kind_of,
    owner_frame,
    pack,
    save,
    set_generator_states,
    unpack,
)
from .safe_attributes import MISSING

Action = Callable[[FrameType, int], int]  # with the frame and its next line, 0 = it ended; returns as `before`
_Occurrence = int | tuple[int, int]  # of a statement, alone or with the rank that publishes a value

_WAIT_S = 60.0  # for the value of the reference rank
_POLL_S = 0.002
_MAX_PUBLISHED = 20_000
_MAX_LINES = 200  # of the record file; afterwards only every 100th event is written
_MAX_KEPT = 1000


class Experiment:
    """The intervention of this process. Nothing that fails in it reaches the program."""

    def __init__(self, settings: dict[str, Any], directory: str, rank: int) -> None:
        self._rank = rank
        self._kind: str = settings["kind"]
        self._at: tuple[str, int] = (settings.get("file", ""), settings.get("line", 0))
        self._callers = {(file, line) for file, line in settings.get("callers") or [self._at]}
        self._from: int = settings.get("from", 1)
        self._path: list[list[Any]] = settings.get("path") or []
        self._reference: int = settings.get("reference", 0)
        self._ranks: list[int] = settings.get("ranks") or []
        self._is_after: bool = settings.get("after", False)
        self._is_temporary: bool = settings.get("temporary", False)
        self._is_control: bool = settings.get("control", False)
        self._error: str = settings.get("error", "")  # name of a builtin exception
        self._handler: int = settings.get("handler", 0)
        self._errors: dict[int, Exception] = {}  # by thread: what its current event has to raise
        self._is_extra_draw = self._kind == "undo" and not self._path
        self._lines = {self._at[1], *(line for _, line in self._callers)}
        self._files: dict[CodeType, str] = {}
        self._pending: dict[int, list[Action]] = {}  # by frame: what happens before its next statement
        self._undoing: dict[int, list[list[Any]]] = {}  # by thread: a holder with its saver, for each running caller
        self._kept: list[Any] = []  # replaced values, because dropping one could run its `__del__`
        self._channel = _Channel(directory, settings.get("wait_s", _WAIT_S))
        self._log = _Log(directory, rank)
        self._is_on = rank in self._ranks or (not self._ranks if self._kind == "undo" else rank == self._reference)
        os.register_at_fork(after_in_child=self._stop)
        if self._kind == "hash_seed":
            self._is_on = False
            is_set = os.environ.get("PYTHONHASHSEED", "random") != "random"
            self._log.note("changed" if is_set else "refused", 0, "" if is_set else "not set")

    def before(self, frame: FrameType, line: int, occurrence: int) -> int:
        """Carry out what is due before a statement, and return the line at which the frame continues instead, or 0.

        `line` is the first line of the statement, `occurrence` the number of this execution in this process, from 1.
        """
        if not self._is_on or (not self._pending and line not in self._lines):
            return 0
        try:
            new_line = self._finish(frame, line) if self._pending else 0
            if not new_line and line in self._lines:
                self._begin(frame, (self._file(frame.f_code), line), occurrence)
            return new_line
        except Exception as error:
            self._switch_off(occurrence, f"{type(error).__name__}: {error}"[:200])
            return 0

    def ended(self, frame: FrameType) -> None:
        """Carry out what was due before the next statement of a function that has returned or raised an exception."""
        if not self._is_on or id(frame) not in self._pending:
            return
        try:
            self._finish(frame, 0)
        except Exception as error:
            self._switch_off(0, f"{type(error).__name__}: {error}"[:200])

    def _stop(self) -> None:
        self._is_on = False

    def _switch_off(self, occurrence: int, reason: str) -> None:
        self._is_on = False
        self._pending.clear()
        self._log.note("refused", occurrence, reason)

    def _file(self, code: CodeType) -> str:
        file = self._files.get(code)
        if file is None:
            file = self._files[code] = os.path.abspath(code.co_filename)
        return file

    def _finish(self, frame: FrameType, line: int) -> int:
        new_line = 0
        for action in self._pending.pop(id(frame), ()):
            new_line = action(frame, line) or new_line
        return new_line

    def _wait_for_next(self, frame: FrameType, action: Action) -> None:
        self._pending.setdefault(id(frame), []).append(action)

    def _begin(self, frame: FrameType, place: tuple[str, int], occurrence: int) -> None:
        """Begin the intervention if it applies to this execution of a statement."""
        if self._kind == "undo":
            self._undo(frame, place, occurrence)
        elif place == self._at and occurrence >= self._from:
            if self._kind == "branch":
                self._wait_for_next(frame, lambda frame, line: self._follow(frame, line, occurrence))
            elif self._kind == "raise" and (self._is_after or self._rank == self._reference):
                self._wait_for_next(frame, lambda _, line: self._raise_alike(line, occurrence))
            elif self._kind == "raise":
                self._raise_with(self._receive((occurrence, self._reference)), occurrence)
            elif self._kind == "generator":
                self._share_generators(frame, occurrence)
            elif self._is_after:
                self._wait_for_next(frame, lambda frame, _: self._share(frame, occurrence))
            else:
                self._share(frame, occurrence)

    def _share(self, frame: FrameType, occurrence: int) -> int:
        """Publish the value of the reference rank, or set the published value on another rank."""
        try:
            self._share_value(frame, occurrence)
        except Refusal as error:
            self._refuse(occurrence, error)
        return 0

    def _refuse(self, occurrence: int, error: Refusal) -> None:
        """Record a refusal. The reference rank also publishes it, so that no other rank waits."""
        self._log.note("refused", occurrence, str(error))
        if self._rank == self._reference and self._kind != "undo":
            self._channel.publish(occurrence, None)

    def _share_value(self, frame: FrameType, occurrence: int) -> None:
        holder = find_holder(frame, self._path)
        value = holder.read()
        if self._kind == "length":
            self._share_length(holder, value, occurrence)
            return
        packed = pack(value, with_graph=self._is_temporary)
        if self._rank == self._reference:
            self._publish(occurrence, packed)
            return
        wanted = self._receive(occurrence)
        # Packed values are compared as bytes: nan is equal to nan, and 1 is not equal to True.
        if marshal.dumps(wanted, 2) == marshal.dumps(packed, 2):
            self._log.note("equal", occurrence)
            return
        if kind_of(wanted) != kind_of(packed):
            raise Refusal("kind")
        if self._is_control:
            return
        self._keep(value)
        new_value = unpack(wanted)
        holder.write(new_value)
        self._log.note("changed", occurrence, "", _printable(packed), _printable(wanted))
        if self._is_temporary:
            self._wait_for_next(frame, lambda *_: self._put_back(holder, new_value, value))

    def _share_length(self, holder: Holder, value: object, occurrence: int) -> None:
        length, _ = first_items(value)
        if self._rank == self._reference:
            self._publish(occurrence, length)
            return
        wanted = self._receive(occurrence)
        if wanted >= length:
            self._log.note("equal", occurrence)
        elif not self._is_control:
            self._keep(value)
            holder.write(first_items(value, wanted)[1])
            self._log.note("changed", occurrence, "", length, wanted)

    def _put_back(self, holder: Holder, new_value: object, value: object) -> int:
        if holder.read() is new_value:
            holder.write(value)
        return 0

    def _share_generators(self, frame: FrameType, occurrence: int) -> None:
        """Share the generators' states before a statement that draws, or after a statement that seeds them.

        Only generators that the statement itself uses count as changed, because any other generator makes no difference
        to it.
        """
        before = generator_states()
        shared = {} if self._is_after else self._shared_states(before, occurrence)
        now = generator_states()

        def finish(_frame: FrameType, _line: int) -> int:
            after = generator_states()
            used = {name: state for name, state in after.items() if now.get(name) != state}
            changed = self._shared_states(used, occurrence) if self._is_after else shared
            names = sorted(set(changed) & set(used))
            if self._rank != self._reference and self._is_on:
                self._log.note("changed" if names else "equal", occurrence, "", None, ",".join(names) or None)
            return 0

        self._wait_for_next(frame, finish)

    def _shared_states(self, states: dict[str, Any], occurrence: int) -> dict[str, Any]:
        """Publish the states of generators, or set the published ones. Return the states that this has changed."""
        try:
            if self._rank == self._reference:
                self._publish(occurrence, states)
                return {}
            wanted = self._receive(occurrence)
        except Refusal as error:
            self._refuse(occurrence, error)
            return {}
        changed = {name: state for name, state in wanted.items() if name in states and states[name] != state}
        if self._is_control:
            return {}
        set_generator_states(changed)
        return changed

    def _undo(self, frame: FrameType, place: tuple[str, int], occurrence: int) -> None:
        """Restore a value when the statement that made the extra call is done."""
        thread = _thread.get_ident()
        running = self._undoing.setdefault(thread, [])
        if place in self._callers:
            saved: list[Any] = []
            running.append(saved)
            if self._is_extra_draw:
                saved.append(generator_states())
            self._wait_for_next(frame, lambda *_: self._restore(running, saved, occurrence))
        if place == self._at and running and not running[-1] and not self._is_extra_draw:
            try:
                name = self._path[0][1]
                if frame.f_code.co_flags & 1 and len(self._path) == 1 and place not in self._callers:
                    if name in frame.f_code.co_freevars:
                        owner = owner_frame(frame, name)
                        if owner is None:
                            raise Refusal("no frame")
                        frame = owner
                    elif name in frame.f_code.co_varnames:
                        raise Refusal("local to the call")
                holder = find_holder(frame, self._path)
                running[-1].extend((holder, holder.read(), save(holder.read())))
            except Refusal as error:
                self._refuse(occurrence, error)

    def _restore(self, running: list[list[Any]], saved: list[Any], occurrence: int) -> int:
        running[:] = [other for other in running if other is not saved]
        if not saved or self._is_control:
            return 0
        if self._is_extra_draw:
            states = generator_states()
            changed = {name: state for name, state in saved[0].items() if states[name] != state}
            set_generator_states(changed)
            self._log.note("changed" if changed else "equal", occurrence, "", None, ",".join(sorted(changed)) or None)
            return 0
        holder, old_value, restore = saved
        try:
            value = holder.read()
            if value is MISSING:
                raise Refusal("unbound")
            self._keep(value)
            if old_value is MISSING and holder.frame is not None:
                raise Refusal("unbound")
            restore(holder)
            self._log.note("changed", occurrence, "", _printable_value(value), _printable_value(old_value))
        except Refusal as error:
            self._refuse(occurrence, error)
        return 0

    def _follow(self, frame: FrameType, line: int, occurrence: int) -> int:
        """Publish the next line of the reference rank, or continue another rank at the published line."""
        if self._rank == self._reference:
            self._publish(occurrence, line)
            return 0
        try:
            wanted = self._receive(occurrence)
            if wanted == line:
                self._log.note("equal", occurrence)
                return 0
            if not wanted or not line:
                raise Refusal("the function ended")
            if self._is_control:
                return 0
            jump(frame, wanted)
            self._log.note("changed", occurrence, "", line, wanted)
            return int(wanted)
        except Refusal as error:
            self._refuse(occurrence, error)
            return 0

    def _raise_alike(self, line: int, occurrence: int) -> int:
        """Exchange which ranks have raised an exception in the statement, and prepare it on the others."""
        has_raised = line in (0, self._handler)
        self._publish((occurrence, self._rank), has_raised)
        try:
            others = [
                self._receive((occurrence, rank)) for rank in self._ranks if rank != self._rank and self._is_after
            ]
        except Refusal as error:
            self._log.note("refused", occurrence, str(error))
            return 0
        if self._is_after:
            self._raise_with(not has_raised and any(others), occurrence)
        return 0

    def _raise_with(self, others_raised: bool, occurrence: int) -> None:
        """Prepare an exception for the current event of this thread, if it was raised on other ranks only."""
        if not others_raised:
            self._log.note("equal", occurrence)
        elif not self._is_control:
            self._errors[_thread.get_ident()] = getattr(builtins, self._error)("raised on another rank")
            self._log.note("changed", occurrence, "", None, self._error)

    def take_error(self) -> Exception | None:
        """Return the exception that the current event of this thread has to raise in the program, and forget it."""
        return self._errors.pop(_thread.get_ident(), None) if self._errors else None

    def _publish(self, occurrence: _Occurrence, value: object) -> None:
        self._channel.publish(occurrence, value)
        self._log.note("published", occurrence if isinstance(occurrence, int) else occurrence[0])

    def _receive(self, occurrence: _Occurrence) -> Any:
        try:
            value = self._channel.receive(occurrence)
        except TimeoutError as error:
            self._is_on = False  # otherwise each execution would wait as long again
            raise Refusal(str(error)) from None
        if value is None:
            raise Refusal("refused on the reference rank")
        return value

    def _keep(self, value: object) -> None:
        if len(self._kept) >= _MAX_KEPT and type(value) is not int and type(value) is not float:
            raise Refusal("too many values")
        if type(value) is list or type(value) is dict or type(value) is set:
            value = (value, value.copy())
        self._kept.append(value)


class _Channel:
    """A file through which the reference rank passes values to the other ranks, by the number of the execution."""

    def __init__(self, directory: str, wait_s: float) -> None:
        self._path = os.path.join(directory, protocol.EXPERIMENT_VALUES)
        self._wait_s = wait_s
        self._published = 0
        self._offset = 0
        self._values: dict[_Occurrence, Any] = {}
        self._is_over = False

    def publish(self, occurrence: _Occurrence, value: Any) -> None:
        self._published += 1
        if self._published > _MAX_PUBLISHED:
            return
        body = marshal.dumps((occurrence, value, self._published == _MAX_PUBLISHED))
        _append(self._path, len(body).to_bytes(4, "little") + body)

    def receive(self, occurrence: _Occurrence) -> Any:
        """Return the published value, None if the reference rank has none, or raise TimeoutError."""
        deadline = time.monotonic() + self._wait_s
        while occurrence not in self._values:
            if not self._read() and self._is_over:
                raise TimeoutError("too many values")
            if time.monotonic() > deadline:
                raise TimeoutError("no value from the reference rank")
            if occurrence not in self._values:
                time.sleep(_POLL_S)
        return self._values.pop(occurrence)

    def _read(self) -> bool:
        """Read what was published since the last call. Return whether there was anything."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        at = 0
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "little")):
            occurrence, value, self._is_over = marshal.loads(data[at + 4 : end])
            self._values[occurrence] = value
            at = end
        self._offset += at
        return at > 0


class _Log:
    """The record of what was changed, found equal or refused in this process, one JSON object per line."""

    def __init__(self, directory: str, rank: int) -> None:
        self._path = os.path.join(directory, protocol.EXPERIMENT.format(pid=os.getpid()))
        self._rank = rank
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, event: str, occurrence: int, reason: str = "", before: object = None, after: object = None) -> None:
        """Write one event. `before` and `after` are the values on this rank, if they may be shown."""
        count = self._counts[event, reason] = self._counts.get((event, reason), 0) + 1
        if count > (_MAX_LINES if event == "changed" else 1) and count % 100:
            return
        line = {"event": event, "rank": self._rank, "occurrence": occurrence, "count": count, "reason": reason}
        line.update({"before": before, "after": after})
        try:
            _append(self._path, (json.dumps(line) + "\n").encode())
        except OSError:
            return


def _append(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _printable(packed: tuple[Any, ...]) -> object:
    """Return a packed number, or the kind of another value. Strings may be secrets, so they are never recorded."""
    return packed[0] if packed[0] == "tensor" else _printable_value(packed[-1])


def _printable_value(value: object) -> object:
    return value if value is None or any(type(value) is cls for cls in (int, float, bool)) else type(value).__name__
