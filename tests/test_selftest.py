"""The selftest's own judgement: a report that is wrong in any part is noticed, and the score counts it."""

from __future__ import annotations

import json
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
from nsa_harness.commands.selftest import SelftestRequest, drawn, selftest
from nsa_harness.core.plan import Launcher, RunSpec, Skip
from nsa_harness.core.report import Culprit, Outcome, Place, Report, Status, Verdict
from nsa_harness.core.scenario.scenario import FaultKind
from nsa_harness.core.selftest.selftest import (
    LAYERS,
    SELFTEST_FAULTS,
    STEPS,
    ComparedVerdict,
    Planting,
    compared_verdict,
    planted,
    planting_line,
    planting_result,
    planting_scores,
    score_lines,
    score_values,
    words_of,
)
from nsa_harness.errors import UsageError
from nsa_harness.render.documents.documents import write_documents
from nsa_harness.render.listener import Listener
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.storage.rundir import create_run

BY_NAME = {kind.name: kind for kind in SELFTEST_FAULTS}
DEADLOCK, DEADLOCK_TWIN = planted(BY_NAME["deadlock"], rank=1, layer=2, step=3)
SKIP = planted(BY_NAME["skip_collective"], rank=0, layer=2, step=1)[0]


def outcome(said: ComparedVerdict, name: str = "subject") -> Outcome:
    """The outcome of a run whose report says this."""
    place = Place(file="a.py", line=1, function="f", module=None, layer=said.layer, parameter=None, text=None)
    culprit = Culprit(ranks=said.rank, step=said.step, collective=None, place=place) if said.rank else None
    verdict = Verdict(status=Status(said.verdict), kind=None, cause=said.cause, summary="as it is")
    return replace(PASSED, spec=replace(PASSED.spec, scenario=name), dir=name, verdict=verdict, culprit=culprit)


def truthful(planting: Planting) -> Outcome:
    return outcome(planting.must_say, planting.name)


@pytest.mark.parametrize("planting", [DEADLOCK, DEADLOCK_TWIN, SKIP], ids=lambda one: one.name)
def test_a_report_that_says_what_was_planted_is_right(planting: Planting) -> None:
    assert compared_verdict(truthful(planting)) == planting.must_say
    assert planting_result(planting, truthful(planting)).wrong == ()


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
    wrong = outcome(replace(DEADLOCK.must_say, **{part: value}))
    assert planting_result(DEADLOCK, wrong).wrong == (part,)


def test_a_report_without_a_culprit_is_wrong_in_all_that_a_culprit_has() -> None:
    silent = outcome(replace(DEADLOCK.must_say, rank=()))
    assert planting_result(DEADLOCK, silent).wrong == ("rank", "layer", "step")


def test_a_twin_that_does_not_pass_is_wrong() -> None:
    assert planting_result(DEADLOCK_TWIN, outcome(DEADLOCK.must_say)).wrong == (
        "verdict",
        "cause",
        "rank",
        "layer",
        "step",
    )


def test_a_layer_named_for_a_fault_without_one_is_wrong() -> None:
    assert planting_result(SKIP, outcome(replace(SKIP.must_say, layer=2))).wrong == ("layer",)


def test_a_line_says_what_was_planted_what_was_said_and_what_differs() -> None:
    right = planting_line(planting_result(DEADLOCK, truthful(DEADLOCK)), 10)
    assert right == (
        "right  deadlock    planted at rank 1 layer 2 step 3   "
        "said HANG backward_function_blocked rank 1 layer 2 step 3   4.6 s"
    )
    assert planting_line(planting_result(SKIP, outcome(replace(SKIP.must_say, verdict="FAIL", step=2))), 10) == (
        "WRONG  skip_collective  planted at rank 0 step 1   said FAIL rank_conditional_collective rank 0 step 2   4.6 s"
        "   expected HANG rank_conditional_collective rank 0 step 1; differs in verdict, step"
    )
    assert "heals after 9 s   said PASS   4.6 s" in planting_line(
        planting_result(DEADLOCK_TWIN, truthful(DEADLOCK_TWIN)), 10
    )


# --- the score


def test_the_score_counts_what_was_due_what_was_said_and_both() -> None:
    marks = [
        planting_result(DEADLOCK, truthful(DEADLOCK)),
        planting_result(DEADLOCK, outcome(replace(DEADLOCK.must_say, cause="lock_cycle"))),
        planting_result(DEADLOCK_TWIN, outcome(DEADLOCK.must_say)),
        planting_result(SKIP, truthful(SKIP)),
    ]
    table = {
        name: (one.planted, one.said, one.right, one.precision, one.recall)
        for name, one in planting_scores(marks)["cause"].items()
    }
    assert table == {
        "backward_function_blocked": (2, 2, 1, 0.5, 0.5),
        "lock_cycle": (0, 1, 0, 0.0, None),
        "rank_conditional_collective": (1, 1, 1, 1.0, 1.0),
    }
    verdicts = {name: (one.planted, one.said, one.right) for name, one in planting_scores(marks)["verdict"].items()}
    assert verdicts == {"HANG": (3, 4, 3), "PASS": (1, 0, 0)}
    assert list(score_lines(marks))[:2] == [
        "cause                        planted  said  right  precision  recall",
        "backward_function_blocked          2     2      1       0.50    0.50",
    ]
    assert "lock_cycle                         0     1      0       0.00       -" in list(score_lines(marks))


def test_the_score_is_json_with_every_planting() -> None:
    marks = [planting_result(DEADLOCK, outcome(replace(DEADLOCK.must_say, layer=0), "deadlock"))]
    values = json.loads(json.dumps(score_values(marks, seed=7)))
    assert (values["schema"], values["seed"], values["right"], values["of"]) == (1, 7, 0, 1)
    (one,) = values["plantings"]
    assert one["fault"] == {"kind": "deadlock", "rank": 1, "layer": 2, "step": 3, "heals_s": None}
    assert (one["due"]["layer"], one["said"]["layer"], one["wrong"]) == (2, 0, ["layer"])


# --- what is planted


def test_there_are_twelve_faults_or_more_each_with_its_twin_and_every_kind_is_among_them() -> None:
    plantings = drawn(SELFTEST_FAULTS, 1)
    faults = [one for one in plantings if one.must_say.cause is not None]
    assert len(faults) >= 12
    assert [one.name for one in plantings if one not in faults] == [f"{one.name}_twin" for one in faults]
    # The rest is planted by -t seed-failures: with the first two a run passes, the last one is in the loader.
    by_seeds = {FaultKind.LEAK, FaultKind.SET_PARAMETERS, FaultKind.STARVED_LOADER}
    assert {one.fault.kind for one in faults} == set(FaultKind) - by_seeds
    assert len({one.name for one in plantings}) == len(plantings)


def test_a_twin_takes_the_path_of_its_fault_and_heals() -> None:
    for fault, healthy in zip(drawn(SELFTEST_FAULTS, 3)[::2], drawn(SELFTEST_FAULTS, 3)[1::2], strict=True):
        assert replace(healthy.fault, heals_s=fault.fault.heals_s) == fault.fault
        assert healthy.fault.heals_s is not None
        assert healthy.must_say == ComparedVerdict(verdict="PASS", cause=None, rank=(), layer=None, step=None)


def test_the_seed_decides_every_place_and_another_seed_another_one() -> None:
    assert drawn(SELFTEST_FAULTS, 5) == drawn(SELFTEST_FAULTS, 5)
    assert drawn(SELFTEST_FAULTS, 5) != drawn(SELFTEST_FAULTS, 6)
    places = {
        (one.fault.rank, one.fault.layer, one.fault.step)
        for seed in range(300)
        for one in drawn(SELFTEST_FAULTS[:1], seed)
    }
    assert len(places) == 2 * LAYERS * STEPS


def test_the_quick_set_has_each_verdict_and_a_twin_of_both_sorts() -> None:
    quick = [one for one in drawn(SELFTEST_FAULTS, 1) if one.quick]
    assert {one.must_say.verdict for one in quick} == {"HANG", "FAIL", "PASS"}
    assert {one.name for one in quick if one.must_say.verdict == "PASS"} == {"deadlock_twin", "raise_twin"}


def test_a_planting_becomes_a_launch_that_expects_what_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenarios" / "base").mkdir(parents=True)
    (tmp_path / "scenarios" / "base" / "ddp.yaml").write_text("not: sound\n")  # must not matter
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_GC_RANGE", "0:2")
    three, _ = planted(BY_NAME["sigkill_of_3"], rank=2, layer=1, step=2)
    spec = run_selftest._spec(three)
    assert (spec.scenario, spec.fault, spec.ranks) == ("sigkill_of_3", three.fault, 3)
    assert (spec.expect.verdict, spec.expect.cause, spec.launcher) == ("FAIL", "killed", Launcher.TORCHRUN)
    assert "0:2" not in " ".join(spec.program)
    assert "fault={kind: deadlock, rank: 1, layer: 2, step: 3}" in words_of(DEADLOCK)


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
            screen.outcome(one, run.path)
        screen.done(report, run.path)
        return code

    return run_all


REQUEST = SelftestRequest(full=False, score=False, seed=11, out=None, command="nsa-harness selftest")
TWO = (BY_NAME["deadlock"], BY_NAME["raise"])
PLANTINGS = drawn(TWO, 11)


def but(name: str, **changes: Any) -> Callable[[Planting], Outcome]:
    """Reports that are right, except one."""

    def report_of(planting: Planting) -> Outcome:
        wrong = changes if planting.name == name else {}
        return outcome(replace(planting.must_say, **wrong), planting.name)

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
    assert first.startswith("selftest   2 planted faults, 2 healthy twins, seed 11")
    told = [line for line in lines if line.startswith(("right", "WRONG"))]
    right = sum(line.startswith("right") for line in told)
    assert len(told) == sum(report_of(planting) is not None for planting in PLANTINGS)
    missing = f", {4 - len(told)} not run" if len(told) < 4 else ""
    assert f"{right} of 4 right{missing}" in lines


def test_with_score_stdout_is_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_selftest, "run_all", reporting(but("raise", cause="killed"), PLANTINGS))
    assert selftest(replace(REQUEST, out=tmp_path, score=True), TWO) == 1
    shown = capsys.readouterr()
    values = json.loads(shown.out)
    assert (values["right"], values["of"], values["seed"]) == (3, 4, 11)
    assert (values["causes"]["killed"]["precision"], values["causes"]["exception"]["recall"]) == (0.0, 0.0)
    assert "precision  recall" in shown.err


def test_the_seed_and_the_sets_come_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[SelftestRequest] = []
    monkeypatch.setattr(run_selftest, "selftest", lambda request: taken.append(request) or 1)
    monkeypatch.setattr(sys, "argv", ["nsa-harness", "selftest"])
    assert cli.run_command_line(["selftest", "--full", "--score", "--seed", "3", "--out", str(tmp_path)]) == 1
    assert cli.run_command_line(["selftest"]) == 1
    first, second = taken
    assert (first.full, first.score, first.seed, first.out) == (True, True, 3, tmp_path)
    assert (second.full, second.score, second.out, second.command) == (False, False, None, "nsa-harness selftest")


# --- the corpus


def one_program(home: Path) -> None:
    text = '"""A lock."""\nLABEL = {"verdict": "HANG", "cause": "lock_cycle", "culprit": [1]}\n'
    (home / "thread_lock.py").write_text(text)


def saying(*outcomes: Outcome, code: int = 0) -> Any:
    """In place of run_all, for the corpus."""

    def run_all(request: RunRequest, screen: Listener) -> int:
        run = create_run(request.options.parent)
        told = {one.scenario: one for one in outcomes}
        asked = [spec.scenario for spec in request.specs]
        report = Report(
            run_id=run.run_id,
            harness=__version__,
            machine=MACHINE,
            command=request.options.command,
            interrupted=code == 130,
            outcomes=tuple(told[name] for name in asked if name in told),
        )
        write_documents(run, report, PLAYBOOK)
        for one in report.outcomes:
            screen.outcome(one, run.path)
        screen.done(report, run.path)
        return code

    return run_all


HUNG = outcome(ComparedVerdict(verdict="HANG", cause="lock_cycle", rank=(1,), layer=None, step=None), "thread_lock")
HEALTHY = outcome(ComparedVerdict(verdict="PASS", cause=None, rank=(), layer=None, step=None), "thread_lock_healthy")


@pytest.mark.parametrize(
    ("pattern", "outcomes", "code", "exit_code", "lines"),
    [
        ("thread_lock", (HUNG, HEALTHY), 124, 0, ["2 of 2 right"]),
        ("*_healthy", (HEALTHY,), 0, 0, ["1 of 1 right"]),
        ("thread_*", (replace(HUNG, culprit=None), HEALTHY), 124, 1, ["1 of 2 right"]),
        ("thread_*", (HUNG,), 130, 130, ["1 of 2 right"]),
    ],
)
def test_programs_of_the_corpus_are_chosen_by_name_and_compared_with_their_labels(
    pattern: str,
    outcomes: tuple[Outcome, ...],
    code: int,
    exit_code: int,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one_program(tmp_path)
    monkeypatch.setattr(run_selftest, "corpus_root", lambda: tmp_path)
    monkeypatch.setattr(run_selftest, "run_all", saying(*outcomes, code=code))
    request = replace(REQUEST, programs=(pattern,), out=tmp_path / "out")
    assert selftest(request) == exit_code
    shown = capsys.readouterr().out.splitlines()
    assert set(lines) <= set(shown)
    assert len([line for line in shown if line.startswith(("right", "WRONG"))]) == len(outcomes)


def test_an_unknown_program_of_the_corpus_is_a_usage_error_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_program(tmp_path)
    monkeypatch.setattr(run_selftest, "corpus_root", lambda: tmp_path)
    with pytest.raises(UsageError, match='did you mean "thread_lock"'):
        selftest(replace(REQUEST, programs=("thread_lok",)))


def test_a_program_that_this_machine_cannot_run_is_skipped_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_program(tmp_path)
    monkeypatch.setattr(run_selftest, "corpus_root", lambda: tmp_path)
    monkeypatch.setattr(run_selftest, "lacking", lambda trial: None if trial.healthy else "root")
    monkeypatch.setattr(run_selftest, "run_all", saying(HEALTHY))
    assert selftest(replace(REQUEST, programs=("thread_lock",), out=tmp_path / "out")) == 0
    assert "SKIP   thread_lock  needs root" in capsys.readouterr().out


def test_what_the_label_says_reaches_the_launch_and_what_is_due_does_not(tmp_path: Path) -> None:
    text = 'LABEL = {"verdict": "HANG", "cause": "lock_cycle", "ranks": 4, "limits": {"busy_s": 8}, "words": ["fd"]}\n'
    (tmp_path / "io_odd.py").write_text(text)
    fault, twin_ = run_selftest.corpus(tmp_path)
    spec = run_selftest._trial_spec(fault, tmp_path)
    assert (spec.ranks, spec.limits.busy_s, spec.program[-2:]) == (4, 8.0, ("fault", "fd"))
    assert run_selftest._trial_spec(twin_, tmp_path).program[-2:] == ("healthy", "fd")
    assert (spec.expect.verdict, spec.expect.cause, spec.fault) == ("PASS", None, None)
