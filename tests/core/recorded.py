"""Builders for recordings of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

FILE = "/job/train.py"


@dataclass(frozen=True)
class Thing:
    """An object of the program with its identity, and its content if it can be read."""

    identity: int
    type: str = "Thing"
    text: str = ""


def values(items: Mapping[str, object]) -> Values:
    return tuple((name, _value(item)) for name, item in items.items())


def _value(item: object) -> Value:
    if isinstance(item, Thing):
        return Value(item.type, item.text, item.identity)
    return Value(type(item).__name__, repr(item))


def op(
    operation: str = "all_reduce",
    *,
    ranks: Sequence[int] = (),
    returned: bool = True,
    peer: int | None = None,
    tag: int | None = None,
    root: int | None = None,
    shape: Sequence[int] = (4,),
    error: str = "",
) -> Communication:
    return Communication(
        operation, 0, tuple(ranks), root, peer, tag, tuple(shape), "float32", returned=returned, error=error
    )


def at(
    line: int,
    *parts: Communication | Activation,
    reads: Mapping[str, object] | None = None,
    writes: Mapping[str, object] | None = None,
    draws: Sequence[tuple[str, str, str]] = (),
    raised: str = "",
    handled: bool = False,
) -> Execution:
    """Return an execution of the statement on a line, with the calls and the communication that it made."""
    return Execution(
        line,
        0,
        values(reads or {}),
        values(writes or {}),
        [part for part in parts if isinstance(part, Activation)],
        [part for part in parts if isinstance(part, Communication)],
        tuple(draws),
        Raised(raised.partition(":")[0], raised, handled) if raised else None,
    )


def call(
    function: str,
    *executions: Execution,
    first_line: int = 1,
    arguments: Mapping[str, object] | None = None,
    returned: object = None,
    ended: bool = True,
) -> Activation:
    result = Value("NoneType", "None") if returned is None else _value(returned)
    raised = executions[-1].raised if executions else None
    is_result = ended and (raised is None or raised.handled)
    return Activation(
        FILE, function, first_line, values(arguments or {}), list(executions), result if is_result else None, ended
    )


def recorded(rank: int, *activations: Activation, world_size: int = 2) -> RankRecording:
    """Return the recording of a rank. The executions and the communication get their numbers."""
    number = 0
    stack: list[Activation | Execution] = list(reversed(activations))
    while stack:
        part = stack.pop()
        if isinstance(part, Activation):
            stack.extend(reversed(part.executions))
            continue
        number += 1
        part.order = number
        for communication in part.communications:
            number += 1
            communication.order = number
        stack.extend(reversed(part.calls))
    return RankRecording(rank, world_size, (3, 11), [ThreadRecording("MainThread", list(activations))])


def main(*executions: Execution, ended: bool = True) -> Activation:
    return call("<module>", *executions, ended=ended)
