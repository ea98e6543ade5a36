"""`ci summary --before` over several nights of made-up runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_harness.cli.main import run_command_line
from nsa_harness.core.ci import is_flaky
from nsa_harness.core.comparison.history import Entry
from nsa_harness.render.ci_summary import MOST_BYTES, cut

SAMPLE = Path(__file__).resolve().parents[2] / "reports" / "sample"
REPORT = json.loads((SAMPLE / "report.json").read_text())
JOBS = ("gloo", "nccl")

# A night: for each scenario the verdicts of its attempts.
Night = dict[str, str]


def store(runs: Path, number: int, night: Night, jobs: tuple[str, ...] = JOBS, *, commit: str | None = None) -> None:
    """Store what the jobs of one night leave. P: passed, F: failed, H: hung, S: skipped, E: not judged."""
    words = {"P": "PASS", "F": "FAIL", "H": "HANG", "S": "SKIP", "E": "ERROR"}
    for job in jobs:
        run = runs / job / f"202611{number:02}T021700-{number:04x}"
        outcomes = []
        for scenario, letters in night.items():
            attempts = [words[letter] for letter in letters]
            flaky = len(set(attempts)) > 1
            for attempt, verdict in enumerate(attempts, 1):
                (outcome,) = json.loads(json.dumps(REPORT["outcomes"]))
                is_last = attempt == len(attempts)
                outcome |= {
                    "scenario": scenario, "verdict": verdict, "expected": verdict in ("PASS", "SKIP", "ERROR"),
                    "attempt": attempt, "dir": f"{scenario}.{attempt}", "final": is_last, "flaky": flaky,
                    "kind": "deadlock" if verdict == "HANG" else None, "summary": f"{scenario} ends as {verdict}",
                    "cause": {"PASS": None, "SKIP": None}.get(verdict, f"cause_{verdict}"),
                }  # fmt: skip
                if flaky and is_last:
                    outcome["detail"]["own_status"] = verdict
                    outcome |= {"verdict": "FAIL", "cause": "flaky", "kind": None, "expected": False}
                if outcome["verdict"] != "HANG":
                    outcome["culprit"] = None
                outcomes.append(outcome)
                (run / outcome["dir"]).mkdir(parents=True)
                facts = {
                    "git": {"commit": commit or f"{number:040x}"[::-1], "dirty": False},
                    "packages": {"torch": "2.13"},
                }
                (run / outcome["dir"] / "env.json").write_text(json.dumps(facts))
        (run / "report.json").write_text(json.dumps({**REPORT, "run_id": run.name, "outcomes": outcomes}))
        shutil.copy(SAMPLE / "run.json", run / "run.json")


Nightly = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def nightly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nightly:
    """Run the jobs of one night more, and summarize them, with what the night before left."""
    monkeypatch.chdir(tmp_path)
    before = tmp_path / "before"
    before.mkdir()
    count = 0

    def run(night: Night, **more: Any) -> tuple[int, str, dict[str, Any]]:
        nonlocal count
        count += 1
        runs = tmp_path / f"runs{count}"
        store(runs, count, night, **more)
        code = run_command_line(["ci", "summary", str(runs), "--before", "before"])
        text = capsys.readouterr().out
        run_command_line(["ci", "summary", str(runs), "--before", "before", "--json"])
        captured = capsys.readouterr()
        assert captured.err == ""
        (before / "summary.json").write_text(captured.out)
        return code, text, json.loads(captured.out)

    return run


def named(values: dict[str, Any]) -> dict[str, list[str]]:
    groups = ("new_failures", "flaky", "still_failing", "fixed")
    return {group: sorted({item["scenario"] for item in values[group]}) for group in groups if values[group]}


def test_a_regression_a_flake_and_a_fix_are_each_named_once(nightly: Nightly) -> None:
    code, text, values = nightly({"good": "P", "regresses": "P", "flakes": "P", "breaks_first": "FF"})
    assert (code, named(values)) == (1, {"new_failures": ["breaks_first"]})
    assert "No earlier night: 1 new failures, 0 flaky, 0 still failing, 0 fixed." in text
    assert "- Last good night: none is known" in text

    code, text, values = nightly({"good": "P", "regresses": "HH", "flakes": "FP", "breaks_first": "P"})
    assert (code, named(values)) == (
        124,
        {"new_failures": ["regresses"], "flaky": ["flakes"], "fixed": ["breaks_first"]},
    )
    assert "Since the last night (2026-11-01 02:17): 1 new failures, 2 flaky, 0 still failing, 1 fixed." in text
    (block,) = re.findall(r"```markdown\n(.*?)\n```", text, re.S)
    assert block.splitlines() == [
        "Title: HANG in regresses: deadlock at faults/acts.py:37",
        "",
        "Regresses ends as HANG.",
        "",
        "- Place: `/home/user/nsa-harness/harness/nsa_harness/faults/acts.py:37 _wait_for_the_lock`",
        "- Jobs: gloo, nccl",
        "- Repeat: `nsa-harness run regresses`",
        "- Last good night: 2026-11-01 02:17, commit 100000000000",
        "- First bad night: commit 200000000000",
    ]
    assert text.index("## New failures") < text.index("## Flaky") < text.index("## Fixed") < text.index("| job | PASS")
    assert "| flakes | gloo | flakes ends as PASS | 1 of 3, a rate between 1 and 91 % |" in text
    assert [item["good_commit"] for item in values["new_failures"]] == ["100000000000"]

    code, text, values = nightly({"good": "P", "regresses": "HH", "flakes": "P", "breaks_first": "P"})
    assert (code, named(values)) == (124, {"still_failing": ["regresses"]})
    assert text.count("| regresses |") == 1
    assert "| regresses | gloo, nccl | regresses ends as HANG | 2026-11-01 02:17, commit 100000000000 |" in text
    assert "```" not in text

    code, text, values = nightly({"good": "P", "regresses": "P", "flakes": "P", "breaks_first": "P"})
    assert (code, named(values)) == (0, {"fixed": ["regresses"]})
    code, text, values = nightly({"good": "P", "regresses": "P", "flakes": "P", "breaks_first": "P"})
    assert (code, named(values)) == (0, {})


def test_a_failure_that_comes_and_goes_over_the_nights_is_flaky(nightly: Nightly) -> None:
    seen = [named(nightly({"train": letters})[2]) for letters in ("P", "F", "P", "F", "P")]
    assert seen == [
        {}, {"new_failures": ["train"]}, {"fixed": ["train"]}, {"flaky": ["train"]}, {"flaky": ["train"]}
    ]  # fmt: skip


def test_one_commit_that_passes_and_fails_is_flaky_until_it_fails_too_often_in_a_row(nightly: Nightly) -> None:
    nightly({"train": "P"}, commit="a" * 40)
    seen = [named(nightly({"train": "F"}, commit="a" * 40)[2]) for _ in range(6)]
    assert [list(groups) for groups in seen] == [["flaky"]] * 4 + [["new_failures"], ["still_failing"]]


def test_a_scenario_that_passes_and_fails_in_one_night_is_flaky_however_often_it_passed_before(
    nightly: Nightly,
) -> None:
    for _ in range(3):
        nightly({"train": "P"})
    assert named(nightly({"train": "PFF"})[2]) == {"flaky": ["train"]}


def test_a_failure_that_changes_is_new_and_a_skip_is_neither_failed_nor_fixed(nightly: Nightly) -> None:
    nightly({"train": "P"})
    assert named(nightly({"train": "F"})[2]) == {"new_failures": ["train"]}
    assert named(nightly({"train": "S"})[2]) == {}
    assert named(nightly({"train": "F"})[2]) == {"still_failing": ["train"]}
    assert named(nightly({"train": "H"})[2]) == {"new_failures": ["train"]}


def test_a_run_that_could_not_be_judged_is_new_only_once(nightly: Nightly) -> None:
    nightly({"train": "P"})
    assert nightly({"train": "E"})[0] == 125
    code, _, values = nightly({"train": "E"})
    assert (code, named(values)) == (125, {"still_failing": ["train"]})


def test_a_night_that_skipped_everything_is_red(nightly: Nightly) -> None:
    code, text, _ = nightly({"train": "S"})
    assert (code, text.splitlines()[0]) == (125, "# RED: everything was skipped")


def test_the_reports_of_the_last_night_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path / "before", 1, {"train": "P", "other": "F"})
    store(tmp_path / "runs", 2, {"train": "F", "other": "P"})
    run_command_line(["ci", "summary", str(tmp_path / "runs"), "--before", str(tmp_path / "before"), "--json"])
    assert named(json.loads(capsys.readouterr().out)) == {"new_failures": ["train"], "fixed": ["other"]}


@pytest.mark.parametrize(
    "damaged", ["", "[]", "{}", '{"history": 3}', '{"history": {"entries": [{"job": "a", "surroundings": 7}]}}']
)
def test_a_damaged_summary_of_the_last_night_is_noted(
    damaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "summary.json").write_text(damaged)
    store(tmp_path / "runs", 2, {"train": "P"})
    code = run_command_line(["ci", "summary", str(tmp_path / "runs"), "--before", str(tmp_path / "before")])
    captured = capsys.readouterr()
    assert (code, captured.err.count("note: the last night is not known: summary.json: ")) == (0, 1)
    assert captured.out.startswith("# GREEN")


def test_a_job_that_may_fail_never_makes_the_night_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = {"include": [{"name": "gloo"}, {"name": "nightly", "may_fail": True}, {"name": "gone", "may_fail": True}]}
    (tmp_path / "matrix.json").write_text(json.dumps(matrix))
    store(tmp_path / "runs", 1, {"train": "P"}, ("gloo",))
    store(tmp_path / "runs", 2, {"train": "F"}, ("nightly",))
    code = run_command_line(["ci", "summary", str(tmp_path / "runs"), "--matrix", str(tmp_path / "matrix.json")])
    text = capsys.readouterr().out
    assert (code, text.splitlines()[0]) == (0, "# GREEN: every job that counts is as expected")
    assert "| **FAIL** | train | nightly |" in text
    assert "- gone left no report" in text


def test_an_unknown_commit_never_makes_a_failure_flaky() -> None:
    def entry(number: int, commit: dict[str, str], *, good: bool) -> Entry:
        return Entry(
            run_id=str(number), directory="", scenario="train", spec_hash="1", verdict="PASS" if good else "FAIL",
            cause=None, expected=good, summary="", numbers={}, surroundings={"host": str(number), **commit},
        )  # fmt: skip

    assert is_flaky([entry(1, {"commit": "a"}, good=True), entry(2, {"commit": "a"}, good=False)])
    for unknown in ({}, {"commit": "a with changes"}):
        assert not is_flaky([entry(1, unknown, good=True), entry(2, unknown, good=False)])


def test_a_summary_cut_within_an_issue_closes_its_block() -> None:
    text = "````markdown\n" + "a line\n" * 200_000
    shorter = cut(text)
    assert len(shorter.encode()) <= MOST_BYTES
    assert re.search(r"\n````\n\n\*\*Cut here:\*\* \d+ more lines", shorter)
