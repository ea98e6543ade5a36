"""Decide a plan: answer each of its gates from the runs, and walk its decision tree.

A certain cause takes precedence: it explains its failure, and no decision contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.comparison.contrasts import simplicity_key
from nsa_harness.core.comparison.decision_rules import (
    RuleResult,
    answer_condition,
    certain_cause,
    commands,
    condition_text,
    failed_from_outside,
    fill_command,
    has_failed,
    matches_filter,
)
from nsa_harness.core.comparison.hypotheses import (
    ENVIRONMENT_HYPOTHESES,
    NCCL_HYPOTHESIS,
    Hypothesis,
    is_our_program,
)
from nsa_harness.core.comparison.plan_file import Condition, DecisionRule, PlanFile, TreeQuestion
from nsa_harness.core.report import Finding, GateAnswer, GateState, Outcome, Report, TreeAnswer, TreeStep, Walk


def with_decisions(report: Report, plan: PlanFile) -> Report:
    """Return the report with the answers to the plan."""
    return replace(report, gates=answer_rules(report.outcomes, plan), tree=walk_tree(report.outcomes, plan))


def answer_rules(outcomes: Sequence[Outcome], plan: PlanFile) -> tuple[GateAnswer, ...]:
    """Return the answer to every gate that applies to these runs.

    The first gate that fired leads, unless it asks why a run failed and the cause of that failure is certain.
    """
    has_our_runs = any(map(is_our_program, outcomes))
    gates = {name: gate for name, gate in plan.gates.items() if has_our_runs or not gate.condition.needs_our_program}
    answers = {name: answer_condition(gate.condition, outcomes) for name, gate in gates.items()}
    first = next((name for name, answer in answers.items() if _may_lead(gates[name], answer)), None)
    return tuple(_rule_answer(name, gates[name], answer, leads=name == first) for name, answer in answers.items())


def _may_lead(gate: DecisionRule, answer: RuleResult) -> bool:
    is_explained = answer.fails is not None and certain_cause(answer.fails) is not None
    return answer.state is GateState.FIRED and (gate.condition.takes_precedence or not is_explained)


def _rule_answer(name: str, gate: DecisionRule, answer: RuleResult, *, leads: bool) -> GateAnswer:
    return GateAnswer(
        name=name,
        when=condition_text(gate.condition),
        then=gate.then,
        because=gate.because,
        state=answer.state,
        why=answer.why,
        runs=tuple(run.dir for run in answer.runs),
        commands=commands(gate, answer) if answer.state is GateState.FIRED else (),
        leads=leads,
    )


def fired_rules(gates: Sequence[GateAnswer]) -> tuple[GateAnswer, ...]:
    return tuple(gate for gate in gates if gate.state is GateState.FIRED)


def next_commands(gates: Sequence[GateAnswer]) -> tuple[str, ...]:
    """Return the commands of the gates that fired, the leading gate's first; none if no gate leads."""
    fired = sorted(fired_rules(gates), key=lambda gate: not gate.leads)
    return tuple(command for gate in fired for command in gate.commands) if any(gate.leads for gate in fired) else ()


def explained_failures(outcomes: Sequence[Outcome]) -> tuple[tuple[Outcome, Finding], ...]:
    """Return the failures with a certain cause, each with its finding."""
    failures = sorted((outcome for outcome in outcomes if outcome.final and has_failed(outcome)), key=simplicity_key)
    return tuple((outcome, finding) for outcome in failures if (finding := certain_cause(outcome)))


def _is_open(outcome: Outcome) -> bool:
    """Whether the failure is unexplained, so that only differences between runs can explain it."""
    return has_failed(outcome) and not failed_from_outside(outcome) and certain_cause(outcome) is None


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
    failures = [
        outcome
        for outcome in counting
        if has_failed(outcome) and is_our_program(outcome) and not failed_from_outside(outcome)
    ]
    if not failures or not plan.questions:
        return None
    open_runs = sorted(filter(_is_open, failures), key=simplicity_key)
    if not open_runs:
        return Walk(steps=(), leaf=None, made_from=_run_names(failures))
    answers = {name: _answer_of_open_runs(gate.condition, outcomes) for name, gate in plan.gates.items()}
    steps: list[TreeStep] = []
    used_runs: list[Outcome] = []
    leaf: str | None = None
    for question in plan.questions:
        step = _step(question, answers, open_runs, is_asked=leaf is None)
        used_runs += answers[question.gate].runs if step.answer is not TreeAnswer.NOT_ASKED else ()
        leaf = leaf or step.leads_to
        steps.append(step)
    return Walk(steps=tuple(steps), leaf=leaf, made_from=_run_names([*open_runs, *used_runs]))


def _answer_of_open_runs(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    """Return the answer of the runs without a certain cause.

    It is not "no" if a run with a certain cause would answer "yes": then the answer is open.
    """
    answer = answer_condition(
        condition, [outcome for outcome in outcomes if not has_failed(outcome) or _is_open(outcome)]
    )
    if answer.state is GateState.FIRED:
        return answer
    answer_of_all = answer_condition(condition.model_copy(update={"cause": condition.causes}), outcomes)
    if answer_of_all.state is not GateState.FIRED:
        return answer
    return RuleResult(
        state=GateState.NOT_REACHED, why=f"{answer_of_all.why}: of a certain cause, and no other run answers"
    )


def _step(
    question: TreeQuestion, answers: Mapping[str, RuleResult], open_runs: Sequence[Outcome], *, is_asked: bool
) -> TreeStep:
    answer = answers[question.gate]
    tree_answer = _TREE_ANSWERS[answer.state] if is_asked else TreeAnswer.NOT_ASKED
    conclusions = {TreeAnswer.YES: question.yes_if, TreeAnswer.NO: question.no_if}.get(tree_answer, {})
    leads_to = next((leaf for gate, leaf in conclusions.items() if answers[gate].state is GateState.FIRED), None)
    return TreeStep(
        question=question.asks,
        answer=tree_answer,
        why=answer.why if is_asked else "",
        leads_to=leads_to or (question.yes if tree_answer is TreeAnswer.YES else None),
        command=_command_of(question, open_runs) if tree_answer is TreeAnswer.OPEN else None,
    )


def _command_of(question: TreeQuestion, open_runs: Sequence[Outcome]) -> str | None:
    run = next((run for run in open_runs if matches_filter(run, question.of)), None)
    return fill_command(question.commands[0], run) if run and question.commands else None


def _run_names(outcomes: Sequence[Outcome]) -> str:
    by_run = {outcome.dir: outcome for outcome in sorted(outcomes, key=simplicity_key)}
    return ", ".join(f"{run.spec.scenario} {run.verdict.status.value}" for run in by_run.values())


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """The hypotheses about runs of one program, which are tested with any plan."""

    hypotheses: tuple[Hypothesis, ...]
    onward: str | None = None  # the command after a single run without a command of its own


ANY_PROGRAM = Playbook(hypotheses=(NCCL_HYPOTHESIS, *ENVIRONMENT_HYPOTHESES))


def playbook_for(playbook: Playbook, outcomes: Sequence[Outcome]) -> Playbook:
    """Return the playbook if a run belongs to our own program, else the one for any program."""
    return playbook if any(map(is_our_program, outcomes)) else ANY_PROGRAM
