"""Answer the gates of a plan: one rule for each form of condition, and the condition as text."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.comparison.contrasts import (
    EVERY_RUN,
    NCCL_SETTINGS,
    RELATIONS,
    Comparison,
    Contrast,
    KeyFilter,
    RunFilter,
    ValueFilter,
    Variable,
    has_passed,
    is_number,
    same_value,
    setting,
    simplicity_key,
    steady_contrasts,
)
from nsa_harness.core.comparison.hypotheses import is_our_program, reason_not_judged
from nsa_harness.core.comparison.plan_file import (
    FAILS,
    PASSES,
    PLACEHOLDER,
    Condition,
    ConditionForm,
    DecisionRule,
    is_our_key,
)
from nsa_harness.core.diagnosis.causes import Cause, DecisionTreePolicy, row_of
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.report import Finding, GateState, Outcome, Status


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    state: GateState
    why: str
    runs: tuple[Outcome, ...] = ()
    fails: Outcome | None = None  # the runs for the placeholders {fails} and {passes} of a command
    passes: Outcome | None = None


def _is_judged(outcome: Outcome) -> bool:
    """Whether the run is the final attempt, with a verdict on which its attempts agree."""
    return outcome.final and not outcome.flaky and outcome.verdict.status in (Status.PASS, Status.FAIL, Status.HANG)


def has_failed(outcome: Outcome) -> bool:
    """Whether the run failed unexpectedly. An expected failure decides nothing new."""
    return _is_judged(outcome) and not has_passed(outcome) and not outcome.expected


def failed_from_outside(outcome: Outcome) -> bool:
    """Whether the run failed for a reason outside the program, such as a full disk."""
    return has_failed(outcome) and row_of(outcome.verdict.cause).enters_tree is DecisionTreePolicy.NEVER


def certain_cause(outcome: Outcome) -> Finding | None:
    """Return the finding that explains a failure, if the evidence allows no other reading."""
    cause = outcome.verdict.cause
    if not has_failed(outcome) or row_of(cause).enters_tree is not DecisionTreePolicy.UNEXPLAINED:
        return None
    return next(
        (finding for finding in outcome.findings[:1] if finding.code == cause and finding.confidence >= CERTAIN), None
    )


def outcome_names(outcomes: Iterable[Outcome]) -> str:
    """Return the first few runs as text: "ddp_onestep HANG, ddp_static_graph PASS"."""
    names = list(dict.fromkeys(f"{outcome.spec.scenario} {outcome.verdict.status.value}" for outcome in outcomes))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def answer_condition(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    """Return the answer of the final attempts among `outcomes`. Their order does not matter."""
    runs_in_order = sorted(
        (outcome for outcome in outcomes if matches_filter(outcome, condition.where, unknown=True)), key=simplicity_key
    )
    return _RULES[condition.form](condition, runs_in_order)


def commands(gate: DecisionRule, answer: RuleResult) -> tuple[str, ...]:
    """Return the commands of a gate that fired."""
    filled_commands = (_fill(words, answer, _names_its_runs(gate.condition)) for words in gate.commands)
    return tuple(dict.fromkeys(filter(None, filled_commands)))


def _flaky(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    runs = _final_runs(condition.runs, outcomes)
    flaky = [outcome for outcome in runs if outcome.flaky]
    if flaky:
        return _fired(flaky, fails=flaky[0])
    return _held("no attempts disagree", runs) if runs else _not_reached(f"missing: {_runs_text(condition.runs)}")


def _fails(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    runs = _final_runs(condition.runs, outcomes)
    bad = [outcome for outcome in runs if _fails_as_required(condition, outcome)]
    if bad:
        return _fired(bad, fails=bad[0])
    if condition.causes:
        qualifier = f" with {_values_text(condition.where)}" if condition.where.values else ""
        return _held(f"no run{qualifier} ended so", [outcome for outcome in runs if _is_judged(outcome)])
    judged_runs = [outcome for outcome in runs if _is_judged(outcome)]
    explained_runs = [outcome for outcome in judged_runs if condition.uncertain and certain_cause(outcome)]
    if explained_runs:
        return _held(f"{outcome_names(explained_runs)}: {_causes(explained_runs)} is certain", explained_runs)
    counting = [outcome for outcome in judged_runs if not failed_from_outside(outcome)]
    return _held(outcome_names(counting), counting) if counting else _not_reached(_why_silent(condition, runs))


def _passes(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    runs = _final_runs(condition.runs, outcomes)
    judged_runs = [outcome for outcome in runs if _is_judged(outcome) and not failed_from_outside(outcome)]
    bad = [outcome for outcome in judged_runs if not has_passed(outcome)]
    if bad:
        return _held(outcome_names(bad), bad)
    missing_names = [
        name for name in condition.runs.scenarios if not any(_is_named(outcome, name) for outcome in judged_runs)
    ]
    if missing_names or not judged_runs:
        return _not_reached(
            _why_silent(condition, [outcome for outcome in runs if outcome not in judged_runs], missing_names)
        )
    return _fired(judged_runs, passes=judged_runs[0])


def _contrast(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    pairs = _pairs(condition, outcomes)
    deciding = [
        pair for pair in pairs if _fails_as_required(condition, pair.changed) and _CONTROL_FITS[condition.form](pair)
    ]
    if deciding:
        first = min(deciding, key=lambda pair: certain_cause(pair.changed) is not None)
        return _fired(_runs_of(deciding), fails=first.changed, passes=first.control)
    return _held(outcome_names(_runs_of(pairs)), _runs_of(pairs)) if pairs else _no_pair(condition, outcomes)


def _each(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    """Return the answer to `each_passes`: a run fails, and runs with each of the named values in its place pass."""
    pairs, key = _pairs(condition, outcomes), condition.differ_in[0]
    values = next(key_filter for key_filter in condition.other_runs.values if key_filter.key == key)
    complete = []
    for changed_dir in dict.fromkeys(pair.changed.dir for pair in pairs):
        group = [pair for pair in pairs if pair.changed.dir == changed_dir]
        if {_value(pair.control, key) for pair in group} == set(values.values):
            complete.append(group)
    deciding = [group for group in complete if _fails_as_required(condition, group[0].changed)]
    deciding = [group for group in deciding if all(has_passed(pair.control) for pair in group)]
    for group in deciding[:1]:
        return _fired(_runs_of_group(group), fails=group[0].changed, passes=group[0].control)
    for group in complete[:1]:
        return _held(outcome_names(_runs_of_group(group)), _runs_of_group(group))
    return _no_pair(condition, outcomes)


def _missing(_: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    traced_runs = [outcome for outcome in outcomes if _is_judged(outcome) and outcome.missing_gradients is not None]
    incomplete = [outcome for outcome in traced_runs if outcome.missing_gradients]
    if not traced_runs:
        return _not_reached("missing: a run with trace.grads=true whose backward was finished")
    if not incomplete:
        return _held(f"no parameter without gradient: {outcome_names(traced_runs)}", traced_runs)
    names = sorted(set.intersection(*(set(outcome.missing_gradients or ()) for outcome in incomplete)))
    if not names:
        return _held(f"not the same parameters in {outcome_names(incomplete)}", incomplete)
    names_with_verb = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return RuleResult(
        state=GateState.FIRED,
        why=f"{names_with_verb} in {outcome_names(incomplete)}",
        runs=tuple(incomplete),
        fails=incomplete[0],
    )


_RULES: Mapping[ConditionForm, Callable[[Condition, Sequence[Outcome]], RuleResult]] = {
    ConditionForm.FLAKY: _flaky,
    ConditionForm.FAILS: _fails,
    ConditionForm.PASSES: _passes,
    ConditionForm.CONTRAST: _contrast,
    ConditionForm.ALIKE: _contrast,
    ConditionForm.EACH: _each,
    ConditionForm.MISSING: _missing,
}


def _both_fail_alike(pair: Contrast) -> bool:
    return pair.ends_same_way and has_failed(pair.control)


_CONTROL_FITS: Mapping[ConditionForm, Callable[[Contrast], bool]] = {
    ConditionForm.CONTRAST: lambda pair: has_passed(pair.control),
    ConditionForm.ALIKE: _both_fail_alike,
}


def _final_runs(run_filter: RunFilter, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.final and matches_filter(outcome, run_filter)]


def _fired(runs: Sequence[Outcome], *, fails: Outcome | None = None, passes: Outcome | None = None) -> RuleResult:
    return RuleResult(state=GateState.FIRED, why=outcome_names(runs), runs=tuple(runs), fails=fails, passes=passes)


def _held(why: str, runs: Sequence[Outcome]) -> RuleResult:
    return RuleResult(state=GateState.HELD, why=why, runs=tuple(runs))


def _not_reached(why: str) -> RuleResult:
    return RuleResult(state=GateState.NOT_REACHED, why=why)


def _fails_as_required(condition: Condition, outcome: Outcome) -> bool:
    """Whether the run failed in the way that the condition requires."""
    if not has_failed(outcome) or (condition.uncertain and certain_cause(outcome)):
        return False
    if not condition.causes:
        return not failed_from_outside(outcome)
    causes = [cause for cause in Cause if cause.value in condition.causes]
    return any(outcome.verdict.cause == cause or cause.find_message(outcome.verdict.summary) for cause in causes)


def _pairs(condition: Condition, outcomes: Sequence[Outcome]) -> list[Contrast]:
    """Return the steady pairs of runs that differ only in the keys of the condition.

    The changed run is on the failing side of the condition, the control run on the other.
    """
    ends = (condition.runs, condition.other_runs)
    # A run that the condition does not name must not represent a named one with the same settings.
    named_runs = [outcome for outcome in outcomes if any(matches_filter(outcome, end) for end in ends)]
    usable_runs = [outcome for outcome in named_runs if not failed_from_outside(outcome)]
    pairs = steady_contrasts(_variable(condition), usable_runs)
    return [
        pair
        for pair in pairs
        if matches_filter(pair.changed, condition.runs) and matches_filter(pair.control, condition.other_runs)
    ]


def _variable(condition: Condition) -> Variable:
    key = condition.differ_in[0]
    tests = [key_filter.comparison for key_filter in condition.runs.values if key_filter.key == key]
    test = tests[0] if tests and tests[0] in RELATIONS else None
    allows = (ValueFilter(comparison=test) if test else ValueFilter()).allows
    ignored_prefixes = NCCL_SETTINGS if "needs.backend" in condition.differ_in else ()
    keys = tuple(map(_stored_key, condition.differ_in))
    relation = RELATIONS[test] if test else operator.ne
    return Variable(
        keys=keys,
        is_control_value=allows,
        is_changed_value=allows,
        relation=relation,
        ignored_prefixes=ignored_prefixes,
    )


def _runs_of(pairs: Sequence[Contrast]) -> tuple[Outcome, ...]:
    return tuple({run.dir: run for pair in pairs for run in (pair.control, pair.changed)}.values())


def _runs_of_group(group: Sequence[Contrast]) -> tuple[Outcome, ...]:
    return (*(pair.control for pair in group), group[0].changed)


def _no_pair(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    named_runs = [*_final_runs(condition.runs, outcomes), *_final_runs(condition.other_runs, outcomes)]
    outside = [outcome for outcome in named_runs if failed_from_outside(outcome)]
    flaky = [outcome for outcome in named_runs if outcome.flaky]
    why = _outside_text(outside) if outside else reason_not_judged(_variable(condition), named_runs)
    why = why or (f"{outcome_names(flaky)}: attempts disagree" if flaky else "")
    sides = dict.fromkeys((_side_text(condition.runs), _side_text(condition.other_runs)))
    requirement = f"in two runs that differ in {' and '.join(condition.differ_in)} alone"
    return _not_reached(why or f"missing: {' and '.join(sides)}, {requirement}")


def _why_silent(condition: Condition, runs: Sequence[Outcome], missing_names: Sequence[str] = ()) -> str:
    """Return the reason why none of the runs can answer the condition."""
    outside = [outcome for outcome in runs if failed_from_outside(outcome)]
    if outside:
        return _outside_text(outside)
    if runs:
        return f"{outcome_names(runs)}: not judged, or flaky"
    return f"missing: {' and '.join(missing_names) or _runs_text(condition.runs)}"


def _outside_text(outcomes: Sequence[Outcome]) -> str:
    return f"{outcome_names(outcomes)}: {_causes(outcomes)} tells nothing of the program's parts"


def _causes(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(sorted({outcome.verdict.cause or "" for outcome in outcomes}))


def matches_filter(outcome: Outcome, run_filter: RunFilter, *, unknown: bool = False) -> bool:
    """Whether the filter selects the run. `unknown` is the answer if the run's value of a key is unknown."""
    if run_filter.scenarios and not any(_is_named(outcome, name) for name in run_filter.scenarios):
        return False
    return all(_has_value(outcome, key_filter, unknown=unknown) for key_filter in run_filter.values)


def _is_named(outcome: Outcome, name: str) -> bool:
    """Whether the run has this scenario name, or belongs to its matrix."""
    return outcome.spec.scenario == name or outcome.spec.scenario.startswith(f"{name}@")


def _has_value(outcome: Outcome, key_filter: KeyFilter, *, unknown: bool) -> bool:
    value = _value(outcome, key_filter.key)
    if value is None:
        return unknown
    return key_filter.allows(value)


def _value(outcome: Outcome, key: str) -> str | None:
    """Return the value of a key, or None if unknown. The actual backend replaces the required one."""
    if key == "run.ranks":
        return f"{outcome.spec.ranks}"
    if is_our_key(key) and not (is_our_program(outcome) and outcome.spec.device):
        return None
    return setting(outcome, _stored_key(key))


def _stored_key(key: str) -> str:
    """Return the key as outcomes store it."""
    return key.removeprefix("needs.") if key in ("needs.backend", "needs.device") else key


def fill_command(words: Sequence[str], fails: Outcome) -> str | None:
    """Return the command with the failed run in place of `{fails}`, or None if it does not fit the run."""
    return _fill(words, RuleResult(state=GateState.FIRED, why="", fails=fails), by_name=False)


def _fill(words: Sequence[str], answer: RuleResult, by_name: bool) -> str | None:
    """Return the command with its placeholders filled, or None if it does not fit the run.

    A run of another program can only be repeated unchanged, since it need not be a scenario. With `by_name`, the plan
    names the run's scenario, so the command is used for any program.
    """
    run = answer.passes if f"{{{PASSES}}}" in words else answer.fails
    if run is None:
        return _shell(words)
    if not (is_our_program(run) or by_name):
        return run.repeat_command
    if words[0] == "claim" and not all(_starts_from_value(run, word) for word in words[2:] if "=" in word):
        return None
    filled_words = [_fill_word(word, run) for word in words]
    return _shell([word for word in filled_words if word is not None])


def _shell(words: Sequence[str]) -> str:
    return f"nsa-harness {shlex.join(words)}"


def _starts_from_value(run: Outcome, word: str) -> bool:
    """Whether a claim's KEY=OLD,NEW starts from the run's value."""
    key, _, values = word.partition("=")
    value = _value(run, key)
    return value is not None and same_value(value, values.partition(",")[0])


def _fill_word(word: str, run: Outcome) -> str | None:
    """Return the word with its placeholders filled; None if it needs a number that the run does not have."""
    for placeholder in PLACEHOLDER.finditer(word):
        key, times = placeholder[1], placeholder[2]
        value = run.spec.scenario if key in (FAILS, PASSES) else dict(run.spec.criteria).get(key) or _value(run, key)
        if value is None or (times and not is_number(value)):
            return None
        word = word.replace(placeholder[0], f"{float(value) * int(times):.0f}" if times else value)
    return word


def _names_its_runs(condition: Condition) -> bool:
    return bool(condition.runs.scenarios)


def condition_text(condition: Condition) -> str:
    """Return the condition as text."""
    text = _WORDS[condition.form](condition)
    where = ", ".join(condition.where.scenarios) or _values_text(condition.where, ", ")
    return f"{text} ({where})" if where else text


def _fails_words(condition: Condition) -> str:
    cause_text = f" by {' or '.join(condition.causes)}" if condition.causes else ""
    return f"{_runs_text(condition.runs)} fails{cause_text}{', its cause not certain' if condition.uncertain else ''}"


def _contrast_words(condition: Condition) -> str:
    if condition.runs == condition.other_runs:
        return f"one of {_side_text(condition.runs)} fails and another one passes"
    return f"{_side_text(condition.runs)} fails and {_side_text(condition.other_runs)} passes"


_WORDS: Mapping[ConditionForm, Callable[[Condition], str]] = {
    ConditionForm.FLAKY: lambda condition: (
        f"attempts of {'one launch' if condition.runs == EVERY_RUN else _runs_text(condition.runs)} disagree"
    ),
    ConditionForm.FAILS: _fails_words,
    ConditionForm.PASSES: lambda condition: f"{_runs_text(condition.runs, ' and ')} passes",
    ConditionForm.CONTRAST: _contrast_words,
    ConditionForm.EACH: lambda condition: (
        f"{_side_text(condition.runs)} fails and each of {_side_text(condition.other_runs, ' and ')} passes"
    ),
    ConditionForm.ALIKE: lambda condition: (
        f"{_side_text(condition.runs)} fails and {_side_text(condition.other_runs)} fails alike"
    ),
    ConditionForm.MISSING: lambda _: "the same parameters get no gradient in every run",
}


def _runs_text(run_filter: RunFilter, conjunction: str = " or ") -> str:
    return conjunction.join(run_filter.scenarios) or (
        f"a run with {_values_text(run_filter)}" if run_filter.values else "a run"
    )


def _side_text(run_filter: RunFilter, conjunction: str = " or ") -> str:
    """Return one side of a contrast as text."""
    return conjunction.join(run_filter.scenarios) or _values_text(run_filter, " and ", conjunction) or "a run"


def _values_text(run_filter: RunFilter, between: str = " and ", conjunction: str = " or ") -> str:
    return between.join(_key_text(key_filter, conjunction) for key_filter in run_filter.values)


def _key_text(key_filter: KeyFilter, conjunction: str) -> str:
    *most, last = key_filter.values or ("",)
    values = f"{', '.join(most)}{conjunction}{last}" if most else last
    match key_filter.comparison:
        case Comparison.MORE:
            return f"more {key_filter.key}"
        case Comparison.LESS:
            return f"less {key_filter.key}"
        case Comparison.OTHER_THAN:
            return f"{key_filter.key} other than {values}"
    return f"{key_filter.key}={values}"
