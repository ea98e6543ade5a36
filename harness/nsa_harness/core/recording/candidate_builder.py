"""Build candidates from executions, and from the definitions that a slice has found."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nsa_harness.core.recording.alignment import Alignment, Row
from nsa_harness.core.recording.clues import Clue, Named
from nsa_harness.core.recording.explanation import Candidate, OriginKind
from nsa_harness.core.recording.origin import changes_of_files, is_chosen_by_rank, is_shard
from nsa_harness.core.recording.provability import MADE_OF_DATA, OF_RANK, Provability, uses, values_of
from nsa_harness.core.recording.slicing import Pair, Slicer, Step
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Coverage, Trace
from nsa_harness.core.report import Place

_SOURCES = (OriginKind.CLOCK, OriginKind.HASH_ORDER, OriginKind.RESTORED_STATE, OriginKind.OTHER_RANKS_FILE)


@dataclass
class CandidateBuilder:
    """A builder of candidates from the traces of a run."""

    alignment: Alignment
    statements: Statements

    @property
    def traces(self) -> Sequence[Trace]:
        return self.alignment.traces

    @cached_property
    def facts(self) -> Provability:
        return Provability(self.alignment, self.statements)

    @cached_property
    def coverage(self) -> Coverage:
        return Coverage(self.traces)

    def has_ended(self, trace: Trace) -> bool:
        own = trace.roots[: trace.threads]
        return all(trace.activations[activation].ended for _, roots in own for activation in roots)

    def outer_pairs(self) -> list[Pair]:
        """Return the pairs of the first trace with the second and with the last one."""
        return [(0, other) for other in dict.fromkeys((1, len(self.traces) - 1))]

    def child_of(self, number: int, execution: int) -> str:
        """Return the name of the child process in which the rank executed this, or "" if it was the rank itself."""
        trace = self.traces[number]
        return trace.process[trace.activation_of[execution]]

    def of_steps(
        self, steps: Sequence[Step], pair: Pair, ranks: tuple[int, ...], *, is_loop: bool = False
    ) -> Iterator[Named]:
        """Yield the definitions of a slice. `is_loop`: the slice explains how often the ranks went round a loop."""
        places: dict[Place, Step] = {}
        extra: dict[Place, Step] = {}
        for step in steps:
            if not step.is_update and not self._only_returns(step, pair):
                places.setdefault(self.facts.place_of(step, pair), step)
                if step.is_leak:
                    extra.setdefault(self.facts.place_of(step, pair), step)
        found, steps, leaks = steps, tuple(places.values()), [*extra.values()]
        kinds = {step: self.facts.kind(step, pair) for step in steps}
        names = {step: step.name for step in steps}
        for step in steps:
            if kinds[step] is OriginKind.UNKNOWN and (name := self._own_data(step, pair)) is not None:
                kinds[step], names[step] = OriginKind.MISSING_REDUCTION, name
        kinds |= {step: self.facts.kind(step, pair) for step in leaks}
        names |= {step: step.name for step in leaks}
        shards = [
            step
            for step in steps
            if is_loop
            and kinds[step] is OriginKind.RANK
            and is_shard(step, self.traces, pair, self.facts.statement_of(step, pair))
        ]
        chosen = [step for step in steps if is_chosen_by_rank(step, self.facts.statement_of(step, pair))]
        sources = [
            s for s in steps if kinds[s] in _SOURCES and not any(o.previous is s and o.is_parting for o in found)
        ]
        leaks.sort(key=lambda step: (not self.facts.is_own_leak(step, pair), not self.facts.is_changed(step, pair)))
        near_leaks = [step for step in leaks[:1] if step.distance < 2 or self.facts.is_own_leak(step, pair)]
        drifts = [step for step in steps if step.is_origin and kinds[step] is OriginKind.RANDOM]
        nearest = [step for step in steps if kinds[step] not in OF_RANK and not step.is_object]
        origins = [step for step in nearest if step.is_origin]
        choices = [s for s in steps if s.is_parting and isinstance(self.facts.statement_of(s, pair), ast.If | ast.Try)]
        own = [step for step in steps if kinds[step] in OF_RANK and not step.is_object]
        for clue, made in (
            (Clue.LEAK, near_leaks),
            (Clue.SHARD, shards[-1:]),
            (Clue.ROLE_DEFINES, chosen[:1]),
            (Clue.SOURCE, sources[:1]),
            (Clue.NEAREST, nearest[:1]),
            (Clue.NEAR, (*nearest[1:4], *choices[:1])),
            (Clue.OWN_NUMBER, (*drifts[:1], *origins[:2], *own[:1])),
        ):
            for step in made:
                candidate = replace(self.of_step(step, kinds[step], pair, ranks), name=names[step])
                is_data = kinds[step] in (*MADE_OF_DATA, OriginKind.RANDOM)
                is_effect = is_data and self.facts.is_effect(step, found, pair)
                yield clue, replace(candidate, is_provable=False) if is_effect else candidate
        for step in leaks[:1]:
            side, execution = step.execution
            if (call := self.coverage.extra_call(pair[side], execution)) is not None:
                trace = self.traces[pair[side]]
                within = {trace.activation_of[e] for e in (execution, *trace.outer(execution))}
                called = next(activation for activation in trace.calls[call] if activation in within)
                candidate = self.candidate(pair[side], call, OriginKind.LEAK, ranks)
                line = self.statements.line_of_call(candidate.place, trace.activations[called].function)
                yield Clue.LEAK_CALLER, replace(candidate, place=replace(candidate.place, line=line))
        files = (OriginKind.FILE, OriginKind.OTHER_RANKS_FILE, OriginKind.RESTORED_STATE)
        for step in (step for step in steps if kinds[step] in files):
            readers = [
                self.traces[number].executions[execution]
                for number, execution in zip(pair, step.executions, strict=True)
                if execution is not None
            ]
            for number, change in changes_of_files(readers, self.traces, self.statements):
                rank = self.traces[number].rank
                yield Clue.FILE_CHANGED, self.candidate(number, change, OriginKind.OTHER_RANKS_FILE, (rank,))

    def _own_data(self, step: Step, pair: Pair) -> str | None:
        """Return the number by which a statement decides or that it returns, "" if tensors decide, or None."""
        first, second = step.executions
        if step.name or first is None or second is None:
            return None
        statement = self.facts.statement_of(step, pair)
        if not isinstance(statement, ast.If | ast.Return):
            return None
        if (values := self.facts.decisive_number([step], pair)) is not None:
            return values.name
        names = Slicer(self.alignment, pair).inputs((first, second))
        reads = dict(self.traces[pair[0]].executions[first].reads)
        is_by_tensors = names and all(name in reads and reads[name].type == "Tensor" for name in names)
        return "" if is_by_tensors and isinstance(statement, ast.If) else None

    def _only_returns(self, step: Step, pair: Pair) -> bool:
        """Return whether the step is a `return` of a name within the program, where nothing is decided."""
        match self.facts.statement_of(step, pair):
            case ast.Return(value=ast.Name() | ast.Constant() | None):
                return step.distance > 0
        return False

    def of_step(self, step: Step, kind: OriginKind, pair: Pair, ranks: tuple[int, ...]) -> Candidate:
        side, execution = step.execution
        trace = self.traces[pair[side]]
        if step.is_leak and trace.rank not in ranks:  # it is the other side that makes the extra call
            ranks = tuple(sorted(other.rank for other in self.traces if other.rank not in ranks))
        caller = self._caller(step, pair) if step.is_leak else None
        row = self.alignment.row_of[pair[side]][execution]
        chain: list[tuple[Place, str]] = []
        for follower in (step, *uses(step)):
            if (link := (self.facts.place_of(follower, pair), follower.name)) not in chain[-1:]:
                chain.append(link)
        candidate = self.candidate(
            pair[side],
            execution,
            kind,
            ranks,
            name=step.name,
            row=self.alignment.rows[row] if row >= 0 else {pair[side]: execution},
            chain=tuple(chain[:12]),
            caller=None if caller is None else trace.place(caller),
        )
        return replace(candidate, is_provable=self.facts.is_provable(step, kind, pair))

    def _caller(self, step: Step, pair: Pair) -> int | None:
        side, execution = step.execution
        parting = self.facts.slicer(pair).parting_before(side, execution)
        if (call := self.coverage.extra_call(pair[side], execution)) is not None:
            return call
        return None if parting is None or parting[1] == execution else parting[1]

    def ranks_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.traces[number].rank for number in numbers))

    def candidate(
        self,
        number: int,
        execution: int,
        kind: OriginKind,
        ranks: tuple[int, ...],
        *,
        name: str = "",
        row: Row | None = None,
        chain: tuple[tuple[Place, str], ...] = (),
        caller: Place | None = None,
    ) -> Candidate:
        trace = self.traces[number]
        return Candidate(
            place=trace.place(execution),
            kind=kind,
            ranks=ranks,
            name=name,
            occurrence=trace.occurrence[execution],
            values=values_of(self.traces, row or {number: execution}),
            chain=chain,
            caller=caller,
            is_provable=False,
        )
