"""The selftest's own judgement: a report that is wrong in any part is noticed, and the score counts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from render.render_samples import MACHINE, PASSED

from nsa_harness import __version__
from nsa_harness.cli import main as cli
from nsa_harness.commands import selftest as run_selftest
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.commands.selftest import SelftestRequest, draw_plantings, selftest
from nsa_harness.core.plan import Launcher, RunSpec, Skip
from nsa_harness.core.report import Culprit, Outcome, Place, Report, Status, Verdict
from nsa_harness.core.selftest import (
    LAYERS,
    SELFTEST_FAULTS,
    STEPS,
    ComparedVerdict,
    Planting,
    plant,
    planting_result,
)
from nsa_harness.render.documents.documents import write_documents
from nsa_harness.render.listener import Listener
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.storage.rundir import create_run

BY_NAME = {kind.name: kind for kind in SELFTEST_FAULTS}
DEADLOCK, DEADLOCK_TWIN = plant(BY_NAME["deadlock"], rank=1, layer=2, step=3)
SKIP = plant(BY_NAME["skip_collective"], rank=0, layer=2, step=1)[0]


def outcome(said: ComparedVerdict, name: str = "subject") -> Outcome:
    """The outcome of a run whose report says this."""
    place = Place(file="a.py", line=1, function="f", module=None, layer=said.layer, parameter=None, text=None)
    culprit = Culprit(ranks=said.rank, step=said.step, collective=None, place=place) if said.rank else None
    verdict = Verdict(status=Status(said.verdict), kind=None, cause=said.cause, summary="as it is")
    return replace(PASSED, spec=replace(PASSED.spec, scenario=name), dir=name, verdict=verdict, culprit=culprit)


def truthful(planting: Planting) -> Outcome:
    return outcome(planting.expected, planting.name)


@pytest.mark.parametrize("planting", [DEADLOCK, DEADLOCK_TWIN, SKIP], ids=lambda one: one.name)
def test_a_report_that_says_what_was_planted_is_right(planting: Planting) -> None:
    result = planting_result(planting, truthful(planting))
    assert (result.reported, result.wrong) == (planting.expected, ())


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("verdict", "FAIL"),
        ("cause", "lock_cycle"),
        ("cause", None),
        ("rank", (0,)),
        ("rank", (0, 1)),
        ("layer", 1),
        ("layer", None),
        ("step", 2),
        ("step", None),
    ],
)
def test_a_report_that_is_wrong_in_one_part_is_wrong_in_that_part(part: str, value: Any) -> None:
    wrong = outcome(replace(DEADLOCK.expected, **{part: value}))
    assert planting_result(DEADLOCK, wrong).wrong == (part,)


def test_a_report_without_a_culprit_is_wrong_in_all_that_a_culprit_has() -> None:
    silent = outcome(replace(DEADLOCK.expected, rank=()))
    assert planting_result(DEADLOCK, silent).wrong == ("rank", "layer", "step")


def test_a_twin_that_does_not_pass_is_wrong() -> None:
    assert planting_result(DEADLOCK_TWIN, outcome(DEADLOCK.expected)).wrong == (
        "verdict",
        "cause",
        "rank",
        "layer",
        "step",
    )


def test_a_layer_named_for_a_fault_without_one_is_wrong() -> None:
    assert planting_result(SKIP, outcome(replace(SKIP.expected, layer=2))).wrong == ("layer",)


def test_a_line_says_what_was_planted_what_was_said_and_what_differs() -> None:
    right = planting_result(DEADLOCK, truthful(DEADLOCK)).line(10)
    assert right == (
        "right  deadlock    planted at rank 1 layer 2 step 3   "
        "reported HANG backward_function_blocked rank 1 layer 2 step 3   4.6 s"
    )
    assert planting_result(SKIP, outcome(replace(SKIP.expected, verdict="FAIL", step=2))).line(10) == (
        "WRONG  skip_collective  planted at rank 0 step 1   "
        "reported FAIL rank_conditional_collective rank 0 step 2   4.6 s"
        "   expected HANG rank_conditional_collective rank 0 step 1; wrong: verdict, step"
    )
    healed = planting_result(DEADLOCK_TWIN, truthful(DEADLOCK_TWIN)).line(10)
    assert "heals after 9 s   reported PASS   4.6 s" in healed


# --- what is planted


def test_a_twin_takes_the_path_of_its_fault_and_heals() -> None:
    for kind in SELFTEST_FAULTS:
        fault, healthy = plant(kind, rank=1, layer=2, step=1)
        assert healthy.name == f"{fault.name}_twin"
        assert replace(healthy.fault, heals_s=fault.fault.heals_s) == fault.fault
        assert healthy.fault.heals_s is not None
        assert healthy.expected == ComparedVerdict(verdict="PASS", cause=None, rank=(), layer=None, step=None)


def test_the_seed_decides_every_place_and_another_seed_another_one() -> None:
    assert draw_plantings(SELFTEST_FAULTS, 5) == draw_plantings(SELFTEST_FAULTS, 5)
    assert draw_plantings(SELFTEST_FAULTS, 5) != draw_plantings(SELFTEST_FAULTS, 6)
    places = {
        (one.fault.rank, one.fault.layer, one.fault.step)
        for seed in range(300)
        for one in draw_plantings(SELFTEST_FAULTS[:1], seed)
    }
    assert len(places) == 2 * LAYERS * STEPS


def test_each_verdict_is_planted_and_a_twin_that_is_suspected_and_one_that_is_not() -> None:
    plantings = draw_plantings(SELFTEST_FAULTS, 1)
    assert {one.expected.verdict for one in plantings} == {"HANG", "FAIL", "PASS"}
    assert [one.name for one in plantings if one.expected.verdict == "PASS"] == ["deadlock_twin", "raise_twin"]
    assert len({one.name for one in plantings}) == len(plantings) == 9


def test_a_planting_becomes_a_launch_that_expects_what_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenarios" / "base").mkdir(parents=True)
    (tmp_path / "scenarios" / "base" / "ddp.yaml").write_text("not: sound\n")  # must not matter
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_GC_RANGE", "0:2")
    three, _ = plant(replace(BY_NAME["sigkill"], name="sigkill_of_3", ranks=3), rank=2, layer=1, step=2)
    spec = run_selftest._spec(three)
    assert (spec.scenario, spec.fault, spec.ranks) == ("sigkill_of_3", three.fault, 3)
    assert (spec.expect.verdict, spec.expect.cause, spec.launcher) == ("FAIL", "killed", Launcher.TORCHRUN)
    assert "0:2" not in " ".join(spec.program)
    assert "fault={kind: deadlock, rank: 1, layer: 2, step: 3}" in DEADLOCK.overrides()


# --- the command, with the runs replaced by reports


def reporting(report_of: Callable[[Planting], Outcome | None], plantings: Sequence[Planting], code: int = 0) -> Any:
    """In place of run_all: tells the outcomes, and writes report.json as a run does."""

    def run_all(request: RunRequest, screen: Listener) -> int:
        assert [spec.scenario for spec in request.specs if isinstance(spec, RunSpec | Skip)] == [
            one.name for one in plantings
        ]
        run = create_run(request.options.parent)
        outcomes = tuple(one for one in map(report_of, plantings) if one is not None)
        report = Report(
            run_id=run.run_id,
            harness=__version__,
            machine=MACHINE,
            command=request.options.command,
            interrupted=code == 130,
            outcomes=outcomes,
        )
        write_documents(run, report, PLAYBOOK)
        for one in outcomes:
            screen.on_outcome(one, run.path)
        screen.on_done(report, run.path)
        return code

    return run_all


REQUEST = SelftestRequest(seed=11, out=None, command="nsa-harness selftest")
TWO = (BY_NAME["deadlock"], BY_NAME["raise"])
PLANTINGS = draw_plantings(TWO, 11)


def but(name: str, **changes: Any) -> Callable[[Planting], Outcome]:
    """Reports that are right, except one."""

    def report_of(planting: Planting) -> Outcome:
        wrong = changes if planting.name == name else {}
        return outcome(replace(planting.expected, **wrong), planting.name)

    return report_of


@pytest.mark.parametrize(
    ("report_of", "code", "exit_code"),
    [
        (truthful, 0, 0),
        (but("raise", step=9), 0, 1),
        (but("deadlock_twin", verdict="HANG"), 124, 1),
        (lambda planting: None if planting.name == "raise" else truthful(planting), 0, 1),
        (lambda _: None, 125, 1),
        (lambda planting: truthful(planting) if planting.name == "deadlock" else None, 130, 130),
    ],
    ids=["right", "a wrong step", "a twin that hangs", "one not run", "nothing run", "interrupted"],
)
def test_the_exit_code_is_0_only_if_every_part_of_every_report_is_right(
    report_of: Callable[[Planting], Outcome | None],
    code: int,
    exit_code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_selftest, "run_all", reporting(report_of, PLANTINGS, code))
    assert selftest(replace(REQUEST, out=tmp_path), TWO) == exit_code
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("selftest   2 planted faults and 2 healthy twins, seed 11")
    told = [line for line in lines if line.startswith(("right", "WRONG"))]
    right = sum(line.startswith("right") for line in told)
    assert len(told) == sum(report_of(planting) is not None for planting in PLANTINGS)
    missing = f", {4 - len(told)} not run" if len(told) < 4 else ""
    assert f"{right} of 4 right{missing}" in lines


def test_the_seed_comes_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[SelftestRequest] = []
    monkeypatch.setattr(run_selftest, "selftest", lambda request: taken.append(request) or 1)
    monkeypatch.setattr(sys, "argv", ["nsa-harness", "selftest"])
    assert cli.run_command_line(["selftest", "--seed", "3", "--out", str(tmp_path)]) == 1
    assert cli.run_command_line(["selftest"]) == 1
    first, second = taken
    assert (first.seed, first.out) == (3, tmp_path)
    assert (second.out, second.command) == (None, "nsa-harness selftest")


@pytest.mark.parametrize("words", [["--full"], ["--score"], ["io_pipe"], ["--full", "--score", "io_*"]])
def test_what_selftest_no_longer_does_is_answered_in_one_line_and_nothing_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_selftest, "selftest", lambda _: pytest.fail("it ran"))
    assert cli.run_command_line(["selftest", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("selftest plants only its own faults; in a checkout, `python -m evaluation run corpus`")
