"""The decision tree of the plan: every leaf is reached, and what is open is said with the command that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import PLAN, RUNS, run, sure

from nsa_harness.core.comparison.decisions import walk_tree
from nsa_harness.core.report import Outcome, Status, TreeAnswer

PASS, HANG = Status.PASS, Status.HANG
STATIC = {"parallel.static_graph": "true"}
PLAIN = run("plain", HANG, missing_gradients=())
STATIC_TOO = run("static", HANG, STATIC)
BRANCHES = [run(name, HANG, {"model.branch": name}) for name in ("cmp", "sel", "win")]
OVER_NCCL = {"backend": "nccl", "device": "cuda"}

NOT_ALONE = "NCCL is not the only cause, because it also fails over gloo"

PATHS: list[tuple[str, list[Outcome], str, str | None]] = [
    ("static graph", [PLAIN, run("static", PASS, STATIC)], "yes · · ·", PLAN.questions[0].yes),
    (
        "branch",
        [PLAIN, STATIC_TOO, run("cmp", PASS, {"model.branch": "cmp"}), run("sel", HANG, {"model.branch": "sel"})],
        "no yes · ·",
        PLAN.questions[1].yes,
    ),
    (
        "parameters",
        [replace(PLAIN, missing_gradients=("a.w",)), STATIC_TOO, *BRANCHES],
        "no no yes ·",
        PLAN.questions[2].yes,
    ),
    ("over gloo", [PLAIN, STATIC_TOO, *BRANCHES], "no no no yes", NOT_ALONE),
    (
        "nccl",
        [
            run("plain", HANG, missing_gradients=(), **OVER_NCCL),
            run("static", HANG, STATIC, **OVER_NCCL),
            *(run(name, HANG, {"model.branch": name}, **OVER_NCCL) for name in ("cmp", "sel", "win")),
            run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda"),
        ],
        "no no no no",
        "the fault is in NCCL's transport",
    ),
    (
        "graph",
        [
            run("plain", HANG, missing_gradients=(), **OVER_NCCL),
            run("static", HANG, STATIC, **OVER_NCCL),
            *(run(name, HANG, {"model.branch": name}, **OVER_NCCL) for name in ("cmp", "sel", "win")),
            run("gloo", HANG, {"needs.backend": "gloo"}, device="cuda"),
        ],
        "no no no yes",
        "the fault is in the autograd graph, not in NCCL",
    ),
    (
        "no leaf",
        [
            run("one", HANG, {"run.ranks": "1"}, missing_gradients=()),
            run("two", PASS),
            run("static", PASS, {**STATIC}),
            *(run(name, PASS, {"model.branch": name}) for name in ("cmp", "sel", "win")),
        ],
        "no no no no",
        None,
    ),
]
MARK = {TreeAnswer.YES: "yes", TreeAnswer.NO: "no", TreeAnswer.OPEN: "open", TreeAnswer.NOT_ASKED: "·"}


@pytest.mark.parametrize(("outcomes", "path", "leaf"), [case[1:] for case in PATHS], ids=[case[0] for case in PATHS])
def test_every_leaf_of_the_tree_is_reached(outcomes: list[Outcome], path: str, leaf: str | None) -> None:
    walk = walk_tree(outcomes, PLAN)
    assert walk is not None
    assert (" ".join(MARK[step.answer] for step in walk.steps), walk.leaf) == (path, leaf)
    assert walk.open == ()
    assert all(step.why for step in walk.steps if step.answer is not TreeAnswer.NOT_ASKED)


def test_each_open_question_names_the_command_that_answers_it() -> None:
    walk = walk_tree([run("ddp", HANG)], PLAN)
    assert walk is not None
    assert [(step.answer, step.command) for step in walk.steps] == [
        (TreeAnswer.OPEN, "nsa-harness run ddp --matrix parallel.static_graph=false,true"),
        (TreeAnswer.OPEN, "nsa-harness run ddp --matrix model.branch=cmp,sel,win"),
        (TreeAnswer.OPEN, None),  # gradients are traced by default, so the same run again would answer nothing
        (TreeAnswer.YES, None),
    ]
    assert (walk.leaf, len(walk.open)) == (NOT_ALONE, 3)


def test_a_question_that_no_failed_run_can_be_asked_has_no_command() -> None:
    walk = walk_tree([run("fsdp", HANG, {"parallel.wrapper": "fsdp", "run.ranks": "1"})], PLAN)
    assert walk is not None
    commands = [step.command for step in walk.steps]
    assert (commands[0], commands[3]) == (None, None)
    assert commands[1] is not None


def test_nothing_is_asked_where_nothing_failed_or_the_program_takes_no_such_keys() -> None:
    assert walk_tree([run("ddp", PASS)], PLAN) is None
    assert walk_tree([run("foreign", HANG, {"run.program": "train.py"})], PLAN) is None
    assert walk_tree([run("ddp", HANG, expected=True)], PLAN) is None


def test_a_certain_cause_ends_the_path_before_it_begins() -> None:
    walk = walk_tree([sure(run("ddp", HANG))], PLAN)
    assert walk is not None
    assert (walk.steps, walk.leaf, walk.made_from) == ((), None, "ddp HANG")
    unsure = walk_tree([sure(run("ddp", HANG), confidence=0.6)], PLAN)
    assert unsure is not None
    assert unsure.leaf == NOT_ALONE


def test_what_is_explained_already_is_no_evidence_of_what_is_not() -> None:
    """The certain one fails over gloo; the open one was over nccl alone, of which gloo says nothing."""
    explained = sure(run("gc", Status.FAIL, {"gc.layers": "all"}, cause="ready_twice"))
    walk = walk_tree([explained, run("open", HANG, **OVER_NCCL)], PLAN)
    assert walk is not None
    assert (walk.leaf, walk.made_from) == (None, "open HANG")


def test_a_certain_yes_leaves_the_question_open_for_the_others() -> None:
    """A branch hangs for a reason that is known; whether one alone is why the whole model does, nobody has tried."""
    alone = [run("cmp", PASS, {"model.branch": "cmp"}), sure(run("sel", HANG, {"model.branch": "sel"}))]
    walk = walk_tree([PLAIN, *alone, run("win", PASS, {"model.branch": "win"})], PLAN)
    assert walk is not None
    assert (walk.steps[1].answer, walk.steps[1].command) == (
        TreeAnswer.OPEN,
        "nsa-harness run plain --matrix model.branch=cmp,sel,win",
    )


@pytest.mark.parametrize("cause", ["killed", "slow", "host_oom", "cuda_oom", "expectation_missed", "infra"])
def test_what_was_ended_from_outside_never_enters_the_tree(cause: str) -> None:
    killed = run("ddp", Status.FAIL, cause=cause)
    assert walk_tree([killed], PLAN) is None
    walk = walk_tree([killed, run("open", HANG, STATIC)], PLAN)
    assert walk is not None
    assert "ddp" not in walk.made_from + "".join(step.why for step in walk.steps)


def test_the_answer_names_the_runs_it_is_made_from() -> None:
    walk = walk_tree([PLAIN, STATIC_TOO, *BRANCHES, run("other", PASS, {"model.layers": "2"})], PLAN)
    assert walk is not None
    assert walk.made_from == "plain HANG, cmp HANG, sel HANG, static HANG, win HANG"


@given(RUNS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_changes_no_path(outcomes: Sequence[Outcome], random: Random) -> None:
    assert walk_tree(random.sample(outcomes, len(outcomes)), PLAN) == walk_tree(outcomes, PLAN)
