"""Apply the decision rules and the decision tree in a plan file to the runs.

If the cause of a failure is certain, it takes precedence over the rules.
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
from nsa_harness.core.report import Finding, Outcome, Report, RuleAnswer, RuleState, TreeAnswer, TreeStep, Walk


def with_decisions(report: Report, plan: PlanFile) -> Report:
    """Return the report, completed with the answers to the plan's decision rules and decision tree."""
    return replace(report, gates=answer_rules(report.outcomes, plan), tree=walk_tree(report.outcomes, plan))


def answer_rules(outcomes: Sequence[Outcome], plan: PlanFile) -> tuple[RuleAnswer, ...]:
    """Return the answer to every decision rule that applies to these runs.

    `leads` is set for the rule that decides what to do now. It is the first rule that matched, except for rules about
    the reason of a failure whose cause is already certain.
    """
    has_our_runs = any(map(is_our_program, outcomes))
    rules = {name: rule for name, rule in plan.gates.items() if has_our_runs or not rule.condition.needs_our_program}
    answers = {name: answer_condition(rule.condition, outcomes) for name, rule in rules.items()}
    first = next((name for name, answer in answers.items() if _may_lead(rules[name], answer)), None)
    return tuple(_rule_answer(name, rules[name], answer, leads=name == first) for name, answer in answers.items())


def _may_lead(rule: DecisionRule, answer: RuleResult) -> bool:
    is_explained = answer.fails is not None and certain_cause(answer.fails) is not None
    return answer.state is RuleState.MATCHED and (rule.condition.takes_precedence or not is_explained)


def _rule_answer(name: str, rule: DecisionRule, answer: RuleResult, *, leads: bool) -> RuleAnswer:
    return RuleAnswer(
        name=name,
        when=condition_text(rule.condition),
        then=rule.then,
        because=rule.because,
        state=answer.state,
        why=answer.why,
        runs=tuple(run.dir for run in answer.runs),
        commands=commands(rule, answer) if answer.state is RuleState.MATCHED else (),
        leads=leads,
    )


def matched_rules(answers: Sequence[RuleAnswer]) -> tuple[RuleAnswer, ...]:
    return tuple(answer for answer in answers if answer.state is RuleState.MATCHED)


def next_commands(answers: Sequence[RuleAnswer]) -> tuple[str, ...]:
    """Return the commands suggested by the rules that matched, with those of the leading rule first."""
    in_order = sorted(matched_rules(answers), key=lambda answer: not answer.leads)
    if not any(answer.leads for answer in in_order):
        return ()
    return tuple(command for answer in in_order for command in answer.commands)


def explained_failures(outcomes: Sequence[Outcome]) -> tuple[tuple[Outcome, Finding], ...]:
    """Return each unexpected failure whose cause is certain, with the finding that explains it."""
    failures = sorted((outcome for outcome in outcomes if outcome.final and has_failed(outcome)), key=simplicity_key)
    return tuple((outcome, finding) for outcome in failures if (finding := certain_cause(outcome)))


def _is_open(outcome: Outcome) -> bool:
    """Return whether the run failed and its cause is not certain."""
    return has_failed(outcome) and not failed_from_outside(outcome) and certain_cause(outcome) is None


_TREE_ANSWERS: Mapping[RuleState, TreeAnswer] = {
    RuleState.MATCHED: TreeAnswer.YES,
    RuleState.NOT_MATCHED: TreeAnswer.NO,
    RuleState.UNANSWERED: TreeAnswer.OPEN,
}


def walk_tree(outcomes: Sequence[Outcome], plan: PlanFile) -> Walk | None:
    """Return the path through the plan's decision tree, or None if there is no failure to explain.

    Only failures of nsa-harness's own training program count, and none from outside it, such as a full disk. If the
    cause of every failure is certain, the path has no questions.
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
    """Return whether a condition is true for the runs whose failure has no certain cause."""
    answer = answer_condition(
        condition, [outcome for outcome in outcomes if not has_failed(outcome) or _is_open(outcome)]
    )
    if answer.state is RuleState.MATCHED:
        return answer
    # A run with a certain cause that meets the condition leaves it unanswered, not false.
    answer_of_all = answer_condition(condition.model_copy(update={"cause": condition.causes}), outcomes)
    if answer_of_all.state is not RuleState.MATCHED:
        return answer
    return RuleResult(
        state=RuleState.UNANSWERED, why=f"{answer_of_all.why}: the cause is certain, and no other run answers"
    )


def _step(
    question: TreeQuestion, answers: Mapping[str, RuleResult], open_runs: Sequence[Outcome], *, is_asked: bool
) -> TreeStep:
    answer = answers[question.gate]
    tree_answer = _TREE_ANSWERS[answer.state] if is_asked else TreeAnswer.NOT_ASKED
    conclusions = {TreeAnswer.YES: question.yes_if, TreeAnswer.NO: question.no_if}.get(tree_answer, {})
    leads_to = next((leaf for gate, leaf in conclusions.items() if answers[gate].state is RuleState.MATCHED), None)
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
    """The hypotheses to test in every report about one program."""

    hypotheses: tuple[Hypothesis, ...]
    onward: str | None = None  # the command to suggest after a single run that suggests none itself


ANY_PROGRAM = Playbook(hypotheses=(NCCL_HYPOTHESIS, *ENVIRONMENT_HYPOTHESES))


def playbook_for(playbook: Playbook, outcomes: Sequence[Outcome]) -> Playbook:
    """Return `playbook` if any run belongs to our own program, or else the playbook for arbitrary programs."""
    return playbook if any(map(is_our_program, outcomes)) else ANY_PROGRAM
