"""Decisions: the answer of the runs to each gate of the plan, and the path through the decision tree.

A certain cause takes precedence: it explains its failure, and no decision contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.comparison.contrasts import simplest
from nsa_harness.core.comparison.gates import (
    GateResult,
    answered,
    certain_cause,
    commands,
    failed,
    filled,
    from_outside,
    is_meant,
    when,
)
from nsa_harness.core.comparison.hypotheses import (
    ENVIRONMENT_HYPOTHESES,
    NCCL_HYPOTHESIS,
    Hypothesis,
    takes_our_keys,
)
from nsa_harness.core.comparison.plan_file import Condition, Gate, PlanFile, TreeQuestion
from nsa_harness.core.report import Finding, GateAnswer, GateState, Outcome, Report, TreeAnswer, TreeStep, Walk


def with_decisions(report: Report, plan: PlanFile) -> Report:
    """Return the report with the answers to the plan."""
    return replace(report, gates=decided(report.outcomes, plan), tree=walked(report.outcomes, plan))


def decided(outcomes: Sequence[Outcome], plan: PlanFile) -> tuple[GateAnswer, ...]:
    """Return every gate that applies to these runs, with its answer.

    The first gate that fired leads, unless it asks why runs fail and that failure has a certain cause.
    """
    ours = any(map(takes_our_keys, outcomes))
    asked = {name: gate for name, gate in plan.gates.items() if ours or not gate.condition.asks_of_ours}
    answers = {name: answered(gate.condition, outcomes) for name, gate in asked.items()}
    first = next((name for name, answer in answers.items() if _may_lead(asked[name], answer)), None)
    return tuple(_gate_answer(name, asked[name], answer, leads=name == first) for name, answer in answers.items())


def _may_lead(gate: Gate, answer: GateResult) -> bool:
    explained_already = answer.fails is not None and certain_cause(answer.fails) is not None
    return answer.state is GateState.FIRED and (gate.condition.goes_before_the_rest or not explained_already)


def _gate_answer(name: str, gate: Gate, answer: GateResult, *, leads: bool) -> GateAnswer:
    return GateAnswer(
        name=name,
        when=when(gate.condition),
        then=gate.then,
        because=gate.because,
        state=answer.state,
        why=answer.why,
        runs=tuple(run.dir for run in answer.runs),
        commands=commands(gate, answer) if answer.state is GateState.FIRED else (),
        leads=leads,
    )


def fired(gates: Sequence[GateAnswer]) -> tuple[GateAnswer, ...]:
    return tuple(gate for gate in gates if gate.state is GateState.FIRED)


def next_commands(gates: Sequence[GateAnswer]) -> tuple[str, ...]:
    """Return the commands of the gates, the leading gate's first; none if a certain cause takes precedence."""
    now = sorted(fired(gates), key=lambda one: not one.leads)
    return tuple(command for one in now for command in one.commands) if any(one.leads for one in now) else ()


def explained(outcomes: Sequence[Outcome]) -> tuple[tuple[Outcome, Finding], ...]:
    """Return the failures with a certain cause, each with its finding."""
    bad = sorted((outcome for outcome in outcomes if outcome.final and failed(outcome)), key=simplest)
    return tuple((outcome, sure) for outcome in bad if (sure := certain_cause(outcome)))


def _is_open(outcome: Outcome) -> bool:
    """Whether the failure is still to be explained by differences between runs."""
    return failed(outcome) and not from_outside(outcome) and certain_cause(outcome) is None


_SAID: Mapping[GateState, TreeAnswer] = {
    GateState.FIRED: TreeAnswer.YES,
    GateState.HELD: TreeAnswer.NO,
    GateState.NOT_REACHED: TreeAnswer.OPEN,
}


def walked(outcomes: Sequence[Outcome], plan: PlanFile) -> Walk | None:
    """Return the path; None if no run that can be launched again failed unexpectedly.

    Failures from outside, and those with a certain cause, do not count.
    """
    counting = [outcome for outcome in outcomes if outcome.final]
    bad = [outcome for outcome in counting if failed(outcome) and takes_our_keys(outcome) and not from_outside(outcome)]
    if not bad or not plan.questions:
        return None
    left = sorted(filter(_is_open, bad), key=simplest)
    if not left:
        return Walk(steps=(), leaf=None, made_from=_all_named(bad))
    answers = {name: _of_what_is_open(gate.condition, outcomes) for name, gate in plan.gates.items()}
    steps: list[TreeStep] = []
    used: list[Outcome] = []
    leaf: str | None = None
    for question in plan.questions:
        step = _step(question, answers, left, asked=leaf is None)
        used += answers[question.gate].runs if step.answer is not TreeAnswer.NOT_ASKED else ()
        leaf = leaf or step.leads_to
        steps.append(step)
    return Walk(steps=tuple(steps), leaf=leaf, made_from=_all_named([*left, *used]))


def _of_what_is_open(condition: Condition, outcomes: Sequence[Outcome]) -> GateResult:
    """Return the answer of the other runs. If a run with a certain cause would say yes, their silence is no "no"."""
    answer = answered(condition, [outcome for outcome in outcomes if not failed(outcome) or _is_open(outcome)])
    if answer.state is GateState.FIRED:
        return answer
    of_all = answered(condition.model_copy(update={"cause": condition.causes}), outcomes)
    if of_all.state is not GateState.FIRED:
        return answer
    return GateResult(state=GateState.NOT_REACHED, why=f"{of_all.why}: of a certain cause, and no other run answers")


def _step(
    question: TreeQuestion, answers: Mapping[str, GateResult], left: Sequence[Outcome], *, asked: bool
) -> TreeStep:
    answer = answers[question.gate]
    said = _SAID[answer.state] if asked else TreeAnswer.NOT_ASKED
    instead = {TreeAnswer.YES: question.yes_if, TreeAnswer.NO: question.no_if}.get(said, {})
    leads_to = next((leaf for gate, leaf in instead.items() if answers[gate].state is GateState.FIRED), None)
    return TreeStep(
        question=question.asks,
        answer=said,
        why=answer.why if asked else "",
        leads_to=leads_to or (question.yes if said is TreeAnswer.YES else None),
        command=_command_of(question, left) if said is TreeAnswer.OPEN else None,
    )


def _command_of(question: TreeQuestion, left: Sequence[Outcome]) -> str | None:
    fitting = next((one for one in left if is_meant(one, question.of)), None)
    return filled(question.commands[0], fitting) if fitting and question.commands else None


def _all_named(outcomes: Sequence[Outcome]) -> str:
    by_run = {outcome.dir: outcome for outcome in sorted(outcomes, key=simplest)}
    return ", ".join(f"{one.spec.scenario} {one.verdict.status.value}" for one in by_run.values())


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """The questions about runs of one program, whatever the plan."""

    hypotheses: tuple[Hypothesis, ...]
    onward: str | None = None  # the command after a single run without a command of its own


ANY_PROGRAM = Playbook(hypotheses=(NCCL_HYPOTHESIS, *ENVIRONMENT_HYPOTHESES))


def fitting(playbook: Playbook, outcomes: Sequence[Outcome]) -> Playbook:
    """Return the playbook; another program's runs get the one that fits any program."""
    return playbook if any(map(takes_our_keys, outcomes)) else ANY_PROGRAM
