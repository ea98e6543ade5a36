"""Rank the source lines that may have to change so that the ranks go the same way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nsa_harness.core.recording.alignment import Alignment, Parting, Row
from nsa_harness.core.recording.clues import Clue, Named, rank
from nsa_harness.core.recording.communications import Shared, left_out, left_out_for
from nsa_harness.core.recording.division import Judged, is_consequence, own_exceptions, raised_by_network
from nsa_harness.core.recording.explanation import Candidate, OriginKind, SilentDifference
from nsa_harness.core.recording.origin import (
    can_show_order,
    changes_of_files,
    early_collections,
    first_use,
    is_chosen_by_rank,
    is_shard,
)
from nsa_harness.core.recording.provability import MADE_OF_DATA, OF_RANK, Provability, uses, values_of
from nsa_harness.core.recording.recording import differs
from nsa_harness.core.recording.slicing import Pair, Slicer, Step, extra_draws, first_differences
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Coverage, Trace
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import names_rank

MOST = 8  # candidates that an explanation lists
_SOURCES = (OriginKind.CLOCK, OriginKind.HASH_ORDER, OriginKind.RESTORED_STATE, OriginKind.OTHER_RANKS_FILE)
_USUAL = (*OF_RANK, OriginKind.CLOCK)  # differences that every healthy run has
_BY_CHANCE = (OriginKind.LEAK, OriginKind.HASH_ORDER)  # the recording may not show how these lead to a failure
_SPINS = 50  # executions of a statement in one call of its function after which a rank goes round in a loop
_OF_ROLE = 4  # most definitions from a condition back to the number of the rank
_WAITS = re.compile(r"\.(get|wait|acquire|join)\(")
_NUMBER = re.compile(r"\b\d{2,}\b")
_LATE = re.compile(r"finished reduction in the prior iteration|mark(?:ed)? (?:a variable |as )?ready", re.IGNORECASE)


@dataclass
class Candidates:
    """The candidates of a run, built from its divisions."""

    alignment: Alignment
    divisions: Sequence[Judged]
    statements: Statements
    silent: SilentDifference | None = None

    @property
    def traces(self) -> Sequence[Trace]:
        return self.alignment.traces

    @cached_property
    def _facts(self) -> Provability:
        return Provability(self.alignment, self.statements)

    @cached_property
    def _coverage(self) -> Coverage:
        return Coverage(self.traces)

    def ranked(self) -> tuple[Candidate, ...]:
        """Return the candidates, most likely first."""
        ranked = rank(self._clues(), self.statements, MOST)
        for candidate in self._by_chance():
            if not any(self.statements.near(candidate.place, other.place) and other.is_provable for other in ranked):
                ranked.append(candidate)
        return tuple(ranked[: MOST + 2])

    def _clues(self) -> Iterator[Named]:
        failed = any(trace.error is not None or own_exceptions(trace) for trace in self.traces)
        if not self.divisions and not failed and all(self._has_ended(trace) for trace in self.traces):
            yield from self._early_collections()
            yield from self._uses_of_difference()
            yield from self._first_differences()
            return
        yield from self._exceptions()
        yield from self._peers_left()
        for judged in self.divisions[:3]:
            if (site := self._raise_site(judged)) is not None:
                yield from ((Clue.HANDLER, site), (Clue.DIVISION, site))
            steps = self.steps(judged) if judged is self.divisions[0] else []
            clue = Clue.DIVISION if site is None else Clue.OPERATION
            yield self._parted(clue, self._at_division(judged, steps), judged.row, judged.pair)
        for judged in self.divisions[:1]:
            is_loop = isinstance(self.statements.at(self._place(judged)), ast.For)
            yield from self._of_steps(self.steps(judged), judged.pair, self._ranks(judged.minority), is_loop=is_loop)
            yield from self._of_operations(judged)
        if any(self._is_role(self._place(judged), judged.row, judged.pair) for judged in self.divisions[:1]):
            yield from self._messages()  # What one of the roles leaves out is more likely wrong than the role.
        yield from self._swallowed()
        yield from self._new_partings()
        yield from self._ran_alone()
        yield from self._at_ends()
        yield from self._new_ways()

    def _has_ended(self, trace: Trace) -> bool:
        own = trace.roots[: trace.threads]
        return all(trace.activations[activation].ended for _, roots in own for activation in roots)

    def _early_collections(self) -> Iterator[Named]:
        """Yield where parameters that differ were made after the others had been collected to be made equal."""
        if self.silent is None:
            return
        trace, is_copy = self.traces[0], self.silent.kind == "unequal copy"
        name = next(iter(self.silent.names), "")
        if self.silent.kind in ("", "optimizer state"):  # DDP averaged some gradients, and others not
            made = zip(trace.communications, trace.owners, strict=True)
            for execution in [owner for one, owner in made if one.operation == "no_sync"][:1]:
                found = self._candidate(0, execution, OriginKind.UNSYNCHRONIZED, ())
                yield Clue.STALE, replace(found, values=())
        for early, late in early_collections(trace, self.statements, self.silent.names, is_copy=is_copy):
            kind = OriginKind.EARLY_COPY if is_copy else OriginKind.STALE_PARAMETERS
            for execution, other in ((early, late), (late, early)) if is_copy else ((late, early), (early, late)):
                found = self._candidate(0, execution, kind, (), name=name, caller=trace.place(other))
                yield Clue.STALE, replace(found, values=())

    def _uses_of_difference(self) -> Iterator[Named]:
        """Yield what made the first value differ that is named like what differs silently, or a learning rate."""
        silent = self.silent or SilentDifference(kind="")
        for pair in self._outer_pairs():
            found = first_use(self.alignment, pair, self.statements, silent)
            if found is not None:
                row, name = found
                ranks = self._ranks(pair[1:])
                kind = OriginKind.MISSING_REDUCTION if silent.kind == "learning rate" else OriginKind.UNKNOWN
                yield Clue.STALE, self._candidate(pair[0], row[pair[0]], kind, ranks, name=name, row=row)
                yield from self._of_steps(self._facts.slicer(pair).slice((row[pair[0]], row[pair[1]])), pair, ranks)

    def _first_differences(self) -> Iterator[Named]:
        """Yield the statements that made the first differences in a run that ended.

        The batches of a loop come last, because every rank has its own.
        """
        data: list[Named] = []
        for pair in self._outer_pairs():
            for step in first_differences(self.alignment, pair):
                kind = self._facts.kind(step, pair)
                if kind not in _USUAL:
                    named = Clue.OWN_NUMBER, self._of_step(step, kind, pair, self._ranks(pair[1:]))
                    if isinstance(self._facts.statement_of(step, pair), ast.For):
                        data.append(named)
                    else:
                        yield named
        yield from ((clue, candidate) for clue, candidate in self._new_partings() if clue is not Clue.ROLE)
        yield from data

    def _by_chance(self) -> Iterator[Candidate]:
        """Yield where the ranks first differed by chance, even if no recorded value leads from there to the failure.

        An experiment changes all hashes at once, so it proves the origin only if there is one.
        """
        for pair in self._outer_pairs():
            steps = [*first_differences(self.alignment, pair), *extra_draws(self.alignment, pair)]
            kinds = [self._facts.kind(step, pair) for step in steps]
            for step, kind in zip(steps, kinds, strict=True):
                if kind in _BY_CHANCE and (
                    kind is not OriginKind.HASH_ORDER or can_show_order(step, self.traces, pair, self.statements)
                ):
                    candidate = self._of_step(step, kind, pair, self._ranks(pair[1:]))
                    is_one = kind is not OriginKind.HASH_ORDER or kinds.count(kind) == 1
                    yield replace(candidate, chain=(), is_provable=candidate.is_provable and is_one)

    def _outer_pairs(self) -> list[Pair]:
        """Return the pairs of the first trace with the second and with the last one."""
        return [(0, other) for other in dict.fromkeys((1, len(self.traces) - 1))]

    # Exceptions.

    def _exceptions(self) -> Iterator[Named]:
        failed = [
            (number, execution) for number, trace in enumerate(self.traces) for execution in own_exceptions(trace)
        ]
        in_children = [one for one in failed if self._child_of(*one)]
        if in_children:  # What its parent raised is the effect.
            failed = [one for one in failed if one in in_children or one[0] not in dict(in_children)]
        ranks = self._ranks({number for number, _ in failed})
        if failed and self._is_late(*failed[0]):
            yield from ((Clue.STEP_BEFORE, candidate) for _, candidate in self._new_partings())
        for number, execution in failed:
            yield Clue.RAISED, self._candidate(number, execution, OriginKind.EXCEPTION, ranks)
            if self._child_of(number, execution):
                yield Clue.CHILD, self._candidate(number, execution, OriginKind.EXCEPTION, ranks)
                continue
            trace = self.traces[number]
            *_, outermost = execution, *trace.outer(execution)
            if trace.activation_of[outermost] not in trace.roots[0][1]:  # The thread could have handled it.
                yield Clue.THREAD, self._candidate(number, outermost, OriginKind.EXCEPTION, ranks)
        places = {self.traces[number].place(execution) for number, execution in failed}
        for number, execution in failed[:1]:
            if len(places) == 1 and len(ranks) == len(self.traces):
                yield from (
                    (Clue.QUOTED, self._candidate(number, e, OriginKind.UNKNOWN, ranks))
                    for e in self._quoted(number, execution)
                )
            row = self.alignment.row_of[number][execution]
            others = [n for n in self.alignment.rows[row] if self.traces[n].rank not in ranks] if row >= 0 else []
            if others:
                pair = (number, others[0])
                steps = self._facts.slicer(pair).slice((execution, self.alignment.rows[row][others[0]]))
                yield from self._of_steps(steps, pair, ranks)

    def _peers_left(self) -> Iterator[Named]:
        """Yield the call in which a rank lost its connection, and which a rank that ended had finished."""
        ended = [n for n, trace in enumerate(self.traces) if self._has_ended(trace) and trace.error is None]
        for number, trace in enumerate(self.traces):
            raising = None if trace.error is None else trace.innermost_raise(trace.error)
            if not ended or raising is None or not raised_by_network(trace, raising):
                continue
            for execution in (raising, *trace.outer(raising)):
                other = self.alignment.counterpart(number, execution, ended[0])
                if other is not None and self.traces[ended[0]].next_line(other) is not None:
                    yield Clue.PEER_LEFT, self._candidate(number, execution, OriginKind.UNKNOWN, (trace.rank,))
                    return

    def _quoted(self, number: int, execution: int) -> Iterator[int]:
        """Yield the executions that made a number which the message of an exception names."""
        trace = self.traces[number]
        raised = trace.executions[execution].raised
        quoted = set(_NUMBER.findall(raised.message)) if raised is not None else set()
        for other in range(execution):
            named = [
                name
                for name, value in trace.executions[other].reads
                if value.text in quoted and "." in name and value.type == "int"
            ]
            if named:
                yield from self._facts.slicer((number, 1 - min(number, 1))).makers(other, named[:1])
                return

    def _child_of(self, number: int, execution: int) -> str:
        """Return the name of the child process in which the rank executed this, or "" if it was the rank itself."""
        trace = self.traces[number]
        return trace.process[trace.activation_of[execution]]

    def _is_late(self, number: int, execution: int) -> bool:
        """Return whether the exception reports what the rank did, or left out, in the step before."""
        raised = self.traces[number].executions[execution].raised
        return raised is not None and _LATE.search(raised.message) is not None

    # Divisions.

    def _parted(self, clue: Clue, candidate: Candidate, row: Row, pair: Pair) -> Named:
        """Return the candidate with the clue, or with the clue of a role if only the number of the rank decides."""
        return Clue.ROLE if self._is_role(candidate.place, row, pair) else clue, candidate

    def _is_role(self, place: Place, row: Row, pair: Pair) -> bool:
        """Return whether a condition, or a call of different functions, only tells ranks from each other by number."""
        steps = self._facts.slicer(pair).slice((row[pair[0]], row[pair[1]]))
        calls = {
            tuple(self.traces[n].function(call) for call in self.traces[n].calls.get(row[n], ())[:1]) for n in pair
        }
        named = [step for step in steps if step.name and not step.is_object]
        if len(calls) > 1 and () not in calls:
            named = [step for step in named if step.distance == 0]
        elif len(named) > _OF_ROLE or not isinstance(self.statements.at(place), ast.If):
            return False
        elif not named:
            return names_rank(self.statements.header(place))
        is_of_rank = all(self._facts.kind(step, pair) in OF_RANK for step in named)
        return is_of_rank and (len(calls) > 1 or self._tells_ranks(row, pair))

    def _tells_ranks(self, row: Row, pair: Pair) -> bool:
        """Return whether a condition reads a rank or a truth value, or always has the same result on a rank."""
        first, second = (dict(self.traces[number].executions[row[number]].reads) for number in pair)
        different = [name for name in first if name in second and differs(first[name], second[name])]
        ranks = [str(self.traces[number].rank) for number in pair]
        if any([first[name].text, second[name].text] == ranks or first[name].type == "bool" for name in different):
            return True
        return all(len(self._coverage.ways[number][self._coverage.line(number, row[number])]) < 2 for number in pair)

    def _place(self, judged: Judged) -> Place:
        return self.traces[judged.pair[0]].place(judged.row[judged.pair[0]])

    def _raise_site(self, judged: Judged) -> Candidate | None:
        """Return the statement that raised the exception which only one rank of the division had."""
        for number in judged.pair:
            trace = self.traces[number]
            raising = trace.innermost_raise(judged.row[number])
            if raising != judged.row[number] and not raised_by_network(trace, raising):
                return self._candidate(number, raising, OriginKind.EXCEPTION, self._ranks(judged.minority))
        return None

    def _messages(self) -> Iterator[Named]:
        """Yield why a message that a rank waits for does not come."""
        by_rank = {trace.rank: number for number, trace in enumerate(self.traces)}
        shared = Shared(self.traces)
        for number, trace in enumerate(self.traces):
            missing = shared.unpaired(trace.communications)
            for awaited in missing[:1]:
                other = by_rank.get(-1 if awaited.peer is None else awaited.peer)
                if other is None or other == number:
                    continue
                owner = trace.owner(awaited)
                for opposite in shared.unpaired(self.traces[other].communications):
                    if opposite.peer == trace.rank and opposite.tag != awaited.tag:
                        pair = (number, other)
                        steps = self._facts.slicer(pair).slice((owner, self.traces[other].owner(opposite)))
                        named = self._of_steps(steps, pair, self._ranks(pair))
                        yield from ((Clue.MESSAGE, candidate) for _, candidate in named)
                        break
                omitted = tuple(left_out(self.traces[other], awaited, self.statements))
                made = self._facts.slicer((other, number)).makers(omitted[0]) if omitted else []
                for clue, executions in (Clue.MESSAGE, omitted), (Clue.MESSAGE_VALUE, made):
                    for execution in executions:
                        yield clue, self._candidate(other, execution, OriginKind.CALL, (self.traces[other].rank,))

    def _swallowed(self) -> Iterator[Named]:
        """Yield the latest exception that only one rank had and handled: its handler, and the statement that raised."""
        latest: tuple[float, int, int] | None = None
        for number, trace in enumerate(self.traces):
            for execution in reversed(range(len(trace.executions))):
                raised = trace.executions[execution].raised
                if raised is not None and raised.handled and not self._coverage.raised_elsewhere(number, execution):
                    latest = max(latest or (0.0, 0, 0), (execution / len(trace.executions), number, execution))
                    break
        if latest is None:
            return
        _, number, execution = latest
        trace = self.traces[number]
        for found in self.statements.end_of_handler(trace, execution):
            yield Clue.HANDLER, self._candidate(number, found, OriginKind.EXCEPTION, (trace.rank,))
        raising = trace.innermost_raise(execution)
        yield Clue.RAISED, self._candidate(number, raising, OriginKind.EXCEPTION, (trace.rank,))

    def _new_partings(self) -> Iterator[Named]:
        """Yield the latest partings at which ranks went ways that they had not gone before."""
        forms: dict[object, Parting] = {}
        for parting in self.alignment.partings:
            number = min(parting.row)
            place = self.traces[number].place(parting.row[number])
            ways = tuple(sorted(str((arm.next_line, arm.ending)) for arm in parting.arms.values()))
            if not any(is_consequence(self.traces, parting, way) for way in parting.ways):
                forms.setdefault((place, ways), parting)
        for clue, parting in zip((Clue.NEW_PARTING, Clue.OLDER_PARTING), reversed(forms.values()), strict=False):
            way = parting.ways[-1]
            number = way[0] if way[0] in parting.row else min(parting.row)
            candidate = self._candidate(number, parting.row[number], OriginKind.CALL, self._ranks(way), row=parting.row)
            pair = (number, next(n for n in (*parting.ways[0], *parting.row) if n != number))
            yield self._parted(clue, candidate, parting.row, pair)

    def steps(self, judged: Judged) -> list[Step]:
        return self._facts.slicer(judged.pair).slice((judged.row[judged.pair[0]], judged.row[judged.pair[1]]))

    def _at_division(self, judged: Judged, steps: Sequence[Step]) -> Candidate:
        number = judged.pair[0]
        execution = judged.row[number]
        kind = OriginKind.CALL
        raised = [self.traces[n].executions[judged.row[n]].raised for n in judged.pair]
        if sum(item is not None for item in raised) == 1:
            kind = OriginKind.EXCEPTION
        elif origin := next((step for step in steps if step.is_origin or step.is_leak), None):
            kind = self._facts.kind(origin, judged.pair)
        ranks = self._ranks(judged.minority)
        at_division = self._candidate(number, execution, kind, ranks, row=judged.row)
        is_open = kind in (OriginKind.UNKNOWN, OriginKind.CALL, OriginKind.MISSING_REDUCTION)
        if is_open and isinstance(self.statements.at(self._place(judged)), ast.If | ast.While):
            values = self._facts.decisive_number(steps, judged.pair)
            if values is not None:
                others = tuple(other for other in at_division.values if other.name != values.name)
                kind, name = OriginKind.MISSING_REDUCTION, values.name
                is_provable = self._facts.is_decided_by_data(judged.row, steps, judged.pair)
                values_first = (values, *others)
                return replace(at_division, kind=kind, name=name, values=values_first, is_provable=is_provable)
        return at_division

    def _of_steps(
        self, steps: Sequence[Step], pair: Pair, ranks: tuple[int, ...], *, is_loop: bool = False
    ) -> Iterator[Named]:
        """Yield the definitions of a slice. `is_loop`: the slice explains how often the ranks went round a loop."""
        places: dict[Place, Step] = {}
        extra: dict[Place, Step] = {}
        for step in steps:
            if not step.is_update and not self._only_returns(step, pair):
                places.setdefault(self._facts.place_of(step, pair), step)
                if step.is_leak:
                    extra.setdefault(self._facts.place_of(step, pair), step)
        found, steps, leaks = steps, tuple(places.values()), [*extra.values()]
        kinds = {step: self._facts.kind(step, pair) for step in steps}
        names = {step: step.name for step in steps}
        for step in steps:
            if kinds[step] is OriginKind.UNKNOWN and (name := self._own_data(step, pair)) is not None:
                kinds[step], names[step] = OriginKind.MISSING_REDUCTION, name
        kinds |= {step: self._facts.kind(step, pair) for step in leaks}
        names |= {step: step.name for step in leaks}
        shards = [
            step
            for step in steps
            if is_loop
            and kinds[step] is OriginKind.RANK
            and is_shard(step, self.traces, pair, self._facts.statement_of(step, pair))
        ]
        chosen = [step for step in steps if is_chosen_by_rank(step, self._facts.statement_of(step, pair))]
        sources = [
            s for s in steps if kinds[s] in _SOURCES and not any(o.previous is s and o.is_parting for o in found)
        ]
        leaks.sort(key=lambda step: (not self._facts.is_own_leak(step, pair), not self._facts.is_changed(step, pair)))
        near_leaks = [step for step in leaks[:1] if step.distance < 2 or self._facts.is_own_leak(step, pair)]
        drifts = [step for step in steps if step.is_origin and kinds[step] is OriginKind.RANDOM]
        nearest = [step for step in steps if kinds[step] not in OF_RANK and not step.is_object]
        origins = [step for step in nearest if step.is_origin]
        choices = [s for s in steps if s.is_parting and isinstance(self._facts.statement_of(s, pair), ast.If | ast.Try)]
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
                candidate = replace(self._of_step(step, kinds[step], pair, ranks), name=names[step])
                is_data = kinds[step] in (*MADE_OF_DATA, OriginKind.RANDOM)
                is_effect = is_data and self._facts.is_effect(step, found, pair)
                yield clue, replace(candidate, is_provable=False) if is_effect else candidate
        for step in leaks[:1]:
            side, execution = step.execution
            if (call := self._coverage.extra_call(pair[side], execution)) is not None:
                trace = self.traces[pair[side]]
                within = {trace.activation_of[e] for e in (execution, *trace.outer(execution))}
                called = next(activation for activation in trace.calls[call] if activation in within)
                candidate = self._candidate(pair[side], call, OriginKind.LEAK, ranks)
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
                yield Clue.FILE_CHANGED, self._candidate(number, change, OriginKind.OTHER_RANKS_FILE, (rank,))

    def _own_data(self, step: Step, pair: Pair) -> str | None:
        """Return the number by which a statement decides or that it returns, "" if tensors decide, or None."""
        first, second = step.executions
        if step.name or first is None or second is None:
            return None
        statement = self._facts.statement_of(step, pair)
        if not isinstance(statement, ast.If | ast.Return):
            return None
        if (values := self._facts.decisive_number([step], pair)) is not None:
            return values.name
        names = Slicer(self.alignment, pair).inputs((first, second))
        reads = dict(self.traces[pair[0]].executions[first].reads)
        is_by_tensors = names and all(name in reads and reads[name].type == "Tensor" for name in names)
        return "" if is_by_tensors and isinstance(statement, ast.If) else None

    def _only_returns(self, step: Step, pair: Pair) -> bool:
        """Return whether the step is a `return` of a name within the program, where nothing is decided."""
        match self._facts.statement_of(step, pair):
            case ast.Return(value=ast.Name() | ast.Constant() | None):
                return step.distance > 0
        return False

    def _of_step(self, step: Step, kind: OriginKind, pair: Pair, ranks: tuple[int, ...]) -> Candidate:
        side, execution = step.execution
        trace = self.traces[pair[side]]
        if step.is_leak and trace.rank not in ranks:  # it is the other side that makes the extra call
            ranks = tuple(sorted(other.rank for other in self.traces if other.rank not in ranks))
        caller = self._caller(step, pair) if step.is_leak else None
        row = self.alignment.row_of[pair[side]][execution]
        chain: list[tuple[Place, str]] = []
        for follower in (step, *uses(step)):
            if (link := (self._facts.place_of(follower, pair), follower.name)) not in chain[-1:]:
                chain.append(link)
        candidate = self._candidate(
            pair[side],
            execution,
            kind,
            ranks,
            name=step.name,
            row=self.alignment.rows[row] if row >= 0 else {pair[side]: execution},
            chain=tuple(chain[:12]),
            caller=None if caller is None else trace.place(caller),
        )
        return replace(candidate, is_provable=self._facts.is_provable(step, kind, pair))

    def _caller(self, step: Step, pair: Pair) -> int | None:
        side, execution = step.execution
        parting = self._facts.slicer(pair).parting_before(side, execution)
        if (call := self._coverage.extra_call(pair[side], execution)) is not None:
            return call
        return None if parting is None or parting[1] == execution else parting[1]

    def _of_operations(self, judged: Judged) -> Iterator[Named]:
        """Yield the statement of the first operation that only one of the ranks made."""
        ranks = self._ranks(judged.minority)
        for number, operation in zip(judged.pair, judged.operations, strict=True):
            if operation is None:
                continue
            trace = self.traces[number]
            owner = trace.owner(operation)
            if owner >= 0:
                alone = self._coverage.alone(number, owner)
                yield Clue.OPERATION, self._candidate(number, alone, OriginKind.CALL, ranks)

    # Coverage.

    def _ran_alone(self) -> Iterator[Named]:
        """Yield the latest statements that only one rank ever executed, and the statement that led to them."""
        latest: tuple[float, int, int] | None = None
        for number, trace in enumerate(self.traces):
            others = self._coverage.elsewhere(number)
            alone = sorted(execution for line, execution in self._coverage.first[number].items() if line not in others)
            if alone:
                start = alone[-1]
                for execution in reversed(alone[:-1]):
                    if trace.activation_of[execution] == trace.activation_of[start]:
                        start = execution
                latest = max(latest or (0.0, 0, 0), (start / len(trace.executions), number, start))
        if latest is None:
            return
        _, number, start = latest
        ranks = (self.traces[number].rank,)
        yield Clue.ALONE, self._candidate(number, start, OriginKind.CALL, ranks)
        pair = (number, next(n for n in range(len(self.traces)) if n != number))
        if (parting := self._facts.slicer(pair).parting_before(0, start)) is not None:
            candidate = self._candidate(number, parting[0][0], OriginKind.CALL, ranks)
            yield self._parted(Clue.BEFORE_ALONE, candidate, dict(zip(pair, parting[0], strict=True)), pair)

    # Ends.

    def _at_ends(self) -> Iterator[Named]:
        """Yield where threads stopped outside of communication, and what made the values differ that they use there."""
        for number, trace in enumerate(self.traces):
            pair = (number, 0 if number else len(self.traces) - 1)
            for execution in trace.running():
                if any(not made.returned and not made.error for made in trace.executions[execution].communications):
                    continue
                if trace.stopped_child() is not None and not self._child_of(number, execution):
                    continue  # It waits for its child.
                clue = Clue.CHILD if self._child_of(number, execution) else Clue.END
                yield clue, self._candidate(number, execution, OriginKind.UNKNOWN, (trace.rank,))
                members = trace.members[trace.activation_of[execution]]
                line = trace.executions[execution].line
                is_loop = sum(trace.executions[other].line == line for other in members) > _SPINS
                steps = self._facts.slicer(pair).behind(execution)
                for behind, candidate in self._of_steps(steps, pair, (trace.rank,), is_loop=is_loop):
                    # Only a loop that goes on by a number stops a thread by it.
                    is_data = candidate.kind in MADE_OF_DATA and not is_loop
                    yield behind, replace(candidate, is_provable=False) if is_data else candidate
                yield from self._left_out(number, execution)

    def _left_out(self, number: int, execution: int) -> Iterator[Named]:
        """Yield where a call was left out that would have ended the waiting of a thread."""
        waiting = tuple(_WAITS.findall(self.statements.header(self.traces[number].place(execution))))
        others = [other for other in range(len(self.traces)) if other != number]
        for other in (number, *others):
            if waiting and (end := left_out_for(self.traces[other], waiting, self.statements)) is not None:
                yield Clue.LEFT_OUT, self._candidate(other, end, OriginKind.LEFT_OUT, (self.traces[other].rank,))
                return

    def _new_ways(self) -> Iterator[Named]:
        """Yield the two latest statements of each rank from which it went on in a way in which it never had before."""
        for number, trace in enumerate(self.traces):
            ways = self._coverage.ways[number]
            latest = [max(first.values(), key=trace.order) for first in ways.values() if len(first) > 1]
            for execution in sorted(latest, key=trace.order)[:-3:-1]:
                yield Clue.NEW_WAY, self._candidate(number, execution, OriginKind.CALL, (trace.rank,))

    # Facts.

    def _ranks(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.traces[number].rank for number in numbers))

    def _candidate(
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
