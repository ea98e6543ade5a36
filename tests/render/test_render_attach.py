"""A job that was only looked at, as people are told of it: never an error, and no command that cannot be run."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from render_samples import DEADLOCK, MIXED

from nsa_harness.core.evidence.live import FirstSnapshot
from nsa_harness.core.report import RUNS_ON, Artifact, Finding, Outcome, Report, Status, Verdict
from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.events import Events
from nsa_harness.render.terminal.screen import done_lines, first_snapshot_lines, outcome_lines
from nsa_harness.subject.playbook import PLAYBOOK

RUN_DIR = Path("reports/20261118T120000-ab12")
ROWS = (
    FirstSnapshot(
        ranks=(0,), blocked_in="barrier", place="ckpt.py:8", function="save", idle_s=164.0, cpu_s=3.8, age_s=184.0
    ),
    FirstSnapshot(
        ranks=(1, 2, 3),
        blocked_in="all_reduce (DDP)",
        place="train.py:36",
        function="main",
        idle_s=None,
        cpu_s=3.9,
        age_s=184.0,
    ),
)


def looked_at(cause: str) -> Outcome:
    said = Finding(code=cause, claim="it was looked at", ranks=(), place=None, confidence=1.0, proof=(), advice="Wait.")
    verdict = Verdict(status=Status.ERROR, kind=None, cause=cause, summary=said.claim)
    return replace(
        DEADLOCK,
        verdict=verdict,
        findings=(said,),
        expected=False,
        repeat_command=None,
        next_command=None,
        proof_reason=None,
        ending_text=RUNS_ON,
    )


def report_of(outcome: Outcome, *, interrupted: bool = False) -> Report:
    return replace(MIXED, outcomes=(outcome,), interrupted=interrupted, not_run=())


@pytest.mark.parametrize(
    ("cause", "first"),
    [
        ("still_running", "MOVES  {}   no hang, still running"),
        ("suspected", "STALL  {}   not proven"),
    ],
)
def test_a_job_that_was_only_looked_at_moves_or_stalls_and_is_no_error(cause: str, first: str) -> None:
    outcome = looked_at(cause)
    assert next(iter(outcome_lines(outcome, 100))) == first.format(outcome.spec.scenario)
    word = first.partition(" ")[0]
    assert summary_md(report_of(outcome), PLAYBOOK).startswith(f"# {word} ")
    assert f'<span class="verdict">{word}</span>' in report_html(report_of(outcome), PLAYBOOK)


def test_what_could_not_be_judged_stays_an_error() -> None:
    assert next(iter(outcome_lines(looked_at("harness_error"), 100))).startswith("ERROR  ")


def test_no_command_is_offered_that_starts_a_job_that_was_only_found() -> None:
    for outcome in (looked_at("suspected"), replace(DEADLOCK, expected=False, ending_text=RUNS_ON)):
        assert not any("nsa-harness run" in line for line in done_lines(report_of(outcome), PLAYBOOK, RUN_DIR, 100))
    stopped = report_of(looked_at("interrupted"), interrupted=True)
    assert not any("--resume" in line for line in done_lines(stopped, PLAYBOOK, RUN_DIR, 100))
    ours = report_of(replace(looked_at("interrupted"), ending_text="by itself, no process left"), interrupted=True)
    assert any("--resume" in line for line in done_lines(ours, PLAYBOOK, RUN_DIR, 100))


def test_the_first_look_has_a_row_for_ranks_that_stand_alike() -> None:
    assert list(first_snapshot_lines(ROWS, 80)) == [
        "first snapshot, 3 min 4 s after the start; a second one will show progress",
        "  rank   in                 at                   idle for   CPU time",
        "     0   barrier            ckpt.py:8 save     2 min 44 s      3.8 s",
        "   1-3   all_reduce (DDP)   train.py:36 main    not known      3.9 s",
    ]


def test_the_first_look_is_an_event() -> None:
    stream = io.StringIO()
    Events(stream, "r", lambda: 0.5).on_first_snapshot("train", ROWS)
    event = json.loads(stream.getvalue())
    assert (event["event"], event["scenario"]) == ("look", "train")
    assert [(row["ranks"], row["blocked_in"], row["idle_s"]) for row in event["rows"]] == [
        ([0], "barrier", 164.0),
        ([1, 2, 3], "all_reduce (DDP)", None),
    ]


def test_a_pattern_of_files_is_no_link() -> None:
    dumps = (Artifact(path="dumps/rank*.txt", count=6, absent=None), Artifact(path="profile.txt", count=7, absent=None))
    page = report_html(report_of(replace(DEADLOCK, artifacts=dumps)), PLAYBOOK)
    assert f'href="{DEADLOCK.dir}/profile.txt"' in page
    assert "<code>dumps/rank*.txt</code>" in page
    assert "%2A" not in page
