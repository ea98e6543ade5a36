"""Define the recording of a rank: the statements that it executed, with their values and communication.

A recording is a tree. Each call of a user function is an activation, which holds the executions of its statements in
order. An execution holds the activations that it started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_SIZE = re.compile(r"(?:\w+ )?(\d+ items|\[[\d, ]*\])")  # such as "int64 [8, 4] crc 1f2e3d4c" or "3 items crc 1f2e3d4c"


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the program, read without running any of the program's code."""

    type: str  # name of the type: "int", "Tensor", "EarlyStopper"
    text: str  # "3", "'adam'", "float32 [8, 4] crc 1f2e3d4c"; "" if the value cannot be read or compared
    identity: int = 0  # id() of a mutable object, which is comparable within one process only; otherwise 0


Values = tuple[tuple[str, Value], ...]  # by name: "x", "self.bad", "stopper.patience"


@dataclass(slots=True)
class Communication:
    """One call of an operation that communicates with other ranks, or that runs such operations."""

    operation: str  # "all_reduce", "send", "backward", "no_sync"
    order: int  # its number among all executions and communications of the process
    ranks: tuple[int, ...] = ()  # global ranks of the process group; empty if unknown
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    returned: bool = False  # False: the rank was still in this call when the recording ended
    error: str = ""  # type of the exception that left the call


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in an activation."""

    type: str
    message: str
    handled: bool  # a handler in this activation caught the exception


@dataclass(slots=True)
class Execution:
    """One execution of a statement. For a compound statement, it is the execution of its header."""

    line: int  # first line of the statement
    order: int  # its number among all executions and communications of the process
    reads: Values = ()  # values of the names that the statement uses, before it runs
    writes: Values = ()  # values of the names that the statement assigns, after it ran
    calls: list[Activation] = field(default_factory=list)  # user functions that the statement called
    communications: list[Communication] = field(default_factory=list)
    draws: tuple[tuple[str, str, str], ...] = ()  # generator ("torch", "random", "numpy"), state before, state after
    raised: Raised | None = None
    has_values: bool = True  # False: this statement ran so often that its values are no longer recorded


@dataclass(slots=True)
class Activation:
    """One call of a user function, or one execution of a module's top level."""

    file: str  # absolute path
    function: str  # qualified name; "<module>" for the top level of a module
    first_line: int
    arguments: Values = ()
    executions: list[Execution] = field(default_factory=list)
    returned: Value | None = None  # None if the activation ended by an exception or had not ended
    ended: bool = False  # False: the activation was still running when the recording ended
    is_truncated: bool = False  # some executions were not recorded, because there were too many


@dataclass(slots=True)
class ThreadRecording:
    """The outermost activations of user code in one thread, in the order in which they began."""

    name: str  # "MainThread"
    activations: list[Activation] = field(default_factory=list)


@dataclass(slots=True)
class RankRecording:
    """The recording of one rank."""

    rank: int
    world_size: int
    python: tuple[int, int]
    threads: list[ThreadRecording] = field(default_factory=list)  # the main thread is first
    # The threads of child processes, such as "DataLoader worker 0", in the order in which the processes began.
    children: list[ThreadRecording] = field(default_factory=list)
    problems: tuple[str, ...] = ()  # parts of the recording that are missing, and why


def differs(value: Value, other: Value) -> bool:
    """Return whether two values are known to be different."""
    return (value.type, value.text) != (other.type, other.text) and bool(value.text or other.text)


def has_size(value: Value) -> bool:
    """Return whether the number of items, or the shape, of a value is known."""
    return _SIZE.match(value.text) is not None


def sizes_differ(value: Value, other: Value) -> bool:
    """Return whether two values are known to have different numbers of items, or different shapes."""
    ours, theirs = _SIZE.match(value.text), _SIZE.match(other.text)
    return ours is not None and theirs is not None and ours.group(1) != theirs.group(1)


def written_differently(ours: Execution, theirs: Execution) -> str:
    """Return the first name to which both executions assigned different values, or "" if there is none."""
    others = dict(theirs.writes)
    return next((name for name, value in ours.writes if name in others and differs(value, others[name])), "")


def executions_of(recording: RankRecording) -> Iterator[tuple[Activation, Execution]]:
    """Yield every execution of a recording with its activation, each activation in the order of time."""
    remaining = [activation for thread in recording.threads for activation in thread.activations]
    while remaining:
        activation = remaining.pop()
        for execution in activation.executions:
            remaining += execution.calls
            yield activation, execution
