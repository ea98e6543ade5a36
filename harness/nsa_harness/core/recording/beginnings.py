"""Find the statements at which data of the ranks first make a number, a length or a decision differ.

The ranks rightly have different data, so the contents of tensors and containers differ in every healthy run. A program
goes wrong where such contents first decide something: a number is computed from them, a container gets a length by
them, or a condition tests them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from nsa_harness.core.recording.recording import Execution, Value, differs
from nsa_harness.core.recording.slicing import Pair, Slicer, Step
from nsa_harness.core.recording.trace import Trace

_SIZE = re.compile(r"\w+ (\[[\d, ]*\])|(\d+ items)")
_RANK = re.compile(r"rank|member|stage|worker|shard|index", re.IGNORECASE)
_SCALARS = ("int", "float", "bool", "str", "NoneType")
_SETTINGS = ("dict", "Namespace", "SimpleNamespace")  # types whose contents are usually settings, and no data


def form_of(value: Value) -> str:
    """Return what of a value can decide something by itself: a number, a text or a size. Return "" if it is unknown.

    A tensor of one element is data, such as a loss, until the program makes a number of it.
    """
    if value.type in _SCALARS or value.type in _SETTINGS or value.text.startswith("("):  # a tuple is often a key
        return value.text
    if match := _SIZE.match(value.text):
        return match[1] or match[2]
    try:
        made = ast.literal_eval(value.text) if value.text[:1] in ("[", "{") else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    return f"{len(made)} items" if isinstance(made, (list, dict, set)) else ""


class Beginnings:
    """The statements of two traces at which a number, a length or a decision begins to differ."""

    def __init__(self, traces: Sequence[Trace], pair: Pair, slicer: Slicer) -> None:
        self.pair = pair
        self._traces = tuple(traces[number] for number in pair)
        self._slicer = slicer
        self.is_complete = True  # False: a value that is not known may also have led to the division

    def of(self, executions: tuple[int, int], steps: Sequence[Step]) -> Iterator[Step | None]:
        """Yield the steps of the slice of `executions` at which a form begins to differ, nearest first.

        None stands for `executions` themselves. Steps whose values are not known are followed.
        """
        if self._is_first(executions):
            yield None
            return
        followed: set[Step | None] = {None}
        for step in steps:
            if step.previous not in followed or (makes := self._makes(step)) is False:
                self.is_complete = self.is_complete and not (step.previous in followed and self._is_unknown_item(step))
                continue
            followed.add(step)
            first, second = step.executions
            if not makes or first is None or second is None or self._is_rank_itself(step, (first, second)):
                continue
            if self._is_first((first, second)):
                yield step

    def is_of_known_data(self, executions: tuple[int, int]) -> bool:
        """Return whether the recorded data explain a difference, and no object that could not be read does.

        Some values that the executions read differ, or all of them are known.
        """
        ours, theirs = (dict(self._recorded(side, execution).reads) for side, execution in enumerate(executions))
        common = [name for name in ours if name in theirs]
        if any(differs(ours[name], theirs[name]) for name in common):
            return True
        return all(ours[name].text and theirs[name].text for name in common)

    def _is_rank_itself(self, step: Step, executions: tuple[int, int]) -> bool:
        """Return whether a step only reads or passes on the number of the rank."""
        values = [self._value(side, execution, step.name) for side, execution in enumerate(executions)]
        return [value.text if value else "" for value in values] == [str(trace.rank) for trace in self._traces]

    def _makes(self, step: Step) -> bool | None:
        """Return whether the ranks differ in the form of what a step makes, or in what it decides. None: unknown."""
        first, second = step.executions
        if first is None or second is None:
            return None
        if not step.name:
            returned = [self.returned(side, execution) for side, execution in enumerate((first, second))]
            if returned[0] is None or returned[1] is None:
                return True
            return self._differ(returned[0], returned[1]) if all(map(form_of, filter(None, returned))) else None
        ours, theirs = (self._value(side, execution, step.name) for side, execution in enumerate((first, second)))
        if ours is None or theirs is None or not form_of(ours) or not form_of(theirs):
            return False if self._is_unknown_item(step) else None
        return self._differ(ours, theirs)

    def _is_unknown_item(self, step: Step) -> bool:
        """Return whether a step made an item of a container, such as of a batch, whose value is not known."""
        if not step.name.endswith("]") or None in step.executions:
            return False
        side, execution = step.execution
        value = self._value(side, execution, step.name)
        return value is None or not form_of(value)

    def returned(self, side: int, execution: int) -> Value | None:
        """Return what an activation returned of which this is the last execution, or None."""
        trace = self._traces[side]
        activation = trace.activation_of[execution]
        return trace.activations[activation].returned if trace.members[activation][-1] == execution else None

    def _value(self, side: int, execution: int, name: str) -> Value | None:
        recorded = self._traces[side].executions[execution]
        found = dict(recorded.reads).get(name)
        return dict(recorded.writes).get(name, found)

    def _is_first(self, executions: tuple[int, int]) -> bool:
        """Return whether nothing that the executions read, or that their calls return, differs in its form."""
        if self._reads_differ([self._recorded(side, execution) for side, execution in enumerate(executions)]):
            return False
        calls = [trace.calls.get(execution, ()) for trace, execution in zip(self._traces, executions, strict=True)]
        for made in zip(*calls, strict=False):
            ours, theirs = (trace.activations[call].returned for trace, call in zip(self._traces, made, strict=True))
            if ours is not None and theirs is not None and self._differ(ours, theirs):
                return False
        return True

    def _recorded(self, side: int, execution: int) -> Execution:
        return self._traces[side].executions[execution]

    def _reads_differ(self, recorded: Sequence[Execution]) -> bool:
        others = dict(recorded[1].reads)
        return any(
            name in others and self._differ(value, others[name]) and not self._is_rank(name, value, others[name])
            for name, value in recorded[0].reads
        )

    def _differ(self, ours: Value, theirs: Value) -> bool:
        forms = form_of(ours), form_of(theirs)
        return all(forms) and forms[0] != forms[1]

    def _is_rank(self, name: str, ours: Value, theirs: Value) -> bool:
        """Return whether a name has the number of the rank. Two small numbers can equal it by chance."""
        ranks = [str(trace.rank) for trace in self._traces]
        return [ours.text, theirs.text] == ranks and (_RANK.search(name) is not None or max(ranks) > "1")
