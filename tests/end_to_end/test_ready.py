"""`ready` for real: a checkpoint of a run that was killed, and a check that was killed itself."""

from __future__ import annotations

import json

import pytest

from .conftest import Workspace
from .jobs import until

CHECKLIST = """
schema: 1
phases:
  - {name: data, runs: [ready_data]}
  - {name: checkpoint, runs: [ready_checkpoint, ready_killed]}
  - {name: resume, runs: [ready_resume], needs: [checkpoint], set: {train.resume: "{ready_killed}"}}
criteria:
  steps: {metric: steps, in: [ready_checkpoint], ge: 10}
  alike: {metric: loss_last, in: [ready_resume], minus: ready_checkpoint, lt: 1e-6}
  replicas: {metric: replicas_apart, in: [ready_checkpoint], eq: 0}
  gpu_memory: {metric: peak_gpu_bytes, in: [ready_checkpoint], lt: 30e9, needs: {gpus: 64}}
"""
TOO_FEW = """
schema: 1
phases:
  - {name: data, runs: [ready_data]}
criteria:
  steps: {metric: steps, in: [ready_data], ge: 201}
"""


@pytest.mark.slow
def test_a_check_that_is_killed_goes_on_to_its_go_and_a_missed_number_is_no_go(workspace: Workspace) -> None:
    file = workspace.directory / "mine.readiness.yaml"
    file.write_text(CHECKLIST)
    words = ("ready", "ci", "--checklist", file.name)
    reports = workspace.directory / "reports"
    killed = workspace.start(*words)
    until(lambda: bool(list(reports.glob("2*/ready_checkpoint/verdict.json"))), "the second run is judged", 120)
    killed.kill()
    killed.wait()
    whole = workspace.harness(*words)
    record = json.loads((whole.run_dir / "readiness.json").read_text())
    assert (whole.code, record["verdict"], record["ended"]) == (0, "GO", True), whole.out
    assert len(list(reports.glob("2*"))) == 1
    assert "2 runs already finished" in " ".join(whole.out.split())
    assert {row["name"]: row["result"] for row in record["criteria"]} == {
        "steps": "met", "alike": "met", "replicas": "met", "gpu_memory": "not tested",
    }  # fmt: skip
    assert "nccl" in {one["what"] for one in record["not_tested"]}
    file.write_text(TOO_FEW)
    missed = workspace.harness(*words)
    assert (missed.code, len(list(reports.glob("2*")))) == (1, 2)
    assert missed.out.rstrip().endswith("NO-GO  ready ci   steps: 200 in ready_data, limit ≥ 201")
