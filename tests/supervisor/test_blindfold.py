"""A verdict comes from what happened: the name of a scenario, what it expects and what was planted change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attempts import STORED_CASES, unpack

from nsa_harness.commands.judge import judge_attempt
from nsa_harness.core.report import Outcome
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir

UNKNOWN = {
    "scenario": "a",
    "about": "",
    "program": ["/home/ada/b.py"],
    "subject": "b.py",
    "expect": {"verdict": "PASS", "cause": None, "missing_grads": None, "metrics": []},
    "fault": None,
    "tags": [],
    "settings": [],
    "notes": [],
    "spec_hash": "0",
}


def blindfold(attempt: AttemptDir) -> None:
    """Takes the plan of the run away, and the names that the harness's own planted faults leave in stacks."""
    told = json.loads(attempt.spec.read_text())
    attempt.spec.write_text(json.dumps({**told, **UNKNOWN}))
    for path in attempt.path.rglob("*"):
        if path.is_file() and path != attempt.spec:
            whole = path.read_bytes()
            path.write_bytes(
                whole.replace(b"harness/nsa_harness/faults/", b"package/module/").replace(b"fault", b"thing")
            )


def diagnosis(outcome: Outcome) -> dict[str, Any]:
    culprit = outcome.culprit
    place = culprit.place if culprit else None
    return {
        "verdict": (outcome.verdict.status, outcome.verdict.kind, outcome.verdict.cause),
        "culprit": (culprit.ranks, culprit.step, culprit.collective) if culprit else None,
        "place": (place.line, place.module, place.layer) if place else None,
        "victims": outcome.victims,
        "findings": [(one.code, one.ranks, one.confidence) for one in outcome.findings],
    }


@pytest.mark.parametrize("case", STORED_CASES)
def test_the_diagnosis_is_the_same_without_the_fault_the_name_and_what_was_expected(case: str, tmp_path: Path) -> None:
    attempt = unpack(case, tmp_path / case)
    seeing = judge_attempt(attempt, load_spec(attempt.spec), "node", 1)
    blindfold(attempt)
    blind = judge_attempt(attempt, load_spec(attempt.spec), "node", 1)
    assert (blind.spec.scenario, blind.spec.about) == ("a", "")
    assert diagnosis(blind) == diagnosis(seeing)
