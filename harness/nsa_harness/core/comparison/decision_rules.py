"""Find out which decision rules of a plan apply to the runs.

A plan file calls its decision rules `gates`. Each rule has a condition, such as "a gloo run fails". The rule matched if
the condition is true. It is unanswered if no run can decide the condition.
"""

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
from nsa_harness.core.comparison.hypotheses import is_our_program, launch_words, reason_not_judged
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
from nsa_harness.core.report import Finding, Outcome, RuleState, Status


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """The answer to whether the condition of a decision rule is true, with the runs that decide it."""

    state: RuleState
    why: str  # the runs that decide the condition, or what is missing, as text
    runs: tuple[Outcome, ...] = ()  # the runs that decide the condition
    fails: Outcome | None = None  # the run for the placeholder {fails} of a command
    passes: Outcome | None = None  # the run for the placeholder {passes} of a command


def _is_judged(outcome: Outcome) -> bool:
    """Return whether the run passed, failed or hung, and did so in all attempts."""
    return outcome.final and not outcome.flaky and outcome.verdict.status in (Status.PASS, Status.FAIL, Status.HANG)


def has_failed(outcome: Outcome) -> bool:
    """Return whether a run failed when its scenario did not expect a failure."""
    return _is_judged(outcome) and not has_passed(outcome) and not outcome.expected


def failed_from_outside(outcome: Outcome) -> bool:
    """Return whether the run failed for a reason outside the program, such as a full disk."""
    return has_failed(outcome) and row_of(outcome.verdict.cause).enters_tree is DecisionTreePolicy.NEVER


def certain_cause(outcome: Outcome) -> Finding | None:
    """Return the finding that explains the failure of the run, or None if the cause is not certain."""
    cause = outcome.verdict.cause
    if not has_failed(outcome) or row_of(cause).enters_tree is not DecisionTreePolicy.UNEXPLAINED:
        return None
    return next(
        (finding for finding in outcome.findings[:1] if finding.code == cause and finding.confidence >= CERTAIN), None
    )


def outcome_names(outcomes: Iterable[Outcome]) -> str:
    """Return the first few runs with their verdicts, such as "ddp_onestep HANG, ddp_static_graph PASS"."""
    names = list(dict.fromkeys(f"{outcome.spec.scenario} {outcome.verdict.status.value}" for outcome in outcomes))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def answer_condition(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    """Return whether the condition of a decision rule is true for these runs."""
    runs_in_order = sorted(
        (outcome for outcome in outcomes if matches_filter(outcome, condition.where, unknown=True)), key=simplicity_key
    )
    return _ANSWERS[condition.form](condition, runs_in_order)


def commands(rule: DecisionRule, answer: RuleResult) -> tuple[str, ...]:
    """Return the commands that a decision rule suggests, filled in with the runs that decided it."""
    filled_commands = (_fill(words, answer, _names_its_runs(rule.condition)) for words in rule.commands)
    return tuple(dict.fromkeys(filter(None, filled_commands)))


def _answer_flaky(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    runs = _final_runs(condition.runs, outcomes)
    flaky = [outcome for outcome in runs if outcome.flaky]
    if flaky:
        return _matched(flaky, fails=flaky[0])
    return _not_matched("all attempts agree", runs) if runs else _unanswered(f"missing: {_runs_text(condition.runs)}")


def _answer_fails(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    runs = _final_runs(condition.runs, outcomes)
    bad = [outcome for outcome in runs if _fails_as_required(condition, outcome)]
    if bad:
        return _matched(bad, fails=bad[0])
    if condition.causes:
        qualifier = f" with {_values_text(condition.where)}" if condition.where.values else ""
        return _not_matched(
            f"no run{qualifier} failed with this cause", [outcome for outcome in runs if _is_judged(outcome)]
        )
    judged_runs = [outcome for outcome in runs if _is_judged(outcome)]
    explained_runs = [outcome for outcome in judged_runs if condition.uncertain and certain_cause(outcome)]
    if explained_runs:
        return _not_matched(f"{outcome_names(explained_runs)}: {_causes(explained_runs)} is certain", explained_runs)
    counting = [outcome for outcome in judged_runs if not failed_from_outside(outcome)]
    return (
        _not_matched(outcome_names(counting), counting) if counting else _unanswered(_why_unanswered(condition, runs))
    )


def _answer_passes(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    runs = _final_runs(condition.runs, outcomes)
    judged_runs = [outcome for outcome in runs if _is_judged(outcome) and not failed_from_outside(outcome)]
    bad = [outcome for outcome in judged_runs if not has_passed(outcome)]
    if bad:
        return _not_matched(outcome_names(bad), bad)
    missing_names = [
        name for name in condition.runs.scenarios if not any(_is_named(outcome, name) for outcome in judged_runs)
    ]
    if missing_names or not judged_runs:
        return _unanswered(
            _why_unanswered(condition, [outcome for outcome in runs if outcome not in judged_runs], missing_names)
        )
    return _matched(judged_runs, passes=judged_runs[0])


def _answer_contrast(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    pairs = _pairs(condition, outcomes)
    deciding = [
        pair for pair in pairs if _fails_as_required(condition, pair.changed) and _CONTROL_FITS[condition.form](pair)
    ]
    if deciding:
        first = min(deciding, key=lambda pair: certain_cause(pair.changed) is not None)
        return _matched(_runs_of(deciding), fails=first.changed, passes=first.control)
    return _not_matched(outcome_names(_runs_of(pairs)), _runs_of(pairs)) if pairs else _no_pair(condition, outcomes)


def _answer_each_passes(condition: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    """Decide whether a run fails while similar runs with several other values of a setting all pass."""
    pairs, key = _pairs(condition, outcomes), condition.differ_in[0]
    required_values = next(key_filter for key_filter in condition.other_runs.values if key_filter.key == key)
    complete_groups = []
    for changed_dir in dict.fromkeys(pair.changed.dir for pair in pairs):
        group = [pair for pair in pairs if pair.changed.dir == changed_dir]
        if {_value(pair.control, key) for pair in group} == set(required_values.values):
            complete_groups.append(group)
    deciding_groups = [group for group in complete_groups if _fails_as_required(condition, group[0].changed)]
    deciding_groups = [group for group in deciding_groups if all(has_passed(pair.control) for pair in group)]
    for group in deciding_groups[:1]:
        return _matched(_runs_of_group(group), fails=group[0].changed, passes=group[0].control)
    for group in complete_groups[:1]:
        return _not_matched(outcome_names(_runs_of_group(group)), _runs_of_group(group))
    return _no_pair(condition, outcomes)


def _answer_missing_gradients(_: Condition, outcomes: Sequence[Outcome]) -> RuleResult:
    traced_runs = [outcome for outcome in outcomes if _is_judged(outcome) and outcome.missing_gradients is not None]
    incomplete = [outcome for outcome in traced_runs if outcome.missing_gradients]
    if not traced_runs:
        return _unanswered("missing: a run with trace.grads=true that finished a backward pass")
    if not incomplete:
        return _not_matched(f"every parameter got a gradient: {outcome_names(traced_runs)}", traced_runs)
    names = sorted(set.intersection(*(set(outcome.missing_gradients or ()) for outcome in incomplete)))
    if not names:
        return _not_matched(f"the parameters differ: {outcome_names(incomplete)}", incomplete)
    names_text = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return RuleResult(
        state=RuleState.MATCHED,
        why=f"{names_text} in {outcome_names(incomplete)}",
        runs=tuple(incomplete),
        fails=incomplete[0],
    )


_ANSWERS: Mapping[ConditionForm, Callable[[Condition, Sequence[Outcome]], RuleResult]] = {
    ConditionForm.FLAKY: _answer_flaky,
    ConditionForm.FAILS: _answer_fails,
    ConditionForm.PASSES: _answer_passes,
    ConditionForm.CONTRAST: _answer_contrast,
    ConditionForm.ALIKE: _answer_contrast,
    ConditionForm.EACH: _answer_each_passes,
    ConditionForm.MISSING: _answer_missing_gradients,
}


def _both_fail_alike(pair: Contrast) -> bool:
    return pair.ends_same_way and has_failed(pair.control)


_CONTROL_FITS: Mapping[ConditionForm, Callable[[Contrast], bool]] = {
    ConditionForm.CONTRAST: lambda pair: has_passed(pair.control),
    ConditionForm.ALIKE: _both_fail_alike,
}


def _final_runs(run_filter: RunFilter, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.final and matches_filter(outcome, run_filter)]


def _matched(runs: Sequence[Outcome], *, fails: Outcome | None = None, passes: Outcome | None = None) -> RuleResult:
    return RuleResult(state=RuleState.MATCHED, why=outcome_names(runs), runs=tuple(runs), fails=fails, passes=passes)


def _not_matched(why: str, runs: Sequence[Outcome]) -> RuleResult:
    return RuleResult(state=RuleState.NOT_MATCHED, why=why, runs=tuple(runs))


def _unanswered(why: str) -> RuleResult:
    return RuleResult(state=RuleState.UNANSWERED, why=why)


def _fails_as_required(condition: Condition, outcome: Outcome) -> bool:
    """Return whether the run failed unexpectedly and, if the condition names causes, for one of them."""
    if not has_failed(outcome) or (condition.uncertain and certain_cause(outcome)):
        return False
    if not condition.causes:
        return not failed_from_outside(outcome)
    causes = [cause for cause in Cause if cause.value in condition.causes]
    return any(outcome.verdict.cause == cause or cause.find_message(outcome.verdict.summary) for cause in causes)


def _pairs(condition: Condition, outcomes: Sequence[Outcome]) -> list[Contrast]:
    """Return the pairs of runs that differ only in the settings in the condition's `differ_in`."""
    ends = (condition.runs, condition.other_runs)
    # A run that the condition does not name must not represent a named run with the same settings.
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
    why = _external_failure_text(outside) if outside else reason_not_judged(_variable(condition), named_runs)
    why = why or (f"{outcome_names(flaky)}: attempts disagree" if flaky else "")
    sides = dict.fromkeys((_side_text(condition.runs), _side_text(condition.other_runs)))
    requirement = f"in two runs that differ only in {' and '.join(condition.differ_in)}"
    return _unanswered(why or f"missing: {' and '.join(sides)}, {requirement}")


def _why_unanswered(condition: Condition, runs: Sequence[Outcome], missing_names: Sequence[str] = ()) -> str:
    """Return the reason why none of the runs can decide the condition."""
    outside = [outcome for outcome in runs if failed_from_outside(outcome)]
    if outside:
        return _external_failure_text(outside)
    if runs:
        return f"{outcome_names(runs)}: not judged, or flaky"
    return f"missing: {' and '.join(missing_names) or _runs_text(condition.runs)}"


def _external_failure_text(outcomes: Sequence[Outcome]) -> str:
    return f"{outcome_names(outcomes)}: {_causes(outcomes)} says nothing about the program"


def _causes(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(sorted({outcome.verdict.cause or "" for outcome in outcomes}))


def matches_filter(outcome: Outcome, run_filter: RunFilter, *, unknown: bool = False) -> bool:
    """Return whether the run meets the filter. `unknown` is the result for a setting without a known value in this
    run.
    """
    if run_filter.scenarios and not any(_is_named(outcome, name) for name in run_filter.scenarios):
        return False
    return all(_has_value(outcome, key_filter, unknown=unknown) for key_filter in run_filter.values)


def _is_named(outcome: Outcome, name: str) -> bool:
    """Return whether the run belongs to the scenario `name` or to a variant in its matrix."""
    return outcome.spec.scenario == name or outcome.spec.scenario.startswith(f"{name}@")


def _has_value(outcome: Outcome, key_filter: KeyFilter, *, unknown: bool) -> bool:
    value = _value(outcome, key_filter.key)
    if value is None:
        return unknown
    return key_filter.allows(value)


def _value(outcome: Outcome, key: str) -> str | None:
    """Return the value of a setting in a run, or None if it is unknown."""
    if key == "run.ranks":
        return f"{outcome.spec.ranks}"
    if is_our_key(key) and not (is_our_program(outcome) and outcome.spec.device):
        return None
    return setting(outcome, _stored_key(key))


def _stored_key(key: str) -> str:
    """Return the key under which outcomes store a plan's setting."""
    return key.removeprefix("needs.") if key in ("needs.backend", "needs.device") else key


def fill_command(words: Sequence[str], fails: Outcome) -> str | None:
    """Replace `{fails}` in a command with the failed run, or return None if the command does not fit the run."""
    return _fill(words, RuleResult(state=RuleState.MATCHED, why="", fails=fails), by_name=False)


def _fill(words: Sequence[str], answer: RuleResult, by_name: bool) -> str | None:
    """Fill in the placeholders of a command, or return None if the command does not fit the run.

    For a run of another program, this is the command that repeats it unchanged, because it need not be a scenario. With
    `by_name`, the plan names the run's scenario, so the plan's command is used for any program.
    """
    run = answer.passes if f"{{{PASSES}}}" in words else answer.fails
    if run is None:
        return _shell(words)
    if not (is_our_program(run) or by_name):
        return run.repeat_command
    if words[0] == "claim" and not all(_starts_from_value(run, word) for word in words[2:] if "=" in word):
        return None
    if words[0] == "run":
        own_words = [word for word in words[2:] if _has_setting(run, word)]
        if own_words and len(own_words) == len(words) - 2:
            return None
        words = [word for word in words if word not in own_words]
    if words[0] == "claim":
        changed_keys = {word.partition("=")[0] for word in words[2:]}
        words = (words[0], *launch_words(run, changed_keys), *words[2:])
    filled_words = [_fill_word(word, run) for word in words]
    return _shell([word for word in filled_words if word is not None])


def _shell(words: Sequence[str]) -> str:
    return f"nsa-harness {shlex.join(words)}"


def _has_setting(run: Outcome, word: str) -> bool:
    """Return whether the argument is an override with the value that the run already has."""
    key, is_override, new = word.partition("=")
    value = _value(run, key) if is_override else None
    return value is not None and same_value(value, new)


def _starts_from_value(run: Outcome, word: str) -> bool:
    """Return whether OLD, in an argument KEY=OLD,NEW of `claim`, is the value of KEY in the run."""
    key, _, values = word.partition("=")
    value = _value(run, key)
    return value is not None and same_value(value, values.partition(",")[0])


def _fill_word(word: str, run: Outcome) -> str | None:
    """Fill in the placeholders of an argument, or return None if the run has no value for one of them."""
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
    """Return a condition as text, such as "a run with needs.backend=gloo fails"."""
    text = _CONDITION_TEXTS[condition.form](condition)
    where = ", ".join(condition.where.scenarios) or _values_text(condition.where, ", ")
    return f"{text} ({where})" if where else text


def _fails_text(condition: Condition) -> str:
    cause_text = f" with {' or '.join(condition.causes)}" if condition.causes else ""
    uncertain_text = " and its cause is not certain" if condition.uncertain else ""
    return f"{_runs_text(condition.runs)} fails{cause_text}{uncertain_text}"


def _contrast_text(condition: Condition) -> str:
    if condition.runs == condition.other_runs:
        return f"one of {_side_text(condition.runs)} fails and another passes"
    return f"{_side_text(condition.runs)} fails and {_side_text(condition.other_runs)} passes"


_CONDITION_TEXTS: Mapping[ConditionForm, Callable[[Condition], str]] = {
    ConditionForm.FLAKY: lambda condition: (
        f"attempts of {'one launch' if condition.runs == EVERY_RUN else _runs_text(condition.runs)} end differently"
    ),
    ConditionForm.FAILS: _fails_text,
    ConditionForm.PASSES: lambda condition: (
        f"{_runs_text(condition.runs, ' and ')} {'pass' if len(condition.runs.scenarios) > 1 else 'passes'}"
    ),
    ConditionForm.CONTRAST: _contrast_text,
    ConditionForm.EACH: lambda condition: (
        f"{_side_text(condition.runs)} fails and each of {_side_text(condition.other_runs, ' and ')} passes"
    ),
    ConditionForm.ALIKE: lambda condition: (
        f"{_side_text(condition.runs)} fails and {_side_text(condition.other_runs)} fails in the same way"
    ),
    ConditionForm.MISSING: lambda _: "the same parameters get no gradient in every run",
}


def _runs_text(run_filter: RunFilter, conjunction: str = " or ") -> str:
    return conjunction.join(run_filter.scenarios) or (
        f"a run with {_values_text(run_filter)}" if run_filter.values else "a run"
    )


def _side_text(run_filter: RunFilter, conjunction: str = " or ") -> str:
    """Describe the runs that `run_filter` selects, for a sentence about runs that must fail or pass."""
    return conjunction.join(run_filter.scenarios) or _values_text(run_filter, " and ", conjunction) or "a run"


def _values_text(run_filter: RunFilter, between: str = " and ", conjunction: str = " or ") -> str:
    return between.join(_key_text(key_filter, conjunction) for key_filter in run_filter.values)


def _key_text(key_filter: KeyFilter, conjunction: str) -> str:
    *most, last = key_filter.values or ("",)
    values = f"{', '.join(most)}{conjunction}{last}" if most else last
    match key_filter.comparison:
        case Comparison.MORE:
            return f"a larger {key_filter.key}"
        case Comparison.LESS:
            return f"a smaller {key_filter.key}"
        case Comparison.OTHER_THAN:
            return f"{key_filter.key} other than {values}"
    return f"{key_filter.key}={values}"
