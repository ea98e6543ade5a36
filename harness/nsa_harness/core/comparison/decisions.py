"""Decide a plan: answer each of its gates from the runs, and walk its decision tree.

A certain cause takes precedence: it explains its failure, and no decision contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.comparison.contrasts import simplest
from nsa_harness.core.comparison.gates import (
    GateResult,
    answer_condition,
    certain_cause,
    commands,
    failed,
    fill_command,
    from_outside,
    matches_filter,
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
    return replace(report, gates=answer_gates(report.outcomes, plan), tree=walk_tree(report.outcomes, plan))


def answer_gates(outcomes: Sequence[Outcome], plan: PlanFile) -> tuple[GateAnswer, ...]:
    """Return the answer to every gate that applies to these runs.

    The first gate that fired leads, unless it asks why a run failed and the cause of that failure is certain.
    """
    ours = any(map(takes_our_keys, outcomes))
    gates = {name: gate for name, gate in plan.gates.items() if ours or not gate.condition.asks_of_ours}
    answers = {name: answer_condition(gate.condition, outcomes) for name, gate in gates.items()}
    first = next((name for name, answer in answers.items() if _may_lead(gates[name], answer)), None)
    return tuple(_gate_answer(name, gates[name], answer, leads=name == first) for name, answer in answers.items())


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


def fired_gates(gates: Sequence[GateAnswer]) -> tuple[GateAnswer, ...]:
    return tuple(gate for gate in gates if gate.state is GateState.FIRED)


def next_commands(gates: Sequence[GateAnswer]) -> tuple[str, ...]:
    """Return the commands of the gates that fired, the leading gate's first; none if no gate leads."""
    now = sorted(fired_gates(gates), key=lambda gate: not gate.leads)
    return tuple(command for gate in now for command in gate.commands) if any(gate.leads for gate in now) else ()


def explained_failures(outcomes: Sequence[Outcome]) -> tuple[tuple[Outcome, Finding], ...]:
    """Return the failures with a certain cause, each with its finding."""
    bad = sorted((outcome for outcome in outcomes if outcome.final and failed(outcome)), key=simplest)
    return tuple((outcome, sure) for outcome in bad if (sure := certain_cause(outcome)))


def _is_open(outcome: Outcome) -> bool:
    """Whether the failure is unexplained, so that only differences between runs can explain it."""
    return failed(outcome) and not from_outside(outcome) and certain_cause(outcome) is None


_TREE_ANSWERS: Mapping[GateState, TreeAnswer] = {
    GateState.FIRED: TreeAnswer.YES,
    GateState.HELD: TreeAnswer.NO,
    GateState.NOT_REACHED: TreeAnswer.OPEN,
}


def walk_tree(outcomes: Sequence[Outcome], plan: PlanFile) -> Walk | None:
    """Return the path through the decision tree; None if no run of our own program failed unexpectedly.

    Failures from outside the program do not count. If every failure has a certain cause, the path is empty.
    """
    counting = [outcome for outcome in outcomes if outcome.final]
    bad = [outcome for outcome in counting if failed(outcome) and takes_our_keys(outcome) and not from_outside(outcome)]
    if not bad or not plan.questions:
        return None
    left = sorted(filter(_is_open, bad), key=simplest)
    if not left:
        return Walk(steps=(), leaf=None, made_from=_run_names(bad))
    answers = {name: _answer_of_open_runs(gate.condition, outcomes) for name, gate in plan.gates.items()}
    steps: list[TreeStep] = []
    used: list[Outcome] = []
    leaf: str | None = None
    for question in plan.questions:
        step = _step(question, answers, left, asked=leaf is None)
        used += answers[question.gate].runs if step.answer is not TreeAnswer.NOT_ASKED else ()
        leaf = leaf or step.leads_to
        steps.append(step)
    return Walk(steps=tuple(steps), leaf=leaf, made_from=_run_names([*left, *used]))


def _answer_of_open_runs(condition: Condition, outcomes: Sequence[Outcome]) -> GateResult:
    """Return the answer of the runs without a certain cause.

    It is not "no" if a run with a certain cause would answer "yes": then the answer is open.
    """
    answer = answer_condition(condition, [outcome for outcome in outcomes if not failed(outcome) or _is_open(outcome)])
    if answer.state is GateState.FIRED:
        return answer
    of_all = answer_condition(condition.model_copy(update={"cause": condition.causes}), outcomes)
    if of_all.state is not GateState.FIRED:
        return answer
    return GateResult(state=GateState.NOT_REACHED, why=f"{of_all.why}: of a certain cause, and no other run answers")


def _step(
    question: TreeQuestion, answers: Mapping[str, GateResult], left: Sequence[Outcome], *, asked: bool
) -> TreeStep:
    answer = answers[question.gate]
    tree_answer = _TREE_ANSWERS[answer.state] if asked else TreeAnswer.NOT_ASKED
    instead = {TreeAnswer.YES: question.yes_if, TreeAnswer.NO: question.no_if}.get(tree_answer, {})
    leads_to = next((leaf for gate, leaf in instead.items() if answers[gate].state is GateState.FIRED), None)
    return TreeStep(
        question=question.asks,
        answer=tree_answer,
        why=answer.why if asked else "",
        leads_to=leads_to or (question.yes if tree_answer is TreeAnswer.YES else None),
        command=_command_of(question, left) if tree_answer is TreeAnswer.OPEN else None,
    )


def _command_of(question: TreeQuestion, left: Sequence[Outcome]) -> str | None:
    fitting = next((run for run in left if matches_filter(run, question.of)), None)
    return fill_command(question.commands[0], fitting) if fitting and question.commands else None


def _run_names(outcomes: Sequence[Outcome]) -> str:
    by_run = {outcome.dir: outcome for outcome in sorted(outcomes, key=simplest)}
    return ", ".join(f"{run.spec.scenario} {run.verdict.status.value}" for run in by_run.values())


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """The hypotheses about runs of one program, which are tested with any plan."""

    hypotheses: tuple[Hypothesis, ...]
    onward: str | None = None  # the command after a single run without a command of its own


ANY_PROGRAM = Playbook(hypotheses=(NCCL_HYPOTHESIS, *ENVIRONMENT_HYPOTHESES))


def playbook_for(playbook: Playbook, outcomes: Sequence[Outcome]) -> Playbook:
    """Return the playbook if a run belongs to our own program, else the one for any program."""
    return playbook if any(map(takes_our_keys, outcomes)) else ANY_PROGRAM
