"""The decision tree of the plan: every leaf is reached, and what is open is said with the command that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import RUNS, run

from nsa_harness.core.comparison.decisions import TreeAnswer, walked
from nsa_harness.core.report import Finding, Outcome, Status
from nsa_harness.subject.playbook import PLAYBOOK

PASS, HANG = Status.PASS, Status.HANG
STATIC = {"parallel.static_graph": "true"}
PLAIN = run("plain", HANG, missing_gradients=())
STATIC_TOO = run("static", HANG, STATIC)
BRANCHES = [run(name, HANG, {"model.branch": name}) for name in ("cmp", "sel", "win")]
OVER_NCCL = {"backend": "nccl", "device": "cuda"}

PATHS: list[tuple[str, list[Outcome], str, str | None]] = [
    ("static graph", [PLAIN, run("static", PASS, STATIC)], "yes · · ·", PLAYBOOK.questions[0].leaf),
    (
        "branch",
        [PLAIN, STATIC_TOO, run("cmp", PASS, {"model.branch": "cmp"}), run("sel", HANG, {"model.branch": "sel"})],
        "no yes · ·",
        PLAYBOOK.questions[1].leaf,
    ),
    (
        "parameters",
        [replace(PLAIN, missing_gradients=("a.w",)), STATIC_TOO, *BRANCHES],
        "no no yes ·",
        PLAYBOOK.questions[2].leaf,
    ),
    ("graph", [PLAIN, STATIC_TOO, *BRANCHES], "no no no yes", PLAYBOOK.questions[3].leaf),
    (
        "nccl",
        [
            run("plain", HANG, missing_gradients=(), **OVER_NCCL),
            run("static", HANG, STATIC, **OVER_NCCL),
            *(run(name, HANG, {"model.branch": name}, **OVER_NCCL) for name in ("cmp", "sel", "win")),
            run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda"),
        ],
        "no no no no",
        "it is a fault of NCCL's transport",
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
    walk = walked(outcomes, PLAYBOOK.questions, PLAYBOOK.gates)
    assert walk is not None
    assert (" ".join(MARK[step.said] for step in walk.steps), walk.leaf) == (path, leaf)
    assert walk.open == ()
    assert all(step.answer.seen for step in walk.steps)


def test_each_open_question_names_the_command_that_answers_it() -> None:
    walk = walked([run("ddp", HANG)], PLAYBOOK.questions, PLAYBOOK.gates)
    assert walk is not None
    assert [(step.said, step.command) for step in walk.steps] == [
        (TreeAnswer.OPEN, "nsa-harness run ddp --matrix parallel.static_graph=false,true"),
        (TreeAnswer.OPEN, "nsa-harness run ddp --matrix model.branch=cmp,sel,win"),
        (TreeAnswer.OPEN, "nsa-harness run ddp trace.grads=true"),
        (TreeAnswer.YES, None),
    ]
    assert (walk.leaf, len(walk.open)) == (PLAYBOOK.questions[3].leaf, 3)


def test_a_question_that_no_failed_run_can_be_asked_has_no_command() -> None:
    walk = walked(
        [run("fsdp", HANG, {"parallel.wrapper": "fsdp", "run.ranks": "1"})], PLAYBOOK.questions, PLAYBOOK.gates
    )
    assert walk is not None
    commands = [step.command for step in walk.steps]
    assert (commands[0], commands[3]) == (None, None)
    assert commands[1] is not None


def test_nothing_is_asked_where_nothing_failed_or_the_program_takes_no_such_keys() -> None:
    assert walked([run("ddp", PASS)], PLAYBOOK.questions, PLAYBOOK.gates) is None
    assert walked([run("foreign", HANG, {"run.program": "train.py"})], PLAYBOOK.questions, PLAYBOOK.gates) is None
    assert walked([run("ddp", HANG, expected=True)], PLAYBOOK.questions, PLAYBOOK.gates) is None


def test_what_a_rule_named_with_certainty_goes_before_the_tree() -> None:
    sure = Finding(code="lock_cycle", claim="", ranks=(), place=None, confidence=0.95, proof=(), advice="")
    walk = walked([run("ddp", HANG, findings=(sure,))], PLAYBOOK.questions, PLAYBOOK.gates)
    assert walk is not None
    assert walk.certain_already == ("lock_cycle",)
    unsure = walked([run("ddp", HANG, findings=(replace(sure, confidence=0.6),))], PLAYBOOK.questions, PLAYBOOK.gates)
    assert unsure is not None
    assert unsure.certain_already == ()


@given(RUNS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_changes_no_path(outcomes: Sequence[Outcome], random: Random) -> None:
    assert walked(random.sample(outcomes, len(outcomes)), PLAYBOOK.questions, PLAYBOOK.gates) == walked(
        outcomes, PLAYBOOK.questions, PLAYBOOK.gates
    )
