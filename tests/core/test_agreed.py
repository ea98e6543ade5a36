"""Plan files: what may stand in one, and every mistake of one at once, each with its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML
from runs import PLAN, run, sure

from nsa_harness.core.comparison.contrasts import Comparison as Asked
from nsa_harness.core.comparison.contrasts import KeyFilter
from nsa_harness.core.comparison.decision_rules import condition_text
from nsa_harness.core.comparison.decisions import answer_rules, walk_tree
from nsa_harness.core.comparison.plan_file import (
    COMMANDS,
    ConditionForm,
    PlanText,
    ReadPlan,
    is_plan,
    plan_schema,
    read_plan,
)
from nsa_harness.core.report import Outcome, RuleAnswer, RuleState, Status
from nsa_harness.core.scenario.yaml_tree import parse_yaml

SHIPPED = Path(__file__).parents[2] / "scenarios" / "plans"
PASS, FAIL, HANG, SKIP = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    family: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    priority: int = 0


THEIRS = (
    Item(name="smoke", family="smoke", tags=("mine",), aliases=("quick",)),
    Item(name="train_a", family="train_a", tags=("mine",)),
    Item(name="train_b", family="train_b", tags=("mine",)),
    Item(name="wide@run.ranks=4", family="wide", tags=("mine",)),
    Item(name="other", family="other"),
)


def read(text: str, scenarios: Sequence[Item] | None = THEIRS) -> ReadPlan:
    return read_plan(PlanText(file="plans/mine.yaml", text=text), scenarios)


def said(text: str) -> list[str]:
    return [str(mistake) for mistake in read(text).mistakes]


def gate(condition: str, *more: str) -> str:
    lines = (f"if: {condition}", "then: stop", "because: we agreed", *more)
    return "tags: [mine]\ngates:\n  one:\n" + "".join(f"    {line}\n" for line in lines)


def answer(condition: str, outcomes: Sequence[Outcome], *more: str) -> RuleAnswer:
    read_one = read(gate(condition, *more))
    assert read_one.mistakes == ()
    (told,) = answer_rules(outcomes, read_one.plan)
    return told


def theirs(name: str, status: Status = PASS, **settings: str) -> Outcome:
    """A run of somebody else's program."""
    chosen = {key.replace("__", "."): value for key, value in settings.items()}
    return run(name, status, {"run.program": "train.py", **chosen}, device="any", backend="any")


A_FAILS, B_PASSES = theirs("train_a", FAIL, run__env__FAST="1"), theirs("train_b")


@pytest.mark.parametrize(
    ("condition", "outcomes", "state", "why"),
    [
        ("{fails: smoke}", [theirs("smoke", FAIL)], "fired", "smoke FAIL"),
        ("{fails: smoke}", [theirs("smoke")], "held", "smoke PASS"),
        ("{fails: smoke}", [theirs("other", FAIL)], "not reached", "missing: smoke"),
        ("{fails: smoke}", [run("smoke", SKIP)], "not reached", "smoke SKIP: not judged, or flaky"),
        ("{fails: [smoke, train_a]}", [theirs("smoke"), A_FAILS], "fired", "train_a FAIL"),
        ("{passes: [smoke, train_b]}", [theirs("smoke"), B_PASSES], "fired", "smoke PASS, train_b PASS"),
        ("{passes: [smoke, train_b]}", [theirs("smoke")], "not reached", "missing: train_b"),
        ("{passes: [smoke, train_a]}", [theirs("smoke"), A_FAILS], "held", "train_a FAIL"),
        ("{fails: wide}", [theirs("wide@run.ranks=4", HANG)], "fired", "wide@run.ranks=4 HANG"),
        ("{flaky: smoke}", [run("smoke", FAIL, flaky=True)], "fired", "smoke FAIL"),
        ("{flaky: smoke}", [run("other", FAIL, flaky=True)], "not reached", "missing: smoke"),
        ("{cause: [killed, slow]}", [run("smoke", FAIL, cause="killed")], "fired", "smoke FAIL"),
        ("{fails: {run.ranks: [2, 4]}}", [theirs("smoke", FAIL)], "fired", "smoke FAIL"),
        (
            "{fails: train_a, passes: train_b, differ_in: run.env.FAST}",
            [A_FAILS, B_PASSES],
            "fired",
            "train_b PASS, train_a FAIL",
        ),
        (
            "{fails: train_a, passes: train_b, differ_in: run.env.FAST}",
            [theirs("train_a", run__env__FAST="1"), B_PASSES],
            "held",
            "train_b PASS, train_a PASS",
        ),
        (
            "{fails: train_a, passes: train_b, differ_in: run.env.FAST}",
            [A_FAILS, theirs("train_b", run__args='["--tiny"]')],
            "not reached",
            "missing: train_a and train_b, in two runs that differ only in run.env.FAST",
        ),
        (
            "{fails: train_a, fails_alike: train_b, differ_in: run.env.FAST}",
            [A_FAILS, theirs("train_b", FAIL)],
            "fired",
            "train_b FAIL, train_a FAIL",
        ),
        (
            "{fails: {run.ranks: more}, passes: {run.ranks: less}, differ_in: run.ranks}",
            [theirs("smoke"), theirs("wide@run.ranks=4", FAIL, run__ranks="4")],
            "fired",
            "smoke PASS, wide@run.ranks=4 FAIL",
        ),
    ],
)
def test_a_user_asks_about_scenarios_of_a_program_of_their_own(
    condition: str, outcomes: list[Outcome], state: str, why: str
) -> None:
    told = answer(condition, outcomes)
    assert (told.state, told.why) == (RuleState(state), why)


def test_what_was_agreed_about_a_run_by_its_name_leads_whatever_its_cause() -> None:
    explained = sure(theirs("smoke", HANG))
    assert answer("{fails: smoke}", [explained]).leads
    assert not answer("{fails: {run.ranks: 2}}", [explained]).leads


def test_fewer_ranks_that_fail_are_not_more() -> None:
    condition = "{fails: {run.ranks: more}, passes: {run.ranks: less}, differ_in: run.ranks}"
    ends = [theirs("smoke", FAIL), theirs("wide@run.ranks=4", run__ranks="4")]
    assert answer(condition, ends).state is RuleState.NOT_MATCHED
    other_way = "{fails: {run.ranks: less}, passes: {run.ranks: more}, differ_in: run.ranks}"
    assert answer(other_way, ends).state is RuleState.MATCHED


@pytest.mark.parametrize("ends", ["fails: wide, passes: train_b", "fails: train_b, passes: wide"])
def test_a_run_stands_for_no_other_end_than_its_own(ends: str) -> None:
    variants = [theirs("wide@run.ranks=4", FAIL, run__ranks="4"), theirs("wide@run.ranks=2")]
    assert answer(f"{{{ends}, differ_in: run.ranks}}", variants).state is RuleState.UNANSWERED


def test_a_run_that_is_not_named_stands_for_none_that_is_set_to_the_same() -> None:
    condition = "{fails: train_a, passes: train_b, differ_in: run.env.FAST}"
    told = answer(condition, [A_FAILS, theirs("another"), B_PASSES])
    assert (told.state, told.why) == (RuleState.MATCHED, "train_b PASS, train_a FAIL")


def test_attempts_that_disagree_are_no_end_of_a_contrast() -> None:
    first, last = replace(B_PASSES, final=False, dir="1"), replace(B_PASSES, attempt=2, flaky=True, dir="2")
    first = replace(first, verdict=A_FAILS.verdict, flaky=True)
    told = answer("{fails: train_a, passes: train_b, differ_in: run.env.FAST}", [A_FAILS, first, last])
    assert (told.state, told.why) == (RuleState.UNANSWERED, "train_b PASS: attempts disagree")


@pytest.mark.parametrize(
    ("condition", "command", "filled"),
    [
        ("{fails: train_a}", "run {fails} run.env.FAST=0", "run train_a run.env.FAST=0"),
        ("{fails: train_a}", "run -t mine", "run -t mine"),
        ("{fails: train_a}", "claim {fails} run.env.FAST=1,0", "claim train_a run.env.FAST=1,0"),
        ("{fails: train_a}", "claim {fails} run.env.FAST=0,1", None),
        (
            "{fails: train_a}",
            '"run {fails} limits.deadline_s={limits.deadline_s*2}"',
            "run train_a limits.deadline_s=1200",
        ),
        ("{fails: train_a}", '"run {fails} run.env.N={run.env.NONE*2}"', "run train_a"),
        ("{fails: train_a, passes: train_b, differ_in: run.env.FAST}", "run {passes}", "run train_b"),
    ],
)
def test_a_command_is_made_of_the_run_that_it_names(condition: str, command: str, filled: str | None) -> None:
    told = answer(condition, [A_FAILS, B_PASSES], f"try: {command}")
    assert told.state is RuleState.MATCHED
    assert told.commands == ((f"nsa-harness {filled}",) if filled else ())


MISTAKES = """\
1:1: schema: expected 1, got 2
2:14: tags.1: no scenario has the tag "mien"; did you mean "mine"?
3:13: scenarios.0: no scenario named "smokee"; did you mean "smoke"?
3:21: scenarios.1: no scenario named "quick"; it is another name of smoke: write that
4:1: gatez: unknown key; did you mean "gates"?
6:3: gates.one.because: is required
7:10: gates.one.if.fails: no scenario named "trian_a"; did you mean "train_a"?
10:10: gates.two.if.fails: this plan does not run "other"; add it to `scenarios`
10:24: gates.two.if.cause: no cause "redy_twice"; did you mean "ready_twice"?
12:5: gates.two.because: expected text, got 7; quote it
14:5: gates.three.if.differ_in: is required: two runs can only be compared if they differ in these keys and in no other key
14:18: gates.three.if.fails.gc.laiers: "gc.laiers" is no key in which runs can differ; did you mean "gc.layers"?
14:34: gates.three.if.fails.gc.mode: expected one of non_reentrant, reentrant, got "sideways"
17:11: gates.three.try.0: no command "dance"; known: run, bisect, claim
17:18: gates.three.try.1: {passed} has no value here; known: {fails}, {passes}
17:18: gates.three.try.1: gc.layers: expected "start:stop" with start < stop, got "8:4"
17:48: gates.three.try.2: gc.mode: expected one of non_reentrant, reentrant, got "sideways"
17:92: gates.three.try.3: No closing quotation in "run ""
19:5: gates.four.if: expected one of: flaky, missing_gradients, fails, passes, fails with passes, each_passes with fails, fails with fails_alike, cause; got fails, flaky
23:22: gates.five.if.differ_in: needs two sides, such as `fails` and `passes`; remove it, or add the other side
23:42: gates.five.if.cause: is the cause of a failure; remove it, or use `fails`
23:55: gates.five.if.where: expected at least one item, got an empty list
26:5: gates.five.whatever: unknown key; keys here: if, then, because, try
28:10: gates.six.if.missing_gradients: expected same, got "other"
32:10: gates.seven.if.fails: write `more` on one side and `less` on the other, for the first key of `differ_in`
36:22: gates.eight.if.each_passes: expected at least two values of gc.mode, such as {gc.mode: [A, B]}
39:15: gates.nine.if.cause: uncertain cannot be combined with a cause
40:9: gates.ten.if: expected one of: flaky, missing_gradients, fails, passes, fails with passes, each_passes with fails, fails with fails_alike, cause; got differ_in
40:14: gates.ten.if.differ_in: needs two sides, such as `fails` and `passes`; remove it, or add the other side
42:6: tree.0.gate: no gate "on"; did you mean "one"?
42:31: tree.0.yes: expected text, got an empty list
42:48: tree.0.no_if.tow: no gate "tow"; did you mean "two"?
"""  # noqa: E501


def test_every_mistake_of_a_plan_is_told_at_once_with_its_place() -> None:
    text = """\
schema: 2
tags: [mine, mien]
scenarios: [smokee, quick]
gatez: 1
gates:
  one:
    if: {fails: trian_a}
    then: stop
  two:
    if: {fails: other, cause: redy_twice}
    then: stop
    because: 7
  three:
    if: {fails: {gc.laiers: all, gc.mode: sideways}, passes: any}
    then: stop
    because: so
    try: [dance, "run {passed} gc.layers=8:4", "claim {fails} gc.mode=reentrant,sideways", 'run "']
  four:
    if: {fails: any, flaky: any}
    then: stop
    because: so
  five:
    if: {flaky: any, differ_in: gc.mode, cause: slow, where: []}
    then: stop
    because: so
    whatever: 1
  six:
    if: {missing_gradients: other}
    then: stop
    because: so
  seven:
    if: {fails: {model.layers: more}, passes: {model.layers: more}, differ_in: model.layers}
    then: stop
    because: so
  eight:
    if: {fails: any, each_passes: {gc.mode: reentrant}, differ_in: gc.mode}
    then: stop
    because: so
  nine: {if: {cause: [slow, uncertain]}, then: stop, because: so}
  ten: {if: {differ_in: gc.mode}, then: stop, because: so}
tree:
  - {gate: on, asks: Really?, yes: [], no_if: {tow: x}}
"""
    assert said(text) == [f"plans/mine.yaml:{line}" for line in MISTAKES.splitlines()]


def refused(text: str) -> bool:
    return not Draft202012Validator(plan_schema()).is_valid(YAML(typ="safe").load(text))


def test_the_plan_that_ships_and_those_of_these_tests_are_as_the_schema_says() -> None:
    Draft202012Validator.check_schema(plan_schema())
    assert not refused((SHIPPED / "plan.yaml").read_text(encoding="utf-8"))
    assert not refused(
        gate("{fails: {run.env.FAST: [1, null]}, passes: any, differ_in: run.env.FAST}", "try: run {fails}")
    )


@pytest.mark.parametrize(
    "text",
    [
        gate("{fails: any}").replace("tags: [mine]", "schema: 2"),
        gate("{fails: any}").replace("tags: [mine]\n", ""),
        gate("{fails: any}").replace("because: we agreed", "because: 7"),
        gate("{fails: any, whatever: 1}"),
        gate("{fails: {gc.laiers: all}}"),
        gate("{fails: {gc.mode: {without: reentrant}}}"),
        gate("{fails: any, cause: redy_twice}"),
        gate("{missing_gradients: other}"),
        gate("{fails: []}"),
        gate("{fails: any}", "try: dance"),
        gate("{fails: any}") + "tree:\n  - {gate: one, asks: Really?}\n",
        "tags: [mine]\ngates: {}\n",
    ],
)
def test_what_the_schema_refuses_is_a_mistake(text: str) -> None:
    assert refused(text)
    assert said(text)


@pytest.mark.parametrize("text", ["", "gates: {}", "- a", "gates: {a: 1}\ntags: [mine]", "\tgates: x"])
def test_what_is_no_plan_at_all_is_a_mistake_and_no_crash(text: str) -> None:
    assert said(text)


WORDS = st.sampled_from(
    ["fails", "passes", "each_passes", "cause", "differ_in", "where", "any", "uncertain", "slow", "not"]
)
KEYS = st.sampled_from(
    ["gc.mode", "run.ranks", "more", "less", "flaky", "if", "then", "try", "run {fails}", "smoke", ""]
)
LEAVES = st.none() | st.booleans() | st.integers() | WORDS | KEYS
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300)
@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_whatever_a_condition_holds_it_is_read_or_a_mistake_and_no_crash(a: Any, b: Any, c: Any, d: Any) -> None:
    condition = {"fails": a, "passes": b, "differ_in": c, "cause": d}
    for one in (condition, {"fails": a, "each_passes": b, "differ_in": c}, a):
        gates = {"one": {"if": one, "then": b, "because": c, "try": d}}
        told = read(json.dumps({"tags": ["mine"], "gates": gates, "tree": d}))
        assert told.mistakes or told.plan.gates


def test_a_plan_is_told_from_a_scenario_by_its_gates() -> None:
    assert is_plan(parse_yaml("gates: {}", "x").root)
    assert not is_plan(parse_yaml("about: x", "x").root)
    assert not is_plan(parse_yaml("\tabout", "x").root)


def test_a_plan_that_was_read_before_takes_its_names_as_they_stand() -> None:
    text = gate("{fails: gone_since}")
    assert [str(one) for one in read(text).mistakes] == [
        'plans/mine.yaml:4:10: gates.one.if.fails: no scenario named "gone_since"'
    ]
    assert read(text, None).mistakes == ()


def test_a_tree_of_their_own_is_walked() -> None:
    text = gate("{fails: {run.env.FAST: 1}}") + (
        "tree:\n  - gate: one\n    asks: Does it fail fast?\n    yes: slow down\n    of: {run.ranks: 2}\n"
    )
    plan = read(text).plan
    walk = walk_tree([run("ddp", HANG, {"run.env.FAST": "1"})], plan)
    assert walk is not None
    assert (walk.leaf, walk.made_from) == ("slow down", "ddp HANG")
    assert walk_tree([theirs("train_a", HANG)], plan) is None


def test_the_plan_that_ships_has_each_form_and_commands_that_there_are() -> None:
    assert {one.condition.form for one in PLAN.gates.values()} == set(ConditionForm) - {ConditionForm.PASSES}
    assert {words[0] for one in PLAN.gates.values() for words in one.commands} == set(COMMANDS)
    assert {one.gate for one in PLAN.questions} <= {*PLAN.gates}


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("{passes: [smoke, train_a]}", "smoke and train_a pass"),
        (
            "{fails: {gc.layers: {not: [none, all]}}, cause: uncertain}",
            "a run with gc.layers other than none or all fails and its cause is not certain",
        ),
        ("{flaky: smoke}", "attempts of smoke end differently"),
        ("{cause: [slow, killed], where: {run.ranks: 2}}", "a run fails with slow or killed (run.ranks=2)"),
        (
            "{fails: {run.ranks: more}, passes: {run.ranks: less}, differ_in: run.ranks}",
            "a larger run.ranks fails and a smaller run.ranks passes",
        ),
    ],
)
def test_a_condition_is_told_in_words(condition: str, words: str) -> None:
    assert condition_text(read(gate(condition)).plan.gates["one"].condition) == words


def test_a_number_is_the_same_however_it_is_written() -> None:
    assert read(gate("{fails: {parallel.bucket_cap_mb: 25}}")).plan.gates["one"].condition.runs.values == (
        KeyFilter(key="parallel.bucket_cap_mb", comparison=Asked.ONE_OF, values=("25",)),
    )
    told = answer("{fails: {parallel.bucket_cap_mb: 25}}", [run("ddp", HANG)])
    assert told.why == "ddp HANG"  # whose default is 25.0
