"""Decisions: gates with what the runs answered, and the decision tree walked over those answers.

A playbook holds what is asked of the runs of one program; the gates here fit any program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.comparison.contrasts import (
    Contrast,
    Factor,
    is_evidence,
    is_number,
    passed,
    setting,
    steady_contrasts,
)
from nsa_harness.core.comparison.hypotheses import (
    ENVIRONMENT_HYPOTHESES,
    NCCL,
    NCCL_HYPOTHESIS,
    Hypothesis,
    override_command,
    silenced,
    takes_our_keys,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.grades import CERTAIN
from nsa_harness.core.report import Outcome


class GateState(StrEnum):
    APPLIES = "applies"
    DOES_NOT_APPLY = "does not apply"
    NOT_CHECKABLE = "not checkable"


@dataclass(frozen=True, kw_only=True)
class GateAnswer:
    """What the runs say to a gate, and the run to make next."""

    state: GateState
    seen: str  # the runs it rests on; for NOT_CHECKABLE, what is missing
    command: str | None = None


Rule = Callable[[Sequence[Outcome]], GateAnswer]


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


def applies(seen: str, command: str | None = None) -> GateAnswer:
    return GateAnswer(state=GateState.APPLIES, seen=seen, command=command)


def does_not_apply(seen: str) -> GateAnswer:
    return GateAnswer(state=GateState.DOES_NOT_APPLY, seen=seen)


def not_checkable(why: str) -> GateAnswer:
    return GateAnswer(state=GateState.NOT_CHECKABLE, seen=why)


def named(outcomes: Sequence[Outcome]) -> str:
    """ "ddp_onestep HANG, ddp_static_graph PASS": each run once, the first few of them."""
    told = list(dict.fromkeys(f"{one.scenario} {one.verdict.status.value}" for one in outcomes))
    return ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")


def both(found: Sequence[Contrast]) -> str:
    return named([run for pair in found for run in (pair.control, pair.changed)])


def again(outcome: Outcome, *overrides: str) -> str | None:
    """The command for the same run with something changed; a foreign program can only be repeated."""
    return override_command(outcome.scenario, *overrides) if takes_our_keys(outcome) else outcome.repeat


def cures(factor: Factor, missing: str, *overrides: str) -> Rule:
    """The control run fails and the changed one passes."""
    return _pair_rule(factor, missing, overrides, lambda pair: failed(pair.control) and passed(pair.changed))


def breaks(factor: Factor, missing: str, *overrides: str) -> Rule:
    """The control run passes and the changed one fails."""
    return _pair_rule(factor, missing, overrides, lambda pair: passed(pair.control) and failed(pair.changed))


def _pair_rule(factor: Factor, missing: str, overrides: Sequence[str], holds: Callable[[Contrast], bool]) -> Rule:
    def rule(outcomes: Sequence[Outcome]) -> GateAnswer:
        found = steady_contrasts(factor, outcomes)
        telling = [pair for pair in found if holds(pair)]
        if telling:
            return applies(both(telling[:1]), again(telling[0].changed, *overrides))
        return (
            does_not_apply(both(found)) if found else not_checkable(silenced(factor, outcomes) or f"missing: {missing}")
        )

    return rule


_READY_TWICE = re.compile(r"ready only once|ready twice")


@dataclass(frozen=True, kw_only=True)
class Decision:
    gate: Gate
    answer: GateAnswer


def decided(outcomes: Sequence[Outcome], gates: Sequence[Gate]) -> tuple[Decision, ...]:
    """Every gate with its answer; the first one that applies is what to do now."""
    counting = sorted((one for one in outcomes if one.final), key=_plainest)
    return tuple(Decision(gate=gate, answer=gate.rule(counting)) for gate in gates)


def fired(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    return tuple(one for one in decisions if one.answer.state is GateState.APPLIES)


def _plainest(outcome: Outcome) -> tuple[object, ...]:
    return len(outcome.settings), outcome.scenario, outcome.attempt, outcome.spec_hash, outcome.dir


def _unstable(outcomes: Sequence[Outcome]) -> GateAnswer:
    flaky = [one for one in outcomes if one.flaky]
    if flaky:
        return applies(named(flaky), again(flaky[0], "--repeat=5"))
    return does_not_apply("no attempts disagree")


def _slow(outcomes: Sequence[Outcome]) -> GateAnswer:
    slow = [one for one in outcomes if failed(one) and one.verdict.cause == Cause.SLOW]
    if not slow:
        return does_not_apply("no run was still moving at its deadline")
    deadline = dict(slow[0].criteria).get("limits.deadline_s", "")
    longer = [f"limits.deadline_s={3 * float(deadline):.0f}"] if is_number(deadline) else []
    return applies(named(slow), again(slow[0], *longer))


def _ready_twice(outcomes: Sequence[Outcome]) -> GateAnswer:
    twice = [
        run
        for run in outcomes
        if failed(run) and (run.verdict.cause == Cause.READY_TWICE or _READY_TWICE.search(run.verdict.summary))
    ]
    checkpointed = [run for run in twice if _may_checkpoint(run)]
    if checkpointed:
        return applies(named(checkpointed), again(checkpointed[0], "gc.mode=non_reentrant"))
    if twice:
        return does_not_apply(f"{named(twice)}: nothing is checkpointed there, so a module is used twice")
    return does_not_apply("no run says so")


def _may_checkpoint(run: Outcome) -> bool:
    """What a foreign program does, and what a report of an earlier version was set to, is not known."""
    known = takes_our_keys(run) and run.device
    return not known or setting(run, "gc.layers") not in ("none", "")


UNSTABLE = Gate(
    name="unstable",
    when="attempts of one launch disagree",
    then="measure how often, before any row below is believed",
    rule=_unstable,
)
SLOW = Gate(
    name="slow",
    when="a run still moves at its deadline",
    then="it is slow, not stuck: give it time and profile it",
    rule=_slow,
)
NCCL_ONLY = Gate(
    name="nccl_only",
    when="nccl fails and gloo passes",
    then="it is NCCL's transport: run it without P2P",
    rule=breaks(NCCL, "the same run over gloo and over nccl", "run.env.NCCL_P2P_DISABLE=1"),
)
READY_TWICE = Gate(
    name="ready_twice",
    when="a parameter is marked ready twice",
    then="reentrant gradient checkpointing under DDP: use the non-reentrant form",
    rule=_ready_twice,
)


def gloo_too(*overrides: str) -> Gate:
    """`overrides`: what to change next in a run over gloo that failed."""
    missing = "two ranks over gloo, needs.backend=gloo"
    return Gate(
        name="gloo_too",
        when="a run over gloo fails too",
        then="it is not NCCL: autograd or the graph; take DDP's reducer away next",
        rule=_fails_too(lambda run: run.backend == "gloo" and run.ranks > 1, missing, overrides),
    )


def one_process(alone: Sequence[str], *overrides: str) -> Gate:
    """`alone`: what makes a run in one process of another one. `overrides`: what to change next where that failed."""
    missing = f"a run in one process, {' '.join(alone)}"
    return Gate(
        name="one_process",
        when="a run in one process fails too",
        then="it needs neither DDP nor a second rank: look at the model",
        rule=_fails_too(lambda run: run.ranks == 1, missing, overrides),
    )


def _fails_too(asked: Callable[[Outcome], bool], missing: str, overrides: Sequence[str]) -> Rule:
    def rule(outcomes: Sequence[Outcome]) -> GateAnswer:
        runs = [run for run in outcomes if is_evidence(run) and asked(run)]
        bad = [run for run in runs if failed(run)]
        if bad:
            return applies(named(bad), again(bad[0], *overrides))
        return does_not_apply(named(runs)) if runs else not_checkable(f"missing: {missing}")

    return rule


class TreeAnswer(StrEnum):
    YES = "yes"
    NO = "no"
    OPEN = "open"  # no run answers it
    NOT_ASKED = "not asked"  # the path has ended before


_SAID = {
    GateState.APPLIES: TreeAnswer.YES,
    GateState.DOES_NOT_APPLY: TreeAnswer.NO,
    GateState.NOT_CHECKABLE: TreeAnswer.OPEN,
}


@dataclass(frozen=True, kw_only=True)
class TreeQuestion:
    gate: str  # whose rule answers it
    text: str
    leaf: str  # where a yes leads
    fits: Callable[[Outcome], bool]  # a failed run that can be asked again
    changes: tuple[str, ...]  # what makes the missing runs out of it
    or_else: tuple[str, str] | None = None  # of the last question: a gate, and where a no leads if it applies


@dataclass(frozen=True, kw_only=True)
class TreeStep:
    question: TreeQuestion
    said: TreeAnswer
    answer: GateAnswer
    command: str | None  # of an open question: what answers it


@dataclass(frozen=True, kw_only=True)
class Walk:
    steps: tuple[TreeStep, ...]
    leaf: str | None  # None where every answered question was answered no, and that leads nowhere
    certain_already: tuple[str, ...]  # causes that a rule names with certainty: those need no tree

    @property
    def open(self) -> tuple[TreeStep, ...]:
        return tuple(step for step in self.steps if step.said is TreeAnswer.OPEN)


def walked(outcomes: Sequence[Outcome], questions: Sequence[TreeQuestion], gates: Sequence[Gate]) -> Walk | None:
    """None where no run that can be asked again failed unannounced: then there is nothing to ask."""
    counting = [one for one in outcomes if one.final]
    bad = sorted((one for one in counting if failed(one) and takes_our_keys(one)), key=_plainest)
    if not bad or not questions:
        return None
    answers = {one.gate.name: one.answer for one in decided(counting, gates)}
    steps: list[TreeStep] = []
    leaf: str | None = None
    for question in questions:
        said = TreeAnswer.NOT_ASKED if leaf else _SAID[answers[question.gate].state]
        command = _command(question, bad) if said is TreeAnswer.OPEN else None
        steps.append(TreeStep(question=question, said=said, answer=answers[question.gate], command=command))
        leaf = question.leaf if said is TreeAnswer.YES else leaf
    gate, otherwise = questions[-1].or_else or (None, None)
    if leaf is None and steps[-1].said is TreeAnswer.NO and gate and answers[gate].state is GateState.APPLIES:
        leaf = otherwise
    return Walk(steps=tuple(steps), leaf=leaf, certain_already=_certain(bad))


def _command(question: TreeQuestion, bad: Sequence[Outcome]) -> str | None:
    asked = next(filter(question.fits, bad), None)
    return override_command(asked.scenario, *question.changes) if asked else None


def _certain(bad: Sequence[Outcome]) -> tuple[str, ...]:
    """Empty unless all of them are explained."""
    sure = [one for one in bad if one.findings[:1] and one.findings[0].confidence >= CERTAIN]
    causes = {one.verdict.cause for one in sure if one.verdict.cause not in (None, Cause.UNKNOWN, Cause.EXCEPTION)}
    return tuple(sorted(filter(None, causes))) if len(sure) == len(bad) else ()


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """What was agreed to ask of the runs of one program: hypotheses, gates, the weightiest first, a decision tree."""

    hypotheses: tuple[Hypothesis, ...]
    gates: tuple[Gate, ...]
    questions: tuple[TreeQuestion, ...] = ()
    onward: str | None = None  # the command after a single run that asks for none itself


ANY_PROGRAM = Playbook(
    hypotheses=(NCCL_HYPOTHESIS, *ENVIRONMENT_HYPOTHESES),
    gates=(UNSTABLE, SLOW, gloo_too(), NCCL_ONLY, READY_TWICE, one_process(("run.ranks=1",))),
)


def fitting(playbook: Playbook, outcomes: Sequence[Outcome]) -> Playbook:
    """The playbook of our program only where it ran: of another program's runs is asked what fits any program."""
    return playbook if any(map(takes_our_keys, outcomes)) else ANY_PROGRAM
