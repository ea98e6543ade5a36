"""The page of a claim or a bisection begins with its answer, and its runs are trials that nobody expected to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bisect_samples import SINGLE
from render_samples import DEADLOCK, MIXED, PASSED, judged

from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.storage.ledger import LedgerLine, LedgerSide

_SIDE = LedgerSide(what="--fp16", spec_hash="a", failed=2, of=2, rate=1.0, low=0.16, high=1.0, ends={"HANG": 2})
CLAIM = LedgerLine(
    kind="claim",
    at="2026-11-21T10:15:00Z",
    text="bf16 helps",
    result="supported",
    why="it fails less often: 2 of 2 without it and 0 of 2 with it",
    fixed="yes",
    computes="the same",
    scenario="train",
    key="arg",
    sides=(_SIDE, replace(_SIDE, what="--bf16", failed=0, ends={})),
    confidence=0.95,
    attempts=4,
    seconds=41.0,
    runs=("r",),
    commit=None,
    dirty=None,
    machine="node7",
    command="nsa-harness claim train.py --arg=--fp16,--bf16",
)
HANGS = [replace(DEADLOCK, attempt=number, final=number == 2, dir=f"t{number}") for number in (1, 2)]
REPORT = judged(replace(MIXED, outcomes=(*HANGS, replace(PASSED, expected=False, final=False, dir="t3"))))


@pytest.mark.parametrize("text", [summary_md(REPORT, PLAYBOOK, CLAIM), report_html(REPORT, PLAYBOOK, claim=CLAIM)])
def test_a_claim_is_answered_before_its_runs(text: str) -> None:
    places = [text.index(part) for part in ("bf16 helps", "SUPPORTED", "it fails less often", "failed 2 of 2 (16 %")]
    assert places == sorted(places)
    assert places[-1] < text.index("branch_sel_only")


@pytest.mark.parametrize("text", [summary_md(REPORT, PLAYBOOK, CLAIM), report_html(REPORT, PLAYBOOK, SINGLE)])
def test_each_trial_counts_and_a_failure_is_explained_once(text: str) -> None:
    assert "superseded" not in text
    assert "PASS was not expected" not in text
    assert "3 runs" in text
    assert text.count("in two samples 3 s apart") == 1


def test_other_reports_keep_their_remarks() -> None:
    assert "superseded" in summary_md(REPORT, PLAYBOOK)
