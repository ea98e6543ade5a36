"""The values that decide: of a hang, of a failure, and of a job that runs without the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROGRAMS, Workspace
from .jobs import TORCHRUN, running, stands, until
from .test_attach import ranks_of

PROGRAM = PROGRAMS / "values.py"
SECRET = "correct-horse-7"


def values(outcome: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """name -> value -> ranks, of the names that decide."""
    decisive = [value for value in outcome["values"] if value["decides"]]
    return {value["name"]: {equal["value"]: equal["ranks"] for equal in value["values"]} for value in decisive}


def shows(directory: Path, text: str) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return [path.name for path in files if text.encode() in path.read_bytes()]


def test_early_stopping_on_one_rank_shows_its_counter(workspace: Workspace) -> None:
    outcome = workspace.outcome_of_script(PROGRAM, 2, "stop")
    told = values(outcome)
    assert (outcome["verdict"], outcome["culprit"]["ranks"]) == ("HANG", [1])
    assert list(told)[:2] == ["stopper.bad", "stopper.patience"]
    assert (told["stopper.bad"], told["stopper.patience"]) == ({"0": [0], "3": [1]}, {"3": [0, 1]})
    attempt = workspace.directory / "reports" / "latest" / outcome["dir"]
    assert "stopper.bad" in (attempt / "rank1" / "values.json").read_text()
    assert shows(attempt, SECRET) == []
    again = workspace.harness("report", "--json")
    assert json.loads(again.out)["outcomes"][0]["values"] == outcome["values"]
    summary = (attempt.parent / "SUMMARY.md").read_text()
    assert "| `stopper.bad` | 0 | 3 |" in summary


@pytest.mark.slow
def test_unequal_loaders_show_their_lengths(workspace: Workspace) -> None:
    outcome = workspace.outcome_of_script(PROGRAM, 2, "uneven")
    assert outcome["verdict"] == "HANG"
    assert values(outcome)["len(loader)"] == {"8": [0], "9": [1]}
    ran = workspace.harness("report", COLUMNS="120")  # a narrower terminal has no room for values
    assert "len(loader)  8 | 9" in ran.out


@pytest.mark.slow
def test_a_failure_shows_the_condition_that_led_to_it(workspace: Workspace) -> None:
    outcome = workspace.outcome_of_script(PROGRAM, 2, "fail")
    told = values(outcome)
    assert (outcome["verdict"], outcome["culprit"]["ranks"]) == ("FAIL", [1])
    assert (told["width"], told["limit"]) == ({"5": [1]}, {"4": [1]})


@pytest.mark.slow
def test_a_job_without_a_probe_shows_plain_variables(workspace: Workspace) -> None:
    with running([*TORCHRUN, str(PROGRAM), "stop"], workspace) as job:
        until(lambda: len(ranks_of(job)) == 2 and all(map(stands, ranks_of(job))), "both ranks stand")
        ran = workspace.harness("attach", str(job.pid), "limits.stall_s=3")
        quiet = workspace.harness("attach", str(job.pid), "limits.stall_s=3", "--no-values", "--out", "quiet")
    assert (ran.code, quiet.code) == (124, 124), ran.out
    told = {value["name"]: value for value in ran.outcome["values"]}
    assert len(told["loss"]["values"]) == 2
    assert told["loss"]["decides"]
    (unread,) = json.loads((workspace.directory / "quiet" / "latest" / "report.json").read_text())["outcomes"]
    assert [value["values"] for value in unread["values"]] == [[]] * len(unread["values"])  # names, from the source
    assert shows(workspace.directory / "quiet", "values.json") == []
    assert shows(ran.run_dir, SECRET) == []


@pytest.mark.slow
def test_without_values_none_is_read(workspace: Workspace) -> None:
    ran = workspace.harness("run", str(PROGRAM), "--ranks", "2", "--no-values", "--", "stop")
    assert (ran.outcome["verdict"], ran.outcome["values"]) == ("HANG", [])
    assert list(ran.run_dir.rglob("*values.json")) == []
