"""The definitions of the names that a rank read."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from nsa_harness.core.recording.recording import Activation, Value
from nsa_harness.core.recording.trace import Trace

_MAX_EVENTS = 300  # uses of one object that are inspected
GENERATOR = "generator:"  # prefix of the name under which the state of a random generator is followed

_Key = TypeVar("_Key", bound=Hashable)


class Definitions:
    """The definitions of names in one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def of(self, execution: int, name: str) -> int | None:
        """Return the last execution that defined the name before it was read here, or None if it is not known."""
        if name.startswith(GENERATOR):
            return self._last(self._draws.get(name.removeprefix(GENERATOR), ()), execution)
        if name.startswith("len("):
            return self.of(execution, name[len("len(") : -1])
        base, _, attribute = name.rpartition(".")
        identity = self.value(execution, base).identity if base and name[-1] != "]" else 0
        if (found := self._last(self._attributes.get((identity, attribute), ()), execution)) is not None:
            return found
        if (found := self._local(execution, name)) is not None:
            return found
        if name[-1] == "]":
            return self.of(execution, name[: name.rindex("[")])
        if base:
            return self.of(execution, base)
        if self.is_argument(execution, name, None):
            caller = self.trace.caller[self.trace.activation_of[execution]]
            return caller if caller >= 0 else None
        return self._outside(execution, name)

    def value(self, execution: int, name: str) -> Value:
        """Return the value of the name where it was read. A value that is not known has no type."""
        recorded = self.trace.executions[execution]
        for values in (recorded.reads, recorded.writes, self._activation(execution).arguments):
            for other, value in values:
                if other == name:
                    return value
        return Value("", "")

    def is_object(self, execution: int, name: str) -> bool:
        return not name.startswith(GENERATOR) and bool(self.value(execution, name).identity)

    def is_argument(self, execution: int, name: str, caller: int | None) -> bool:
        """Return whether the name is an argument of the function, which was called in the execution `caller`."""
        index = self.trace.activation_of[execution]
        if caller is not None and self.trace.caller[index] != caller:
            return False
        return any(other == name.split(".")[0] for other, _ in self._activation(execution).arguments)

    def argument(self, execution: int, name: str) -> Value | None:
        return dict(self._activation(execution).arguments).get(name)

    def events(self, identity: int, before: int) -> Iterator[tuple[int, Value, bool]]:
        """Yield the uses of an object before an execution, latest first, up to the one that made it or named it."""
        uses = self._uses.get(identity, [])
        index = bisect_left(uses, self._order(before), key=self._order)
        for execution in reversed(uses[max(0, index - _MAX_EVENTS) : index]):
            if not self.trace.is_visible(execution, before):
                continue
            if (value := self.content(execution, identity, is_write=True)) is not None:
                yield execution, value, True
                return
            if (value := self.content(execution, identity, is_write=False)) is not None:
                yield execution, value, False

    def content(self, execution: int, identity: int, *, is_write: bool) -> Value | None:
        recorded = self.trace.executions[execution]
        return next(
            (v for _, v in (recorded.writes if is_write else recorded.reads) if v.identity == identity),
            None,
        )

    def _activation(self, execution: int) -> Activation:
        return self.trace.activations[self.trace.activation_of[execution]]

    def _local(self, execution: int, name: str) -> int | None:
        return self._last(self._locals.get((self.trace.activation_of[execution], name), ()), execution)

    def _last(self, definitions: Sequence[int], execution: int) -> int | None:
        """Return the last of the definitions that had ended before the execution, or None if there is none."""
        order = self.trace.executions[execution].order
        for index in range(bisect_left(definitions, order, key=self._order) - 1, -1, -1):
            definition = definitions[index]
            if not definition <= execution < self.trace.end_of(definition) and self.trace.is_visible(
                definition, execution
            ):
                return definition
        return None

    def _order(self, execution: int) -> int:
        """Return the number of the execution in the order of time, which generators and threads can change."""
        return self.trace.executions[execution].order

    @cached_property
    def _locals(self) -> dict[tuple[int, str], list[int]]:
        return self._index(
            ((self.trace.activation_of[number], name), number)
            for number, execution in enumerate(self.trace.executions)
            for name, _ in execution.writes
        )

    def _outside(self, execution: int, name: str) -> int | None:
        """Return the last definition in an enclosing function or at the top level of the file."""
        activation = self._activation(execution)
        found = self._last(self._globals.get((activation.file, name), ()), execution)
        if found is None and "." in name:
            return self._outside(execution, name.rpartition(".")[0])
        return found

    def _index(self, items: Iterable[tuple[_Key, int]]) -> dict[_Key, list[int]]:
        """Return the executions of each key in the order of time. The items come in the order of executions."""
        found: defaultdict[_Key, list[int]] = defaultdict(list)
        for key, number in items:
            if not found[key] or found[key][-1] != number:
                found[key].append(number)
        for numbers in found.values():
            numbers.sort(key=self._order)
        return dict(found)

    @cached_property
    def _draws(self) -> dict[str, list[int]]:
        return self._index(
            (generator, number)
            for number, execution in enumerate(self.trace.executions)
            for generator, _, _ in execution.draws
        )

    @cached_property
    def _globals(self) -> dict[tuple[str, str], list[int]]:
        return self._index(
            ((self._activation(number).file, name), number)
            for number, execution in enumerate(self.trace.executions)
            for name, _ in execution.writes
            if "." not in name
        )

    @cached_property
    def _attributes(self) -> dict[tuple[int, str], list[int]]:
        found = []
        for number, execution in enumerate(self.trace.executions):
            for name, _ in execution.writes:
                base, _, attribute = name.rpartition(".")
                if base and (identity := self.value(number, base).identity):
                    found.append(((identity, attribute), number))
        return self._index(found)

    @cached_property
    def _uses(self) -> dict[int, list[int]]:
        return self._index(
            (value.identity, number)
            for number, execution in enumerate(self.trace.executions)
            for values in (execution.reads, execution.writes)
            for _, value in values
            if value.identity
        )
