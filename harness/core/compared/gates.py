"""Gates: what a gate is, what runs answer to it, and the answers that a pair of runs gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.core.compared.comparison import override_command, silenced, takes_our_keys
from harness.core.compared.configuration import Contrast, Pair, is_evidence, pairs, passed
from harness.core.report import Outcome


class State(StrEnum):
    APPLIES = "applies"
    DOES_NOT_APPLY = "does not apply"
    NOT_CHECKABLE = "not checkable"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the runs say to a gate, and the run to make next."""

    state: State
    seen: str  # the runs it rests on; for NOT_CHECKABLE, what is missing
    command: str | None = None


Rule = Callable[[Sequence[Outcome]], Answer]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """If `when`, then `then`: agreed before the run."""

    name: str
    when: str
    then: str
    rule: Rule


def failed(outcome: Outcome) -> bool:
    """A gate asks for failures that nobody announced; an announced one decides nothing new."""
    return is_evidence(outcome) and not passed(outcome) and not outcome.expected


def applies(seen: str, command: str | None = None) -> Answer:
    return Answer(state=State.APPLIES, seen=seen, command=command)


def does_not_apply(seen: str) -> Answer:
    return Answer(state=State.DOES_NOT_APPLY, seen=seen)


def not_checkable(why: str) -> Answer:
    return Answer(state=State.NOT_CHECKABLE, seen=why)


def named(outcomes: Sequence[Outcome]) -> str:
    """ "ddp_onestep HANG, ddp_static_graph PASS": each run once, the first few of them."""
    told = list(dict.fromkeys(f"{one.scenario} {one.verdict.status.value}" for one in outcomes))
    return ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")


def both(found: Sequence[Pair]) -> str:
    return named([run for pair in found for run in (pair.control, pair.changed)])


def again(outcome: Outcome, *overrides: str) -> str | None:
    """The command for the same run with something changed; a foreign program can only be repeated."""
    return override_command(outcome.scenario, *overrides) if takes_our_keys(outcome) else outcome.repeat


def cures(contrast: Contrast, missing: str, *overrides: str) -> Rule:
    """The control run fails and the changed one passes."""
    return _pair_rule(contrast, missing, overrides, lambda pair: failed(pair.control) and passed(pair.changed))


def breaks(contrast: Contrast, missing: str, *overrides: str) -> Rule:
    """The control run passes and the changed one fails."""
    return _pair_rule(contrast, missing, overrides, lambda pair: passed(pair.control) and failed(pair.changed))


def _pair_rule(contrast: Contrast, missing: str, overrides: Sequence[str], holds: Callable[[Pair], bool]) -> Rule:
    def rule(outcomes: Sequence[Outcome]) -> Answer:
        found = pairs(contrast, outcomes)
        telling = [pair for pair in found if holds(pair)]
        if telling:
            return applies(both(telling[:1]), again(telling[0].changed, *overrides))
        return (
            does_not_apply(both(found))
            if found
            else not_checkable(silenced(contrast, outcomes) or f"missing: {missing}")
        )

    return rule
