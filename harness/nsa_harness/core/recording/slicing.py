"""Follow a value that differs between two ranks back to where it first differed."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.recording.alignment import Alignment
from nsa_harness.core.recording.definitions import GENERATOR, Definitions
from nsa_harness.core.recording.recording import Execution, differs, written_differently
from nsa_harness.core.recording.trace import Trace
from nsa_harness.core.recording.value_texts import length_of

_MAX_STEPS = 600  # definitions that one slice inspects
_MAX_ITERATION = 20  # statements of one iteration of a loop
_MAX_SOURCES = 60  # definitions from one to the next, whether they differ or not
_MAX_OBJECTS = 4  # definitions of objects from one to the next
_MAX_DRAWS = 8  # draws in different states that are traced back for each generator

Pair = tuple[int, int]  # two traces
Executions = tuple[int, int]  # an execution of each of them


@dataclass(frozen=True, eq=False)
class Step:
    """A definition that a slice has reached."""

    executions: tuple[int | None, int | None]  # of the two ranks; None: only the other rank executed it
    name: str
    previous: Step | None  # the step that uses this definition; None: the division itself
    distance: int
    is_origin: bool = False  # nothing that it reads differs
    is_leak: bool = False  # only one of the ranks executed it
    is_update: bool = False  # it only hands on a difference that its own value had before, such as `n += 1`
    is_object: bool = False  # it made an object whose content is not known
    is_parting: bool = False  # it decides which definition each rank executes

    @property
    def execution(self) -> tuple[int, int]:
        """The execution with the side (0 or 1) that it belongs to."""
        first, second = self.executions
        return (0, first) if first is not None else (1, second or 0)

    @property
    def both(self) -> Executions:
        """The executions of both ranks. Raise ValueError if only one of them executed it."""
        first, second = self.executions
        if first is None or second is None:
            raise ValueError("one rank alone")
        return first, second


class Slicer:
    """Slices of two traces."""

    def __init__(self, alignment: Alignment, pair: Pair) -> None:
        self._alignment = alignment
        self._pair = pair
        self._definitions = tuple(Definitions(alignment.traces[number]) for number in pair)

    def slice(self, executions: Executions) -> list[Step]:
        """Return the definitions that make what these executions read differ, nearest first."""
        steps: list[Step] = []
        visited: set[tuple[tuple[int | None, int | None], str]] = set()
        self._search([(at, name, None) for at, name in self._causes(executions)], steps, visited)
        # Without a value that differs, follow the objects, which cannot be compared, to a statement with one.
        objects: list[tuple[Executions, Step | None]] = [(executions, None)]
        for _ in range(_MAX_OBJECTS):
            if steps and not steps[-1].is_object:
                break
            objects = [made for at, previous in objects for made in self._made(at, previous)]
            steps += dict.fromkeys(step for _, step in objects if step is not None)
            for at, step in objects:
                self._search([(cause, name, step) for cause, name in self._causes(at)], steps, visited)
        return steps

    def behind(self, execution: int) -> list[Step]:
        """Return the definitions that make what an execution of the first rank alone uses differ, nearest first."""
        steps: list[Step] = []
        visited: set[tuple[tuple[int | None, int | None], str]] = set()
        seen: set[tuple[int, str]] = set()
        trace = self._trace(0)
        used = (*self._iteration(execution), *trace.outer(execution))
        waiting = deque((at, name) for at in used for name, _ in trace.executions[at].reads)
        while waiting and len(seen) < _MAX_STEPS:
            at, name = waiting.popleft()
            definition = self._definitions[0].of(at, name)
            if definition is None or (definition, name) in seen:
                continue
            seen.add((definition, name))
            executions = self.both(0, definition)
            if executions is None:
                waiting.extend((definition, other) for other, _ in trace.executions[definition].reads)
            elif written_differently(*self._recorded(executions)):
                causes = self._causes(executions)
                steps.append(step := Step(executions, name, None, 0, is_origin=not causes))
                self._search([(cause, other, step) for cause, other in causes], steps, visited)
            else:  # The content of an object may differ, even if that is not known.
                for made in (executions, *self._last_of_calls(executions)):
                    steps.append(Step(made, name, None, 0, is_object=True))
                    recorded = trace.executions[made[0]].reads
                    waiting.extend((made[0], other) for other, value in recorded if value.identity)
        return steps

    def makers(self, execution: int, names: Sequence[str] = ()) -> list[int]:
        """Return the executions of the first rank that defined `names`, or all that an execution reads.

        For a value that a function returned, it is the last execution of the function.
        """
        trace = self._trace(0)
        found = []
        for name in names or [name for name, _ in trace.executions[execution].reads]:
            definition = self._definitions[0].of(execution, name)
            if definition is not None:
                calls = trace.calls.get(definition, ())
                last = [
                    trace.members[call][-1]
                    for call in calls
                    if trace.activations[call].returned and trace.members[call]
                ]
                found.append(last[-1] if last else definition)
        return list(dict.fromkeys(found))

    def sources(self, executions: Iterable[int]) -> Iterator[int]:
        """Yield the executions of the first rank that defined what these read, then what those read, nearest first.

        What happens within a call is left out.
        """
        waiting = deque(executions)
        seen: set[int] = set()
        while waiting and len(seen) < _MAX_SOURCES:
            at = waiting.popleft()
            for name, _ in self._trace(0).executions[at].reads:
                definition = self._definitions[0].of(at, name)
                if definition is not None and definition not in seen:
                    seen.add(definition)
                    waiting.append(definition)
                    yield definition

    def _iteration(self, execution: int) -> list[int]:
        """Return the latest executions of the statements of the innermost loop around an execution, latest first.

        Executions without values are left out if their statement was executed with values before.
        """
        trace = self._trace(0)
        latest: dict[int, int] = {}
        for other in reversed(trace.members[trace.activation_of[execution]][: trace.position[execution] + 1]):
            line = trace.executions[other].line
            if line in latest and all(trace.executions[at].has_values for at in latest.values()):
                break
            if line not in latest or not trace.executions[latest[line]].has_values:
                latest[line] = other
            if len(latest) > _MAX_ITERATION:
                break
        return list(latest.values())

    def _last_of_calls(self, executions: Executions) -> Iterator[Executions]:
        """Yield the last executions of the calls in these executions, if they correspond to each other."""
        for call, other in self._calls(executions):
            members = self._trace(0).members[call], self._trace(1).members[other]
            if members[0] and members[1] and self.both(0, members[0][-1]) == (members[0][-1], members[1][-1]):
                yield members[0][-1], members[1][-1]

    def _search(
        self,
        causes: Sequence[tuple[Executions, str, Step | None]],
        steps: list[Step],
        visited: set[tuple[tuple[int | None, int | None], str]],
    ) -> None:
        queue = deque(causes)
        while queue and len(steps) < _MAX_STEPS:
            where, name, previous = queue.popleft()
            for step, following in self._follow(where, name, previous):
                if (step.executions, step.name) in visited:
                    continue
                visited.add((step.executions, step.name))
                steps.append(step)
                queue.extend((at, other, step) for at, other in following)

    def _made(self, executions: Executions, previous: Step | None) -> Iterator[tuple[Executions, Step]]:
        """Yield the statements that made the objects which these executions use and which cannot be compared."""
        first, second = (dict(execution.reads) for execution in self._recorded(executions))
        names = [name for name, value in first.items() if value.identity and not value.text and name in second]
        for name in names:
            if name in ("self", "cls") or any(other.startswith(name + ".") for other in names):
                continue
            ours, theirs = self._defined(executions, name)
            if ours is not None and theirs is not None and self.both(0, ours) == (ours, theirs):
                distance = 0 if previous is None else previous.distance + 1
                step = Step((ours, theirs), name, previous, distance, is_object=True)
                yield (ours, theirs), step
                yield from ((last, step) for last in self._last_of_calls((ours, theirs)))

    def inputs(self, executions: Executions) -> list[str]:
        """Return the names that these executions read, whose values differ."""
        first, second = (dict(execution.reads) for execution in self._recorded(executions))
        names = [name for name, value in first.items() if name in second and differs(value, second[name])]
        # The whole of "a.b" differs if only a part of it does. The part says more.
        names = [name for name in names if not any(other.startswith(name + ".") for other in names)]
        return names + self._drifted(executions)

    def results(self, executions: Executions) -> list[Executions]:
        """Return the last executions of the calls in these executions whose results differ."""
        found = []
        for call, other in self._calls(executions):
            ours, theirs = self._trace(0).activations[call], self._trace(1).activations[other]
            if ours.returned is None or theirs.returned is None or not differs(ours.returned, theirs.returned):
                continue
            members = self._trace(0).members[call], self._trace(1).members[other]
            if members[0] and members[1]:
                found.append((members[0][-1], members[1][-1]))
        return found

    def parting_before(self, side: int, execution: int) -> tuple[Executions, int] | None:
        """Return the executions after which only this rank went on to `execution`, and its next execution then."""
        trace = self._trace(side)
        while execution >= 0:
            activation, position = trace.activation_of[execution], trace.position[execution]
            for index in range(position - 1, -1, -1):
                before = trace.members[activation][index]
                if (executions := self.both(side, before)) is not None:
                    return executions, trace.members[activation][index + 1]
            caller = trace.caller[activation]
            if caller >= 0 and (executions := self.both(side, caller)) is not None:
                return executions, trace.members[activation][0]
            execution = caller
        return None

    def both(self, side: int, execution: int) -> Executions | None:
        """Return the execution and its counterpart, or None if it has none."""
        other = self._alignment.counterpart(self._pair[side], execution, self._pair[1 - side])
        if other is None:
            return None
        return (execution, other) if side == 0 else (other, execution)

    def _trace(self, side: int) -> Trace:
        return self._definitions[side].trace

    def _recorded(self, executions: Executions) -> list[Execution]:
        return [self._trace(side).executions[execution] for side, execution in enumerate(executions)]

    def _defined(self, executions: Executions, name: str) -> list[int | None]:
        """Return the last execution of each rank that defined the name before it was read here."""
        return [self._definitions[side].of(execution, name) for side, execution in enumerate(executions)]

    def _calls(self, executions: Executions) -> Iterator[tuple[int, int]]:
        counts: defaultdict[object, int] = defaultdict(int)
        theirs: dict[object, int] = {}
        for call in self._trace(1).calls.get(executions[1], ()):
            function = self._trace(1).function(call)
            theirs[function, counts[function]] = call
            counts[function] += 1
        counts.clear()
        for call in self._trace(0).calls.get(executions[0], ()):
            function = self._trace(0).function(call)
            if (other := theirs.get((function, counts[function]))) is not None:
                yield call, other
            counts[function] += 1

    def _drifted(self, executions: Executions) -> list[str]:
        first, second = (
            {generator: before for generator, before, _ in execution.draws} for execution in self._recorded(executions)
        )
        return [GENERATOR + name for name, state in first.items() if name in second and state != second[name]]

    def _follow(
        self, executions: Executions, name: str, previous: Step | None
    ) -> Iterator[tuple[Step, list[tuple[Executions, str]]]]:
        """Yield the definitions of the name that these executions read, each with the values that made them differ."""
        distance = 0 if previous is None else previous.distance + 1
        if not name:
            causes = self._causes(executions)
            yield Step(executions, "", previous, distance, is_origin=not causes, is_parting=True), causes
            return
        found = self._defined(executions, name)
        if self._definitions[0].is_object(executions[0], name):
            mutation = self._mutation(executions, name)
            found = list(mutation) if mutation is not None else found
        first, second = found
        if first is None and second is None:
            return
        if first is not None and second is not None and self.both(0, first) == (first, second):
            yield from self._aligned((first, second), name, executions, previous, distance)
            return
        alone = [
            (side, execution)
            for side, execution in enumerate(found)
            if execution is not None and self.both(side, execution) is None
        ]
        if not alone:  # Both ranks executed both definitions, but not in the same order.
            if first is not None and second is not None:
                yield Step((first, second), name, previous, distance), []
            return
        partings = {side: self.parting_before(side, execution) for side, execution in alone}
        # If each rank defined it alone, the values differ since the definition for which the ranks parted first.
        begins = {side: -1 if parting is None else parting[0][0] for side, parting in partings.items()}
        side, execution = min(alone, key=lambda one: begins[one[0]])
        is_first = list(begins.values()).count(begins[side]) == 1
        is_leak = is_first and self._outlives(side, execution, executions[side])
        step = Step((execution, None) if side == 0 else (None, execution), name, previous, distance, is_leak=is_leak)
        yield step, [((first, second), other) for other in self.inputs((first, second))] if first and second else []
        parting = partings[side]
        if parting is not None:
            causes = self._causes(parting[0])
            yield Step(parting[0], "", step, distance + 1, is_origin=not causes, is_parting=True), causes

    def _outlives(self, side: int, definition: int, use: int) -> bool:
        """Return whether the call in which a value was defined had ended when it was used."""
        trace = self._trace(side)
        activation = trace.activation_of[definition]
        last = trace.executions[trace.members[activation][-1]].order
        return trace.activations[activation].ended and last < trace.executions[use].order

    def _causes(self, executions: Executions) -> list[tuple[Executions, str]]:
        """Return the values that differ in these executions, and the statements that decided what their calls returned.

        Such a statement has "" as its name.
        """
        found = [(executions, name) for name in self.inputs(executions)]
        return found + self._results(executions) or self._iterated(executions)

    def _results(self, executions: Executions) -> list[tuple[Executions, str]]:
        found = []
        for result in self.results(executions):
            if self.both(0, result[0]) == result:
                found.append((result, ""))
            elif (parting := self.parting_before(0, result[0])) is not None:
                found.append((parting[0], ""))
        return found

    def _iterated(self, executions: Executions) -> list[tuple[Executions, str]]:
        """Return the statements that decided over what these executions iterate, if they are headers of loops.

        These are the statement at which generators parted, or the ends of functions that returned different lengths.
        """
        calls = [self._trace(side).resumed(execution) for side, execution in enumerate(executions)]
        found = []
        for call, other in zip(*calls, strict=False):
            last = self._last_common(call, other) or self._ends(call, other)
            if last is not None:
                found.append((last, ""))
        return found

    def _ends(self, call: int, other: int) -> Executions | None:
        """Return the last executions of two activations if they correspond, and the lengths of the results differ."""
        returned = self._trace(0).activations[call].returned, self._trace(1).activations[other].returned
        lengths = {length_of(value.text) for value in returned if value is not None}
        if len(lengths) < 2 or None in lengths:
            return None
        members = self._trace(0).members[call], self._trace(1).members[other]
        if not members[0] or not members[1]:
            return None
        last = members[0][-1], members[1][-1]
        return last if self.both(0, last[0]) == last else None

    def _last_common(self, call: int, other: int) -> Executions | None:
        """Return the last executions of two activations after which only one of them went on, or None."""
        members = self._trace(0).members[call]
        for index in reversed(range(len(members))):
            both = self.both(0, members[index])
            if both is not None:
                theirs = self._trace(1).members[other]
                is_last = index == len(members) - 1 and both[1] == theirs[-1]
                return None if is_last or self._trace(1).activation_of[both[1]] != other else both
        return None

    def _aligned(
        self, at: Executions, name: str, use: Executions, previous: Step | None, distance: int
    ) -> Iterator[tuple[Step, list[tuple[Executions, str]]]]:
        is_argument = self._definitions[0].is_argument(use[0], name, at[0])
        following = self._passed(use, name, at) if is_argument else self._causes(at)
        is_update = bool(following) and all(item == (at, name) for item in following)
        yield Step(at, name, previous, distance, is_origin=not following, is_update=is_update), following

    def _passed(self, use: Executions, name: str, at: Executions) -> list[tuple[Executions, str]]:
        """Return what made the argument `name` of the call in `at` differ.

        These are the names with the value of the argument, or else all that differs there.
        """
        values = [self._definitions[side].argument(execution, name) for side, execution in enumerate(use)]
        reads = [dict(execution.reads) for execution in self._recorded(at)]
        names = [other for other in self.inputs(at) if [of.get(other) for of in reads] == values]
        return [(at, other) for other in names] or self._causes(at)

    def _mutation(self, executions: Executions, name: str) -> tuple[int | None, int | None] | None:
        """Return the execution that made the content of an object differ, or None if it is not known."""
        identities = [self._definitions[side].value(at, name).identity for side, at in enumerate(executions)]
        if not all(identities):
            return None
        for event, value, is_write in self._definitions[0].events(identities[0], executions[0]):
            executed = self.both(0, event)
            if executed is None:
                return event, None
            other = self._definitions[1].content(executed[1], identities[1], is_write=is_write)
            if other is not None and not differs(value, other):  # What made it differ may have run on the other rank.
                extra = self._extra_use(identities[1], executed[1], executions[1])
                return executed if extra is None else (None, extra)
            if is_write or other is None:
                return executed
        return None

    def _extra_use(self, identity: int, after: int, before: int) -> int | None:
        """Return the last use of an object between two executions of the second rank that only this rank made."""
        for event, _, _ in self._definitions[1].events(identity, before):
            if event <= after:
                break
            if self.both(1, event) is None:
                return event
        return None


def first_differences(alignment: Alignment, pair: Pair) -> Iterator[Step]:
    """Yield each statement once, at its first execution that made a difference, in the order of time."""
    slicer = Slicer(alignment, pair)
    seen = set()
    first, second = (alignment.traces[number] for number in pair)
    for row in alignment.rows:
        if pair[0] not in row or pair[1] not in row:
            continue
        executions = row[pair[0]], row[pair[1]]
        place = first.place(executions[0])
        if place in seen:
            continue
        name = written_differently(first.executions[executions[0]], second.executions[executions[1]])
        if (
            (name or _returned(alignment, pair, executions))
            and not slicer.inputs(executions)
            and not slicer.results(executions)
        ):
            seen.add(place)
            yield Step(executions, name, None, 0, is_origin=True)


def extra_draws(alignment: Alignment, pair: Pair) -> Iterator[Step]:
    """Yield for each random generator the draw of only one rank after which both drew from it in different states."""
    seen: set[str] = set()
    tried: Counter[str] = Counter()
    slicer = Slicer(alignment, pair)
    first, second = (alignment.traces[number].executions for number in pair)
    for ours, theirs in sorted((row[pair[0]], row[pair[1]]) for row in alignment.rows if {*pair} <= row.keys()):
        others = {name: before for name, before, _ in second[theirs].draws}
        for name, before, _ in first[ours].draws:
            if name not in seen and tried[name] < _MAX_DRAWS and others.get(name, before) != before:
                tried[name] += 1
                extra = [
                    step for step in slicer.slice((ours, theirs)) if step.is_leak and step.name.endswith(f":{name}")
                ]
                yield from extra[:1]
                seen.update(name for _ in extra[:1])


def _returned(alignment: Alignment, pair: Pair, executions: Executions) -> bool:
    """Return whether these statements ended calls that returned different values."""
    results = []
    for number, execution in zip(pair, executions, strict=True):
        trace = alignment.traces[number]
        activation = trace.activation_of[execution]
        if trace.members[activation][-1] != execution or (value := trace.activations[activation].returned) is None:
            return False
        results.append(value)
    return differs(*results)
