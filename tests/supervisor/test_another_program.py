"""What is told of a program that is not ours: nothing of nsa.train, in the documents of one run or of several."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import STORED_CASES, unpack

from nsa_harness.commands.judge import judge_stored
from nsa_harness.core.comparison.decisions import with_decisions
from nsa_harness.core.comparison.hypotheses import is_our_program
from nsa_harness.core.comparison.plan_file import read_stored_plan
from nsa_harness.core.report import MachineFacts, Outcome, Report
from nsa_harness.render.documents.documents import write_documents
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.rundir import RunDir

PLAN = read_stored_plan(shipped_plan()).plan
# Names of the model, of its keys, options and files, and of what is blamed in it.
OURS = re.compile(
    r"\bnsa(?!-harness|_harness)|attention|branches|gate_collapse|[a-z_]+\.csv|traces\.log|mem_rank|dtypes_report"
    r"|\b(?:model|train|gc|parallel|trace)\.[a-z_]+=|stop.gradient|static_graph|decision tree",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, ...]:
    run = tmp_path_factory.mktemp("run")
    attempts = [unpack(case, run / case) for case in STORED_CASES]
    return tuple(judge_stored(one) for one in attempts if "run.program" in one.spec.read_text())


def documents(tmp_path: Path, outcomes: Sequence[Outcome]) -> dict[str, str]:
    report = Report(
        run_id="r",
        harness="0.1.0",
        machine=MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0"),
        command="nsa-harness run --script train.py",
        interrupted=False,
        outcomes=tuple(outcomes),
    )
    run = RunDir(tmp_path)
    assert write_documents(run, with_decisions(report, PLAN), PLAYBOOK) == ()
    page = re.sub(r"<style>.*?</style>", "", run.html.read_text(), flags=re.DOTALL)
    return {"SUMMARY.md": run.summary.read_text(), "report.html": page, "report.json": run.report.read_text()}


def of_ours(texts: dict[str, str]) -> set[tuple[str, str]]:
    return {(name, found) for name, text in texts.items() for found in OURS.findall(text)}


def test_every_recorded_program_alone_meets_nothing_of_ours(judged: tuple[Outcome, ...], tmp_path: Path) -> None:
    assert len(judged) > 10
    for number, outcome in enumerate(judged):
        (folder := tmp_path / str(number)).mkdir()
        assert of_ours(documents(folder, [outcome])) == set(), outcome.dir


def test_many_together_are_asked_only_what_fits_any_program(judged: tuple[Outcome, ...], tmp_path: Path) -> None:
    texts = documents(tmp_path, judged)
    assert of_ours(texts) == set()
    summary = texts["SUMMARY.md"].replace("\\_", "_")
    assert re.findall(
        r"^\| (\w+) \| .* (?:matched|\*\*matched\*\*|not matched|undecided) \|", summary, re.MULTILINE
    ) == [name for name, gate in PLAN.gates.items() if not gate.condition.needs_our_program]
    listed = json.loads(texts["report.json"])["outcomes"][0]["detail"]["artifacts"]
    assert {"output.log", "env.json"} <= {file["path"] for file in listed}


def test_a_job_that_was_only_observed_is_another_program(judged: tuple[Outcome, ...], tmp_path: Path) -> None:
    """It has no settings at all: its device, which is not known, says that we did not launch it."""
    observed = replace(
        judged[0],
        spec=replace(judged[0].spec, settings=()),
    )
    assert not is_our_program(observed)
    assert of_ours(documents(tmp_path, [observed])) == set()


def test_one_run_of_ours_among_them_brings_its_questions_back(judged: tuple[Outcome, ...], tmp_path: Path) -> None:
    ours = replace(
        judged[0],
        spec=replace(judged[0].spec, settings=(("model.shape", "ci"),), device="cpu", scenario="ddp"),
    )
    assert "| attention |" in documents(tmp_path, [ours, *judged[1:]])["SUMMARY.md"]


SHUT = "step,layer,branch,mean,std,saturated_share\n3,0,sel,0.0001,0.0,1.0\n"


@pytest.mark.parametrize(
    ("case", "ours"), [("ancient_passes", True), ("onestep_passes", True), ("replicas_part", False)]
)
def test_tables_of_those_names_tell_something_only_where_our_own_program_wrote_them(
    case: str, ours: bool, tmp_path: Path
) -> None:
    attempt = unpack(case, tmp_path / case)
    (attempt.path / "gate_health.csv").write_text(SHUT)
    (attempt.path / "training.csv").write_text("step,loss\n1,5.5\n2,5.25\n")
    outcome = judge_stored(attempt)
    assert (outcome.metrics.get("loss_last") == 5.25) is ours
    assert ("gate_collapse" in [one.code for one in outcome.findings]) is ours
