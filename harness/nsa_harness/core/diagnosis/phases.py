"""The phases in which a cause is looked for, and the rules that belong to each.

Phases are asked one after the other, and the first answer is the cause. Within a phase no position decides: a rule says
which others it outranks, and a test fails where two rules of a phase answer one case and neither outranks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from graphlib import TopologicalSorter
from typing import TypeVarTuple

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import Case, Explanation

Explain = Callable[[Case], "Explanation | None"]
Given = TypeVarTuple("Given")


class RulePhase(StrEnum):
    """In the order in which they are asked.

    A failure that says why goes first: who waits for that rank follows from it. A wait in which ranks make or find each
    other goes before what they call, since it moves their calls apart. How a rank ended without a word comes last of
    all, because ranks that do not go together end each other.
    """

    NOT_JUDGED = "not judged"
    FIRST_FAILURE = "first failure in time"
    WAIT_CYCLE = "wait cycle outside collectives"
    RANKS_DIFFER = "ranks differ"
    WAITS_BY_ITSELF = "a rank waits by itself"
    SLOW = "slow"
    FALLBACK = "fallback"  # how the first one ended, else what was seen
    SILENT = "silent faults"  # noted beside any verdict; which one outranks says which is told first


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """From a case to an explanation, or nothing. It works from a mechanism, not from the texts of known programs."""

    name: str
    phase: RulePhase
    causes: tuple[Cause, ...]  # that it can name
    outranks: tuple[str, ...]  # rules of its phase, by name: where both answer, this one counts
    outranked_by: tuple[str, ...]  # the same said from below, of a rule that the other one cannot know
    explain: Explain

    def __call__(self, case: Case) -> Explanation | None:
        return self.explain(case)


def rule(
    phase: RulePhase, *causes: Cause, outranks: tuple[str, ...] = (), outranked_by: tuple[str, ...] = ()
) -> Callable[[Explain], Rule]:
    """Makes a rule of a function; its name is that of the function."""

    def made(explain: Explain) -> Rule:
        return Rule(
            name=explain.__name__,
            phase=phase,
            causes=causes,
            outranks=outranks,
            outranked_by=outranked_by,
            explain=explain,
        )

    return made


def given(
    find: Callable[[Case], tuple[*Given] | None],
) -> Callable[[Callable[[Case, *Given], Explanation | None]], Explain]:
    """Asks a function only where `find` finds something, and hands it what that is."""

    def made(explain: Callable[[Case, *Given], Explanation | None]) -> Explain:
        @wraps(explain, assigned=("__module__", "__name__", "__doc__"))
        def asked(case: Case) -> Explanation | None:
            found = find(case)
            return None if found is None else explain(case, *found)

        return asked

    return made


def rule_given(
    find: Callable[[Case], tuple[*Given] | None], phase: RulePhase, *causes: Cause, outranks: tuple[str, ...] = ()
) -> Callable[[Callable[[Case, *Given], Explanation | None]], Rule]:
    """Makes a rule of a function that is asked only where something is found, and is handed what that is."""
    return lambda explain: rule(phase, *causes, outranks=outranks)(given(find)(explain))


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Of one phase, each before those that it outranks. Raises CycleError, and KeyError for a rule of no such name."""
    by_name = {one.name: one for one in rules}
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(by_name, ()))
    for one in by_name.values():
        for name in one.outranks:
            sorter.add(by_name[name].name, one.name)
        sorter.add(one.name, *(by_name[name].name for name in one.outranked_by))
    return tuple(by_name[name] for name in sorter.static_order())
