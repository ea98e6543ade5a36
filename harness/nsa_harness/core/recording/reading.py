"""Reads the recording of a rank from the bytes of its file. Damaged bytes give a shorter recording, never an error."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from sys import byteorder

from nsa_harness import protocol
from nsa_harness.core.recording.recording import (
    Activation,
    Communication,
    Execution,
    Raised,
    RankRecording,
    ThreadRecording,
    Value,
    Values,
)

# Problems of a recording.
DAMAGED = "damaged"  # a record cannot be read; what follows it is missing
FULL = "full"  # the file reached its size limit; what happened later is missing


class NotARecordingError(ValueError):
    """The bytes are not a recording of this version."""


def read_recording(data: bytes, rank: int) -> RankRecording:
    """Return the recording of `rank` in the bytes of its file. Raise NotARecordingError if the header is wrong."""
    major, minor, _, world_size, flags = read_header(data)
    reader = _Reader()
    problems = reader.read(data)
    threads = sorted(reader.threads.values(), key=lambda thread: thread.name != "MainThread")
    if flags & protocol.RECORDING_FULL:
        problems.append(FULL)
    return RankRecording(
        rank=rank, world_size=world_size, python=(major, minor), threads=threads, problems=tuple(problems)
    )


def read_header(data: bytes) -> tuple[int, int, int, int, int]:
    """Return the version of Python (major, minor), the rank, the world size and the flags of a recording.

    Raise NotARecordingError if the header is wrong.
    """
    if len(data) < protocol.RECORDING_HEADER_SIZE or data[:8] != protocol.RECORDING_MAGIC:
        raise NotARecordingError("no header")
    _, layout, _, *rest = protocol.RECORDING_HEADER.unpack_from(data)
    if layout != protocol.RECORDING_LAYOUT:
        raise NotARecordingError(f"layout {layout}")
    major, minor, rank, world_size, flags = rest
    return major, minor, rank, world_size, flags


def read_child(data: bytes) -> tuple[int, int]:
    """Return the number of the DataLoader worker and the process id of its parent, as in RECORDING_CHILD.

    Raise NotARecordingError if the header is wrong.
    """
    read_header(data)
    worker, parent = protocol.RECORDING_CHILD.unpack_from(data, protocol.RECORDING_CHILD_AT)
    return worker, parent


def read_children(recordings: Iterable[bytes], rank: int) -> list[ThreadRecording]:
    """Return the threads in the recordings of a rank's child processes, in the order in which the processes began.

    The name of a thread is the same on each rank: "DataLoader worker 0", "DataLoader worker 0 (2)" for the second
    process with this number, or "child process".
    """
    found = []
    for data in recordings:
        threads = [thread for thread in read_recording(data, rank).threads if thread.activations]
        orders = [one.executions[0].order for thread in threads for one in thread.activations[:1] if one.executions]
        found.append((min(orders, default=0), read_child(data)[0], threads))
    counts: Counter[int] = Counter()
    result = []
    for _, worker, threads in sorted(found, key=lambda one: one[0]):
        counts[worker] += 1
        name = f"DataLoader worker {worker - 1}" if worker > 0 else "child process"
        name = f"{name} ({counts[worker]})" if counts[worker] > 1 else name
        for thread in threads:
            result.append(replace(thread, name=name if thread.name == "MainThread" else f"{name}, {thread.name}"))
    return result


def records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the offset, the kind and the body of each complete record."""
    at = protocol.RECORDING_HEADER_SIZE
    while at + protocol.RECORD_HEAD.size <= len(data):
        size, kind = protocol.RECORD_HEAD.unpack_from(data, at)
        end = at + protocol.RECORD_HEAD.size + size
        if not kind or end > len(data):
            if kind:
                yield at, -1, b""
            return
        yield at, kind, data[end - size : end]
        at = end + (-size & 7)


@dataclass(kw_only=True)
class _Reader:
    """The objects that the records so far define, by their numbers."""

    strings: list[str] = field(default_factory=list)
    codes: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    threads: dict[int, ThreadRecording] = field(default_factory=dict)
    activations: dict[int, Activation] = field(default_factory=dict)
    executions: dict[int, Execution] = field(default_factory=dict)
    communications: dict[int, Communication] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    values: dict[tuple[int, int, int], Value] = field(default_factory=dict)

    def read(self, data: bytes) -> list[str]:
        """Add all records. Return the problems of the recording."""
        actions = {
            protocol.RECORD_CODE: self._code,
            protocol.RECORD_THREAD: self._thread,
            protocol.RECORD_ENTER: self._enter,
            protocol.RECORD_EXECUTE: self._execute,
            protocol.RECORD_WRITES: self._writes,
            protocol.RECORD_LEAVE: self._leave,
            protocol.RECORD_RAISED: self._raised,
            protocol.RECORD_HANDLED: self._handled,
            protocol.RECORD_COMMUNICATION: self._communication,
            protocol.RECORD_RETURNED: self._returned,
            protocol.RECORD_DRAW: self._draw,
            protocol.RECORD_TRUNCATED: self._truncated,
            protocol.RECORD_PROBLEM: self._problem,
        }
        for _, kind, body in records(data):
            if kind == protocol.RECORD_STRING:
                self.strings.append(body.decode("utf-8", "replace"))
                continue
            try:
                actions[kind](numbers_of(body))
            except (KeyError, IndexError, ValueError):
                self.problems.append(DAMAGED)
                break
        return self.problems

    def _string(self, number: int) -> str:
        if number < 0:
            raise IndexError(number)
        return self.strings[number]

    def _values(self, numbers: Sequence[int]) -> Values:
        if len(numbers) % 4:
            raise ValueError(len(numbers))
        return tuple(
            (self._string(numbers[at]), self._value(numbers[at + 1], numbers[at + 2], numbers[at + 3]))
            for at in range(0, len(numbers), 4)
        )

    def _value(self, kind: int, text: int, identity: int) -> Value:
        value = self.values.get((kind, text, identity))
        if value is None:
            value = self.values[kind, text, identity] = Value(self._string(kind), self._string(text), identity)
        return value

    def _code(self, numbers: Sequence[int]) -> None:
        number, file, name, line = numbers
        self.codes[number] = self._string(file), self._string(name), line

    def _thread(self, numbers: Sequence[int]) -> None:
        number, name = numbers
        self.threads[number] = ThreadRecording(self._string(name))

    def _enter(self, numbers: Sequence[int]) -> None:
        number, code, thread, caller, *arguments = numbers
        file, function, line = self.codes[code]
        activation = Activation(file, function, line, self._values(arguments))
        self.activations[number] = activation
        (self.executions[caller].calls if caller else self.threads[thread].activations).append(activation)

    def _execute(self, numbers: Sequence[int]) -> None:
        number, order, line, has_values, *reads = numbers
        execution = Execution(line, order, self._values(reads), has_values=bool(has_values))
        self.executions[order] = execution
        self.activations[number].executions.append(execution)

    def _writes(self, numbers: Sequence[int]) -> None:
        order, *writes = numbers
        self.executions[order].writes = self._values(writes)

    def _leave(self, numbers: Sequence[int]) -> None:
        number, has_returned, kind, text, identity = numbers
        activation = self.activations[number]
        activation.ended = True
        activation.returned = self._value(kind, text, identity) if has_returned else None

    def _raised(self, numbers: Sequence[int]) -> None:
        order, kind, message = numbers
        self.executions[order].raised = Raised(self._string(kind), self._string(message), False)

    def _handled(self, numbers: Sequence[int]) -> None:
        (order,) = numbers
        execution = self.executions[order]
        if execution.raised is not None:
            execution.raised = replace(execution.raised, handled=True)

    def _communication(self, numbers: Sequence[int]) -> None:
        order, caller, operation, root, peer, tag, kind, count, *rest = numbers
        if not 0 <= count <= len(rest):
            raise ValueError(count)
        communication = Communication(
            self._string(operation),
            order,
            ranks=tuple(rest[:count]),
            root=_present(root),
            peer=_present(peer),
            tag=_present(tag),
            shape=tuple(rest[count:]),
            dtype=self._string(kind),
        )
        self.communications[order] = communication
        self.executions[caller].communications.append(communication)

    def _returned(self, numbers: Sequence[int]) -> None:
        order, error = numbers
        communication = self.communications[order]
        communication.error = self._string(error)
        communication.returned = not communication.error

    def _draw(self, numbers: Sequence[int]) -> None:
        order, *texts = numbers
        generator, before, after = map(self._string, texts)
        execution = self.executions[order]
        execution.draws = (*execution.draws, (generator, before, after))

    def _truncated(self, numbers: Sequence[int]) -> None:
        (number,) = numbers
        self.activations[number].is_truncated = True

    def _problem(self, numbers: Sequence[int]) -> None:
        (text,) = numbers
        self.problems.append(self._string(text))


def numbers_of(body: bytes) -> array[int]:
    """Return the numbers in the body of a record. Raise ValueError if its length is wrong."""
    numbers = array("q")
    numbers.frombytes(body)
    if byteorder == "big":
        numbers.byteswap()
    return numbers


def _present(number: int) -> int | None:
    return None if number == protocol.RECORD_ABSENT else number
