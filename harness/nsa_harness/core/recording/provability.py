"""Judge whether a difference between the ranks can have begun at a step of a slice, or at a candidate."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from nsa_harness.core.recording.alignment import Alignment, Row
from nsa_harness.core.recording.explanation import Candidate, OriginKind, RankValues
from nsa_harness.core.recording.origin import is_number, kind_of, kind_of_text
from nsa_harness.core.recording.recording import Value, differs
from nsa_harness.core.recording.slicing import Pair, Slicer, Step
from nsa_harness.core.recording.source_statements import statement_at
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Trace
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import names_rank

OF_RANK = (OriginKind.RANK, OriginKind.ENVIRONMENT)  # differences that ranks have by their number
MADE_OF_DATA = (OriginKind.RANK, OriginKind.MISSING_REDUCTION)  # the origin only if only data of the rank came in
_PROVABLE = (OriginKind.RANDOM, OriginKind.HASH_ORDER, OriginKind.CLOCK, OriginKind.ENVIRONMENT)
_OWN_DATA = (OriginKind.RANK, OriginKind.ENVIRONMENT, OriginKind.MISSING_REDUCTION, OriginKind.UNKNOWN)
_COUNTERS = ("int", "float", "bool", "str", "Random", "RandomState", "Generator")  # types of values that calls advance
_LOGS = re.compile(r"\bisEnabledFor\(|\bgetEffectiveLevel\(")  # a rank that logs more than the others is no fault


class Provability:
    """The steps of slices: their places and kinds, and whether an experiment there can prove the origin."""

    def __init__(self, alignment: Alignment, statements: Statements) -> None:
        self._alignment = alignment
        self._traces = alignment.traces
        self._statements = statements
        self._slicers: dict[Pair, Slicer] = {}

    def slicer(self, pair: Pair) -> Slicer:
        """Return the slicer of two traces, which is kept."""
        if pair not in self._slicers:
            self._slicers[pair] = Slicer(self._alignment, pair)
        return self._slicers[pair]

    def kind(self, step: Step, pair: Pair) -> OriginKind:
        return kind_of(step, self._traces, pair, self._statements)

    def place_of(self, step: Step, pair: Pair) -> Place:
        side, execution = step.execution
        return self._traces[pair[side]].place(execution)

    def statement_of(self, step: Step, pair: Pair) -> ast.AST | None:
        return self._statements.at(self.place_of(step, pair))

    def decisive_number(self, steps: Sequence[Step], pair: Pair) -> RankValues | None:
        """Return the values of the nearest number that differs between the ranks and is not the rank, or None."""
        ranks = [str(self._traces[number].rank) for number in pair]
        for step in steps:
            first, second = step.executions
            if first is None or second is None or step.is_object:
                continue
            run = [self._traces[number].executions[at] for number, at in zip(pair, (first, second), strict=True)]
            own, other = ({**dict(execution.reads), **dict(execution.writes)} for execution in run)
            for name, value in own.items():
                texts = [value.text, other[name].text] if name in other else ["", ""]
                is_scalar = is_number(value) and all(texts) and not any("[" in text for text in texts)
                if is_scalar and texts[0] != texts[1] and texts != ranks:
                    by_rank = zip((self._traces[number].rank for number in pair), texts, strict=True)
                    return RankValues(name=name, values=tuple(sorted(by_rank)))
        return None

    def is_effect(self, step: Step, steps: Sequence[Step], pair: Pair) -> bool:
        """Return whether the difference in a step can come from more than the number and the data of a rank.

        `steps`: the whole slice. A number that differs before the step, or an earlier difference of another kind, makes
        the step an effect, unless the difference came through a tensor: tensors are data of the rank, which rightly
        differ. A random draw is an effect only after a leak. What depends on the number of the rank is data of the rank
        unless only numbers lead from there to the division.
        """
        place, kind = self.place_of(step, pair), self.kind(step, pair)
        if kind is OriginKind.RANK and any(at.name and self.decisive_number([at], pair) is None for at in uses(step)):
            return True
        for other in steps:
            if other.executions == step.executions or not any(at.executions == step.executions for at in uses(other)):
                continue
            path = takewhile(lambda at: at.executions != step.executions, uses(other))
            if other.is_leak or (kind is not OriginKind.RANDOM and self._is_before(other, path, place, pair)):
                return True
        return False

    def is_decided_by_data(self, row: Row, steps: Sequence[Step], pair: Pair) -> bool:
        """Return whether the number that differs in a division comes from nothing but the data of the rank."""
        trace, execution = self._traces[pair[0]], row[pair[0]]
        place = trace.place(execution)
        is_own = not any(other.is_leak or self._is_before(other, uses(other), place, pair) for other in steps)
        return is_own and not self._communicates(trace, execution)

    def _is_before(self, other: Step, path: Iterable[Step], place: Place, pair: Pair) -> bool:
        """Return whether a difference began in `other`, from which a path of steps leads to a place."""
        if any(self._is_tensor(step, pair) for step in (other, *path)):
            return False
        is_near = self._statements.near(place, self.place_of(other, pair))
        is_number = not is_near and self.decisive_number([other], pair) is not None
        return is_number or self.kind(other, pair) not in _OWN_DATA

    def _is_tensor(self, step: Step, pair: Pair) -> bool:
        """Return whether a step makes a tensor of several elements, as it is assigned or as the next step reads it."""
        side, execution = step.execution
        values = dict(self._traces[pair[side]].executions[execution].writes)
        if step.previous is not None:
            side, execution = step.previous.execution
            values |= dict(self._traces[pair[side]].executions[execution].reads)
        value = values.get(step.name)
        return value is not None and value.type == "Tensor" and "[" in value.text

    def _communicates(self, trace: Trace, execution: int) -> bool:
        return any(execution == owner or execution in trace.outer(owner) for owner in trace.owners)

    def communicates(self, number: int, execution: int) -> bool:
        """Return whether an execution of a trace, or a function that it calls, communicates with other ranks."""
        return self._communicates(self._traces[number], execution)

    def is_own_leak(self, step: Step, pair: Pair) -> bool:
        """Return whether only the number of the rank led to the extra call of a leak."""
        return step.is_leak and self.is_provable(step, OriginKind.LEAK, pair)

    def is_changed(self, step: Step, pair: Pair) -> bool:
        """Return whether the step assigns the name that it is followed for."""
        side, execution = step.execution
        return any(name == step.name for name, _ in self._traces[pair[side]].executions[execution].writes)

    def is_provable(self, step: Step, kind: OriginKind, pair: Pair) -> bool:
        """Return whether the difference can have begun at this step, so that an experiment there proves the origin.

        An extra call is the origin only if its ranks were sent there by their number, and a value that was not reduced
        only if no communication took part in it.
        """
        side, execution = step.execution
        trace = self._traces[pair[side]]
        if kind in MADE_OF_DATA:
            return not self._communicates(trace, execution)
        if kind is not OriginKind.LEAK:
            return kind in _PROVABLE
        slicer = self.slicer(pair)
        parting = slicer.parting_before(side, execution)
        if parting is None or not self._is_counter(step, pair):
            return False
        header = self._statements.header(trace.place(parting[0][side]))
        if kind_of_text(header) not in (OriginKind.UNKNOWN, *OF_RANK) and not _needs_rank(header):
            return False  # such as a file, which differs for a reason that no value shows
        named = [cause for cause in slicer.slice(parting[0]) if cause.name and not cause.is_object]
        if named:
            # What a rank has registered by its number, such as a list of hooks, may rightly differ.
            return all(self.kind(cause, pair) in OF_RANK or self.is_registry(cause, pair) for cause in named)
        return names_rank(header) or _LOGS.search(header) is not None

    def _is_counter(self, step: Step, pair: Pair) -> bool:
        """Return whether the extra call changed a number, a text, or the state of a random generator."""
        value = self._leaked(step, pair)
        return step.name.startswith("generator:") or value is None or value.type in _COUNTERS

    def is_registry(self, step: Step, pair: Pair) -> bool:
        """Return whether only one rank put something into a container, such as a hook into its list of hooks."""
        return None in step.executions and not self._is_counter(step, pair)

    def _leaked(self, step: Step, pair: Pair) -> Value | None:
        side, execution = step.execution
        recorded = self._traces[pair[side]].executions[execution]
        return next((value for name, value in (*recorded.writes, *recorded.reads) if name == step.name), None)


def _needs_rank(header: str) -> bool:
    """Return whether a condition can only be true on the ranks with some number, whatever else it tests."""
    try:
        test = ast.parse(header, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else []
    return bool(parts) and isinstance(parts[0], ast.Compare) and names_rank(ast.unparse(parts[0]))


def uses(step: Step) -> Iterator[Step]:
    """Yield the steps from a definition to the division."""
    follower = step.previous
    while follower is not None:
        yield follower
        follower = follower.previous


def values_of(traces: Sequence[Trace], row: Row) -> tuple[RankValues, ...]:
    """Return the values that the statement read and assigned, those that differ first."""
    names: dict[str, dict[int, Value]] = {}
    for number, execution in row.items():
        recorded = traces[number].executions[execution]
        for name, value in (*recorded.reads, *recorded.writes):
            if value.text:
                names.setdefault(name, {})[number] = value
    ordered = sorted(names.items(), key=lambda item: not _differ(item[1]))
    return tuple(
        RankValues(
            name=name, values=tuple(sorted((traces[number].rank, value.text) for number, value in values.items()))
        )
        for name, values in ordered[:8]
    )


def _differ(values: dict[int, Value]) -> bool:
    first, *others = values.values()
    return any(differs(first, other) for other in others)


def is_result(place: Place, sources: Mapping[str, str]) -> bool:
    """Return whether a statement takes over the result of one of the program's functions, in which it was made."""
    statement = statement_at(place, sources)
    node = statement.node if statement is not None else None
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    called = value.func if isinstance(value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return bool(name) and any(re.search(rf"\bdef {re.escape(name)}\(", text) for text in sources.values())


def counts_elements(candidate: Candidate, sources: Mapping[str, str]) -> bool:
    """Return whether a number comes from the size of parameters, so that it is no data of the rank."""
    line = candidate.place.line or 0
    lines = sources.get(candidate.place.file or "", "").splitlines()[max(0, line - 3) : line]
    return candidate.kind is OriginKind.MISSING_REDUCTION and ".numel(" in " ".join(lines)


def names_own_file(candidate: Candidate) -> bool:
    """Return whether a value only names the file of a rank. What the file contains may differ for another reason."""
    texts = [text for value in candidate.values for _, text in value.values if value.name == candidate.name]
    return candidate.kind is OriginKind.RANK and any("/" in text for text in texts)
