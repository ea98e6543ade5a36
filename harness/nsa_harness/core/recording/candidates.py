"""Rank the source lines that may have to change so that the ranks go the same way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nsa_harness.core.recording.alignment import Parting, Row
from nsa_harness.core.recording.beginnings import Beginnings
from nsa_harness.core.recording.candidate_builder import CandidateBuilder
from nsa_harness.core.recording.clues import Clue, Named, rank
from nsa_harness.core.recording.communications import Shared, is_point_to_point, left_out, left_out_for
from nsa_harness.core.recording.division import Judged, is_consequence, own_exceptions, raised_by_network
from nsa_harness.core.recording.explanation import RETURNED, Candidate, OriginKind, RankValues, SilentDifference
from nsa_harness.core.recording.provability import MADE_OF_DATA, OF_RANK, uses
from nsa_harness.core.recording.recording import Value, differs, has_size
from nsa_harness.core.recording.silent_candidates import (
    by_chance,
    differences_that_are_unusual,
    unequal_replicas,
    uses_of_difference,
)
from nsa_harness.core.recording.slicing import Pair, Step
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import names_rank

MOST = 8  # candidates that an explanation lists
_SOURCES = (OriginKind.CLOCK, OriginKind.HASH_ORDER, OriginKind.RESTORED_STATE, OriginKind.OTHER_RANKS_FILE)
_USUAL = (*OF_RANK, OriginKind.CLOCK)  # differences that every healthy run has
_BY_CHANCE = (OriginKind.LEAK, OriginKind.HASH_ORDER)  # the recording may not show how these lead to a failure
_FROM_DATA = (OriginKind.MISSING_REDUCTION, OriginKind.UNKNOWN, OriginKind.LENGTH)
_OF_DATA = (*_FROM_DATA, OriginKind.CALL, OriginKind.RANK, OriginKind.RANDOM)  # of a decision by data of the rank
_BEGINNINGS = 3  # beginnings of a division that count
_SPINS = 50  # executions of a statement in one call of its function after which a rank goes round in a loop
_OF_ROLE = 4  # most definitions from a condition back to the number of the rank
_WAITS = re.compile(r"\.(get|wait|acquire|join)\(")
_NUMBER = re.compile(r"\b\d{2,}\b")
_LATE = re.compile(r"finished reduction in the prior iteration|mark(?:ed)? (?:a variable |as )?ready", re.IGNORECASE)


def _scalars(candidate: Candidate) -> set[str]:
    """Return the names of the numbers and texts of a candidate."""
    return {
        value.name
        for value in candidate.values
        if not any(text[:1] in "([{" or " " in text for _, text in value.values)
    }


def _is_state(value: Value) -> bool:
    """Return whether a value is the state of a random generator."""
    return value.text.startswith("state ")


@dataclass
class Candidates(CandidateBuilder):
    """The candidates of a run, built from its divisions."""

    divisions: Sequence[Judged]
    silent: SilentDifference | None = None

    def ranked(self) -> tuple[Candidate, ...]:
        """Return the candidates, most likely first."""
        ranked = rank(self._clues(), self.statements, MOST)
        for candidate in by_chance(self):
            if not any(self.statements.near(candidate.place, other.place) and other.is_provable for other in ranked):
                ranked.append(candidate)
        return tuple(ranked[: MOST + 2])

    def _clues(self) -> Iterator[Named]:
        failed = any(trace.error is not None or own_exceptions(trace) for trace in self.traces)
        has_passed = not failed and all(self.has_ended(trace) for trace in self.traces)
        if has_passed and (self.silent is not None or not self.divisions):  # ranks may part on purpose
            yield from unequal_replicas(self, self.silent)
            yield from uses_of_difference(self, self.silent)
            yield from self._differences_of_passed_run()
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
            yield from self.of_steps(self.steps(judged), judged.pair, self.ranks_of(judged.minority), is_loop=is_loop)
            yield from self._of_operations(judged)
            yield from self._of_beginnings(judged)
            yield from self._dealt(judged) if is_loop else ()
        if any(self._is_role(self._place(judged), judged.row, judged.pair) for judged in self.divisions[:1]):
            yield from self._messages()  # What one of the roles leaves out is more likely wrong than the role.
        yield from self._swallowed()
        yield from self._new_partings()
        yield from self._ran_alone()
        yield from self._at_ends()
        yield from self._new_ways()

    def _differences_of_passed_run(self) -> Iterator[Named]:
        """Yield where the ranks of a run that ended first differed. The batches of a loop come last."""
        found = list(differences_that_are_unusual(self))
        loops = [named for named in found if isinstance(self.statements.at(named[1].place), ast.For)]
        yield from (named for named in found if named not in loops)
        yield from ((clue, candidate) for clue, candidate in self._new_partings() if clue is not Clue.ROLE)
        yield from loops

    # Exceptions.

    def _exceptions(self) -> Iterator[Named]:
        failed = [
            (number, execution) for number, trace in enumerate(self.traces) for execution in own_exceptions(trace)
        ]
        in_children = [one for one in failed if self.child_of(*one)]
        if in_children:  # What its parent raised is the effect.
            failed = [one for one in failed if one in in_children or one[0] not in dict(in_children)]
        ranks = self.ranks_of({number for number, _ in failed})
        if failed and self._is_late(*failed[0]):
            yield from ((Clue.STEP_BEFORE, candidate) for _, candidate in self._new_partings())
        for number, execution in failed:
            yield Clue.RAISED, self.candidate(number, execution, OriginKind.EXCEPTION, ranks)
            if self.child_of(number, execution):
                yield Clue.CHILD, self.candidate(number, execution, OriginKind.EXCEPTION, ranks)
                continue
            trace = self.traces[number]
            *_, outermost = execution, *trace.outer(execution)
            if trace.activation_of[outermost] not in trace.roots[0][1]:  # The thread could have handled it.
                yield Clue.THREAD, self.candidate(number, outermost, OriginKind.EXCEPTION, ranks)
        places = {self.traces[number].place(execution) for number, execution in failed}
        for number, execution in failed[:1]:
            if len(places) == 1 and len(ranks) == len(self.traces):
                yield from (
                    (Clue.QUOTED, self.candidate(number, e, OriginKind.UNKNOWN, ranks))
                    for e in self._quoted(number, execution)
                )
            row = self.alignment.row_of[number][execution]
            others = [n for n in self.alignment.rows[row] if self.traces[n].rank not in ranks] if row >= 0 else []
            if others:
                pair = (number, others[0])
                steps = self.facts.slicer(pair).slice((execution, self.alignment.rows[row][others[0]]))
                yield from self.of_steps(steps, pair, ranks)

    def _peers_left(self) -> Iterator[Named]:
        """Yield the call in which a rank lost its connection, and which a rank that ended had finished."""
        ended = [n for n, trace in enumerate(self.traces) if self.has_ended(trace) and trace.error is None]
        for number, trace in enumerate(self.traces):
            raising = None if trace.error is None else trace.innermost_raise(trace.error)
            if not ended or raising is None or not raised_by_network(trace, raising):
                continue
            for execution in (raising, *trace.outer(raising)):
                other = self.alignment.counterpart(number, execution, ended[0])
                if other is not None and self.traces[ended[0]].next_line(other) is not None:
                    yield Clue.PEER_LEFT, self.candidate(number, execution, OriginKind.UNKNOWN, (trace.rank,))
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
                yield from self.facts.slicer((number, 1 - min(number, 1))).makers(other, named[:1])
                return

    def _is_late(self, number: int, execution: int) -> bool:
        """Return whether the exception reports what the rank did, or left out, in the step before."""
        raised = self.traces[number].executions[execution].raised
        return raised is not None and _LATE.search(raised.message) is not None

    # Divisions.

    def _parted(self, clue: Clue, candidate: Candidate, row: Row, pair: Pair) -> Named:
        """Return the candidate with the clue, or with the clue of a role if only the number of the rank decides."""
        if candidate.place in self._roles_at_fault:
            return Clue.ROLE_COMMUNICATES, candidate
        return Clue.ROLE if self._is_role(candidate.place, row, pair) else clue, candidate

    @cached_property
    def _roles_at_fault(self) -> set[Place]:
        """The conditions by which only the number of the rank decides who makes an operation that needs all of them."""
        judged = [one for one in self.divisions[:3] if self._is_role_at_fault(one)]
        return {place for one in judged if self._is_role(place := self._place(one), one.row, one.pair)}

    def _is_role(self, place: Place, row: Row, pair: Pair) -> bool:
        """Return whether a condition, or a call of different functions, only tells ranks from each other by number."""
        steps = self.facts.slicer(pair).slice((row[pair[0]], row[pair[1]]))
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
        is_of_rank = all(self.facts.kind(step, pair) in OF_RANK for step in named)
        return is_of_rank and (len(calls) > 1 or self._tells_ranks(row, pair))

    def _tells_ranks(self, row: Row, pair: Pair) -> bool:
        """Return whether a condition reads a rank or a truth value, or always has the same result on a rank."""
        first, second = (dict(self.traces[number].executions[row[number]].reads) for number in pair)
        different = [name for name in first if name in second and differs(first[name], second[name])]
        ranks = [str(self.traces[number].rank) for number in pair]
        if any([first[name].text, second[name].text] == ranks or first[name].type == "bool" for name in different):
            return True
        return all(len(self.coverage.ways[number][self.coverage.line(number, row[number])]) < 2 for number in pair)

    def _place(self, judged: Judged) -> Place:
        return self.traces[judged.pair[0]].place(judged.row[judged.pair[0]])

    def _raise_site(self, judged: Judged) -> Candidate | None:
        """Return the statement that raised the exception which only one rank of the division had."""
        for number in judged.pair:
            trace = self.traces[number]
            raising = trace.innermost_raise(judged.row[number])
            if raising != judged.row[number] and not raised_by_network(trace, raising):
                return self.candidate(number, raising, OriginKind.EXCEPTION, self.ranks_of(judged.minority))
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
                        steps = self.facts.slicer(pair).slice((owner, self.traces[other].owner(opposite)))
                        named = self.of_steps(steps, pair, self.ranks_of(pair))
                        yield from ((Clue.MESSAGE, candidate) for _, candidate in named)
                        break
                omitted = tuple(left_out(self.traces[other], awaited, self.statements))
                made = self.facts.slicer((other, number)).makers(omitted[0]) if omitted else []
                for clue, executions in (Clue.MESSAGE, omitted), (Clue.MESSAGE_VALUE, made):
                    for execution in executions:
                        yield clue, self.candidate(other, execution, OriginKind.CALL, (self.traces[other].rank,))

    def _swallowed(self) -> Iterator[Named]:
        """Yield the latest exception that only one rank had and handled: its handler, and the statement that raised."""
        latest: tuple[float, int, int] | None = None
        for number, trace in enumerate(self.traces):
            for execution in reversed(range(len(trace.executions))):
                raised = trace.executions[execution].raised
                if raised is not None and raised.handled and not self.coverage.raised_elsewhere(number, execution):
                    latest = max(latest or (0.0, 0, 0), (execution / len(trace.executions), number, execution))
                    break
        if latest is None:
            return
        _, number, execution = latest
        trace = self.traces[number]
        for found in self.statements.end_of_handler(trace, execution):
            yield Clue.HANDLER, self.candidate(number, found, OriginKind.EXCEPTION, (trace.rank,))
        raising = trace.innermost_raise(execution)
        yield Clue.RAISED, self.candidate(number, raising, OriginKind.EXCEPTION, (trace.rank,))

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
            candidate = self.candidate(
                number, parting.row[number], OriginKind.CALL, self.ranks_of(way), row=parting.row
            )
            pair = (number, next(n for n in (*parting.ways[0], *parting.row) if n != number))
            yield self._parted(clue, candidate, parting.row, pair)

    def _of_beginnings(self, judged: Judged) -> Iterator[Named]:
        """Yield where data of the ranks first made a number, a length or a decision differ that led to a division."""
        pair, executions, steps = (
            judged.pair,
            (judged.row[judged.pair[0]], judged.row[judged.pair[1]]),
            self.steps(judged),
        )
        beginnings = Beginnings(self.traces, pair, self.facts.slicer(pair))
        ranks = self.ranks_of(judged.minority)
        found = list(beginnings.of(executions, steps))
        leaks = [step for step in steps if step.is_leak]
        is_only = len(found) == 1 and beginnings.is_complete
        for step in found[:_BEGINNINGS]:
            if step is None:
                if self._is_decision(judged):
                    at_division = self._at_division(judged, steps)
                    is_data = not leaks and at_division.kind in _OF_DATA and beginnings.is_of_known_data(executions)
                    is_data = is_data and not self.facts.communicates(pair[0], executions[0])
                    known = replace(at_division, kind=OriginKind.MISSING_REDUCTION, is_provable=True)
                    yield Clue.BEGINS, known if is_data else at_division
            elif not self._is_usual_beginning(step, pair):
                kind = self.facts.kind(step, pair)
                clue = Clue.BEGINS_BY_RANK if step.name and kind in OF_RANK else Clue.BEGINS
                if (seed := self._seed_of(step, steps, pair)) is not None:
                    clue = Clue.NEAR
                    yield Clue.SEEDED, self.of_step(seed, self.facts.kind(seed, pair), pair, ranks)
                candidate = replace(self.of_step(step, kind, pair, ranks), is_provable=False)
                is_effect = any(leak not in uses(step) for leak in leaks) or self.facts.is_effect(step, steps, pair)
                is_data = kind in _FROM_DATA and not self.facts.communicates(pair[step.execution[0]], step.execution[1])
                if is_only and is_data and not is_effect and beginnings.is_of_known_data(step.both):
                    candidate = self._only_beginning(candidate, step, beginnings)
                yield clue, candidate

    def _dealt(self, judged: Judged) -> Iterator[Named]:
        """Yield the statement that dealt data out by the number of the rank, before parts of it were left out."""
        number = judged.pair[0]
        trace = self.traces[number]
        used = [step.executions[0] for step in self.steps(judged) if step.executions[0] is not None]
        for execution in self.facts.slicer(judged.pair).sources(used):
            recorded = trace.executions[execution]
            reads_rank = any(value.text == str(trace.rank) and names_rank(name) for name, value in recorded.reads)
            if reads_rank and any(has_size(value) for _, value in recorded.writes):
                yield Clue.DEALT, self.candidate(number, execution, OriginKind.LENGTH, self.ranks_of(judged.minority))
                return

    def _comes_from_unknown(self, steps: Sequence[Step], pair: Pair) -> bool:
        """Return whether a difference comes out of an object that could not be read."""
        beginnings = Beginnings(self.traces, pair, self.facts.slicer(pair))
        ends = [step for step in steps if step.is_origin and not step.is_object and None not in step.executions]
        kinds = (OriginKind.UNKNOWN, OriginKind.MISSING_REDUCTION)
        return any(self.facts.kind(step, pair) in kinds and not beginnings.is_of_known_data(step.both) for step in ends)

    def _only_beginning(self, candidate: Candidate, step: Step, beginnings: Beginnings) -> Candidate:
        """Return the candidate as a provable origin: all that differs at the division comes from it alone."""
        side, execution = step.execution
        is_result = isinstance(self.facts.statement_of(step, beginnings.pair), ast.Return)
        if step.name or not is_result or beginnings.returned(side, execution) is None:
            is_number = candidate.kind is OriginKind.LENGTH and step.name in _scalars(candidate)
            kind = OriginKind.MISSING_REDUCTION if is_number else candidate.kind
            return replace(candidate, kind=kind, is_provable=bool(step.name))
        row = self.alignment.rows[self.alignment.row_of[beginnings.pair[side]][execution]]
        results = []
        for number, at in row.items():
            trace = self.traces[number]
            if (value := trace.activations[trace.activation_of[at]].returned) is not None:
                results.append((trace.rank, value.text))
        values = (RankValues(name=RETURNED, values=tuple(sorted(results))), *candidate.values)
        return replace(candidate, kind=OriginKind.MISSING_REDUCTION, values=values, is_provable=True)

    def _is_usual_beginning(self, step: Step, pair: Pair) -> bool:
        """Return whether the ranks rightly differ in a step: the items of a loop, or what a rank has registered."""
        is_registered = step.previous is not None and self.facts.is_registry(step.previous, pair)
        return is_registered or isinstance(self.facts.statement_of(step, pair), ast.For)

    def _seed_of(self, draw: Step, steps: Sequence[Step], pair: Pair) -> Step | None:
        """Return the step that passed the seed of the generator from which a step drew, or None if it is not known."""
        side, execution = draw.execution
        used = {name for name, value in self.traces[pair[side]].executions[execution].reads if _is_state(value)}
        made = [step for step in steps if step.name in used]
        return next((step for step in steps if step.name and step.previous in made and step.name not in used), None)

    def _is_decision(self, judged: Judged) -> bool:
        """Return whether a condition divides the ranks, and not only by the number of the rank."""
        place = self._place(judged)
        is_condition = isinstance(self.statements.at(place), ast.If | ast.While)
        is_stuck = any(self._is_stuck(judged, number) for number in judged.pair)
        return is_condition and not is_stuck and not self._is_role(place, judged.row, judged.pair)

    def _is_stuck(self, judged: Judged, number: int) -> bool:
        """Return whether a rank went no further than its way from a parting, but does not wait in a collective."""
        trace = self.traces[number]
        arm = judged.parting.arms[number] if judged.parting is not None else None
        waits = [made for made in trace.own_communications(trace.last) if not made.returned] if trace.last >= 0 else []
        is_within = arm is not None and arm.first <= trace.last < arm.end
        return is_within and (not waits or any(map(is_point_to_point, waits)))

    def _is_role_at_fault(self, judged: Judged) -> bool:
        """Return whether one role alone made a collective operation of a group to which the other role belongs, too."""
        if not isinstance(self.statements.at(self._place(judged)), ast.If):
            return False
        for number, operation in zip(judged.pair, judged.operations, strict=True):
            other = next(n for n in judged.pair if n != number)
            if operation is not None and not is_point_to_point(operation) and not self._is_stuck(judged, other):
                return True
        return False

    def steps(self, judged: Judged) -> list[Step]:
        return self.facts.slicer(judged.pair).slice((judged.row[judged.pair[0]], judged.row[judged.pair[1]]))

    def _at_division(self, judged: Judged, steps: Sequence[Step]) -> Candidate:
        number = judged.pair[0]
        execution = judged.row[number]
        kind = OriginKind.CALL
        raised = [self.traces[n].executions[judged.row[n]].raised for n in judged.pair]
        if sum(item is not None for item in raised) == 1:
            kind = OriginKind.EXCEPTION
        elif origin := next((step for step in steps if step.is_origin or step.is_leak), None):
            kind = self.facts.kind(origin, judged.pair)
        ranks = self.ranks_of(judged.minority)
        at_division = self.candidate(number, execution, kind, ranks, row=judged.row)
        is_open = kind in (OriginKind.UNKNOWN, OriginKind.CALL, OriginKind.MISSING_REDUCTION)
        if is_open and isinstance(self.statements.at(self._place(judged)), ast.If | ast.While):
            values = self.facts.decisive_number(steps, judged.pair)
            if values is not None:
                others = tuple(other for other in at_division.values if other.name != values.name)
                kind, name = OriginKind.MISSING_REDUCTION, values.name
                is_data = self.facts.is_decided_by_data(judged.row, steps, judged.pair)
                is_provable = is_data and not self._comes_from_unknown(steps, judged.pair)
                values_first = (values, *others)
                return replace(at_division, kind=kind, name=name, values=values_first, is_provable=is_provable)
        return at_division

    def _of_operations(self, judged: Judged) -> Iterator[Named]:
        """Yield the statement of the first operation that only one of the ranks made."""
        ranks = self.ranks_of(judged.minority)
        for number, operation in zip(judged.pair, judged.operations, strict=True):
            if operation is None:
                continue
            trace = self.traces[number]
            owner = trace.owner(operation)
            if owner >= 0:
                alone = self.coverage.alone(number, owner)
                yield Clue.OPERATION, self.candidate(number, alone, OriginKind.CALL, ranks)

    # Coverage.

    def _ran_alone(self) -> Iterator[Named]:
        """Yield the latest statements that only one rank ever executed, and the statement that led to them."""
        latest: tuple[float, int, int] | None = None
        for number, trace in enumerate(self.traces):
            others = self.coverage.elsewhere(number)
            alone = sorted(execution for line, execution in self.coverage.first[number].items() if line not in others)
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
        yield Clue.ALONE, self.candidate(number, start, OriginKind.CALL, ranks)
        pair = (number, next(n for n in range(len(self.traces)) if n != number))
        if (parting := self.facts.slicer(pair).parting_before(0, start)) is not None:
            candidate = self.candidate(number, parting[0][0], OriginKind.CALL, ranks)
            yield self._parted(Clue.BEFORE_ALONE, candidate, dict(zip(pair, parting[0], strict=True)), pair)

    # Ends.

    def _at_ends(self) -> Iterator[Named]:
        """Yield where threads stopped outside of communication, and what made the values differ that they use there."""
        for number, trace in enumerate(self.traces):
            pair = (number, 0 if number else len(self.traces) - 1)
            for execution in trace.running():
                if any(not made.returned and not made.error for made in trace.executions[execution].communications):
                    continue
                if trace.stopped_child() is not None and not self.child_of(number, execution):
                    continue  # It waits for its child.
                clue = Clue.CHILD if self.child_of(number, execution) else Clue.END
                yield clue, self.candidate(number, execution, OriginKind.UNKNOWN, (trace.rank,))
                members = trace.members[trace.activation_of[execution]]
                line = trace.executions[execution].line
                is_loop = sum(trace.executions[other].line == line for other in members) > _SPINS
                steps = self.facts.slicer(pair).behind(execution)
                for behind, candidate in self.of_steps(steps, pair, (trace.rank,), is_loop=is_loop):
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
                yield Clue.LEFT_OUT, self.candidate(other, end, OriginKind.LEFT_OUT, (self.traces[other].rank,))
                return

    def _new_ways(self) -> Iterator[Named]:
        """Yield the two latest statements of each rank from which it went on in a way in which it never had before."""
        for number, trace in enumerate(self.traces):
            ways = self.coverage.ways[number]
            latest = [max(first.values(), key=trace.order) for first in ways.values() if len(first) > 1]
            for execution in sorted(latest, key=trace.order)[:-3:-1]:
                yield Clue.NEW_WAY, self.candidate(number, execution, OriginKind.CALL, (trace.rank,))
