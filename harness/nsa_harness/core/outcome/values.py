"""Choose the values that a report shows: those that decide what the ranks do, and those that differ between ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from nsa_harness.core.evidence.evidence import Source
from nsa_harness.core.evidence.frame_values import ProcessValues, frames_of
from nsa_harness.core.report import NamedValue, Outcome, Place, RanksValue, Status
from nsa_harness.core.source_code.deciding import Deciding, deciding_expressions, definitions
from nsa_harness.core.source_code.program_source import ProgramSource

_MAX_VALUES = 24
_MAX_OTHERS = 8  # values that differ and do not decide
_CONTENT = re.compile(r"^(\w+ \[[\d, ]*\]|\d+ items) crc \w+$")  # of a tensor or a container, whose data differ anyway
_SCALAR = re.compile(r"-?\d{1,19}|True|False|None|'[^']*'")  # in general, floats differ between ranks

Function = tuple[str, str]  # file and name
Texts = Mapping[int, str]  # by rank


@dataclass(kw_only=True)
class _Table:
    """The values of all ranks, by the function in which they were read and by name."""

    functions: dict[Function, dict[str, dict[int, str]]] = field(default_factory=dict)

    def add(self, values: ProcessValues) -> None:
        """Add the values of one rank. Of several frames of a function, the first one counts."""
        seen: set[Function] = set()
        for frame in frames_of(values):
            function = frame.file, frame.function
            if function in seen:
                continue
            seen.add(function)
            names = self.functions.setdefault(function, {})
            for name, text in frame.values:
                names.setdefault(name, {})[values.rank] = text

    def texts(self, function: Function, *, with_contents: bool = False) -> dict[str, dict[int, str]]:
        """Return the values of a function by name, in which tensors of one shape differ only `with_contents`."""
        values = self.functions.get(function, {})
        if not with_contents:
            values = {
                name: {rank: content[1] if (content := _CONTENT.match(text)) else text for rank, text in texts.items()}
                for name, texts in values.items()
            }
        return {
            name: texts
            for name, texts in values.items()
            if len(texts) < 2
            or (
                any(text != str(rank) for rank, text in texts.items())
                and not (differs(values.get(f"len({name})", {})) and all(" items" in text for text in texts.values()))
            )
        }


def shown_values(
    outcome: Outcome, sources: Sequence[Source], ranks: Sequence[ProcessValues], *, with_definitions: bool = False
) -> tuple[NamedValue, ...]:
    """Return the values to show, those that decide first.

    Shown are the names in the condition, loop or call that the cause is about. Of other conditions, loops and calls on
    the stacks, and of other variables there, only names are shown whose values differ between ranks.

    `with_definitions`: the job cannot be launched again, so also show the names in conditions and loops around the
    lines of the cause and of the stacks whose values are unknown, and the lines that each name gets its value from.
    """
    if outcome.verdict.status in (Status.PASS, Status.SKIP) or not (ranks or with_definitions):
        return ()
    program, table = ProgramSource(tuple(sources)), _Table()
    for values in sorted(ranks, key=lambda values: values.rank):
        table.add(values)
    of_cause = list(_expressions(program, _places_of_cause(outcome)))
    # Each group has the names of one expression.
    groups: list[list[NamedValue]] = []
    chosen: set[object] = set()
    for deciding in (*of_cause, *_expressions(program, _places_on_stacks(outcome, ranks))):
        function = deciding.file, deciding.function
        known = deciding.choose(table.texts(function, with_contents=deciding.is_loop))
        if with_definitions and not ranks:
            known = {name: {} for name in deciding.names if not name.startswith("len(")}
        group = [
            _named_value(name, function, deciding.line, texts)
            for name, texts in known.items()
            if differs(texts) or (name in deciding.names and not deciding.is_call)
        ]
        group = [value for value in group if _key(value) not in chosen]
        decides_cause = deciding in of_cause and not (deciding.is_call or deciding.is_around)
        decides_cause |= with_definitions and not ranks
        if decides_cause or any(len(value.values) > 1 for value in group):
            groups.append(group)
            chosen |= set(map(_key, group))
    groups.sort(key=lambda group: not any(_shows_difference(value, len(ranks)) for value in group))
    differing = (
        _named_value(name, function, None, texts)
        for function in table.functions
        for name, texts in table.texts(function).items()
        if differs(texts) and all(_SCALAR.fullmatch(text) for text in texts.values())
    )
    others: dict[object, NamedValue] = {}
    for value in differing:
        if _key(value) not in chosen:
            others.setdefault(_key(value), value)
    shown = (*chain.from_iterable(groups), *islice(others.values(), _MAX_OTHERS))[:_MAX_VALUES]
    if not with_definitions:
        return shown
    lines = [value.line and definitions(program, value.file, value.line, value.name) for value in shown]
    return tuple(replace(value, definitions=of_value or ()) for value, of_value in zip(shown, lines, strict=True))


def _key(value: NamedValue) -> object:
    """Return what is equal for two names of one value, such as `self.bad` in a method and `stopper.bad` outside."""
    return value.name.rpartition(".")[2] if value.values else (value.name, value.file, value.line), value.values


def _shows_difference(value: NamedValue, ranks: int) -> bool:
    """Return whether ranks have different values, or only some of them have any."""
    return len(value.values) > 1 or sum(len(equal.ranks) for equal in value.values) < ranks


def differs(texts: Texts) -> bool:
    return len(set(texts.values())) > 1


def _named_value(name: str, function: Function, line: int | None, texts: Texts) -> NamedValue:
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return NamedValue(
        name=name,
        file=function[0],
        function=function[1],
        line=line,
        decides=line is not None,
        values=tuple(RanksValue(ranks=tuple(equal), value=text) for text, equal in ranks.items()),
    )


def _expressions(program: ProgramSource, places: Iterable[Place]) -> Iterator[Deciding]:
    seen: set[tuple[str | None, int | None]] = set()
    for place in places:
        if (place.file, place.line) not in seen:
            seen.add((place.file, place.line))
            yield from deciding_expressions(program, place)


def _places_of_cause(outcome: Outcome) -> Iterator[Place]:
    """Yield the line that the cause is about, and further lines in its facts."""
    if outcome.culprit is not None and outcome.culprit.place is not None:
        yield outcome.culprit.place
    for finding in outcome.findings[:1]:
        yield from _places_in((finding.place, finding.facts))


def _places_in(value: object) -> Iterator[Place]:
    if isinstance(value, Place):
        yield value
    elif isinstance(value, Mapping):
        if isinstance(value.get("file"), str) and isinstance(value.get("line"), int):
            yield Place(file=value["file"], line=value["line"])
        for item in value.values():
            yield from _places_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _places_in(item)


def _places_on_stacks(outcome: Outcome, ranks: Sequence[ProcessValues]) -> Iterator[Place]:
    """Yield the lines that the ranks execute, those of the culprits and the innermost first."""
    culprits = outcome.culprit.ranks if outcome.culprit else ()
    for values in sorted(ranks, key=lambda values: values.rank not in culprits):
        for frame in frames_of(values):
            yield Place(file=frame.file, line=frame.line, function=frame.function)
    if not ranks:
        yield from chain.from_iterable(stack.frames for stack in outcome.stacks)
