"""--deepen on a program whose backward fails, and a script of recorded calls that hangs as the program did."""

from __future__ import annotations

import json
import sys

import pytest

OVERWRITTEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.ones(4, requires_grad=True)
gate = torch.sigmoid(weight)
loss = (gate * gate).sum()
gate += 1.0
loss.backward()
"""
PARTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(4):
    dist.all_reduce(torch.ones(8))
if dist.get_rank() == 1:
    dist.broadcast(torch.ones(1), 0)
else:
    dist.all_reduce(torch.ones(8))
"""


def test_a_look_repeats_the_launch_with_one_change_and_counts_for_nothing(workspace):
    """Without torch: what is tested here is what happens around the look, which then finds nothing more."""
    (workspace.directory / "fails.py").write_text("loss = None\nloss.backward()\n")
    run = {"ranks": 1, "command": [sys.executable, "fails.py"]}
    workspace.scenario("fails", json.dumps({"about": "fails", "run": run}))
    ran = workspace.harness("run", "fails", NSA_HARNESS_DEEPEN="1")
    told = [(one["dir"], one["verdict"], one["final"], one["flaky"]) for one in ran.report["outcomes"]]
    assert told == [("fails", "FAIL", True, False), ("fails~2", "FAIL", False, False)]
    assert ran.code == 1
    first, second = (json.loads((ran.run_dir / name / "spec.json").read_text()) for name in ("fails", "fails~2"))
    assert (first["env"], second["env"]) == ([], [["_NSA_HARNESS_ANOMALY", "1"]])
    sentence = "with autograd's anomaly detection (attempt 2) the run ended the same way at the same line"
    assert sentence in (ran.run_dir / "SUMMARY.md").read_text()
    assert sentence in " ".join(ran.out.split())
    assert workspace.harness("run", str(ran.run_dir / "fails~2" / "spec.json")).code == 1


@pytest.mark.slow
def test_a_second_launch_with_anomaly_detection_names_the_forward_line(workspace):
    (workspace.directory / "gates.py").write_text(OVERWRITTEN)
    ran = workspace.harness("run", "--deepen", "--script", "gates.py", "--ranks", "1")
    first, second = ran.report["outcomes"]
    assert (ran.code, first["verdict"], first["final"], second["final"]) == (1, "FAIL", True, False)
    assert not first["flaky"]
    assert first["culprit"]["place"]["line"] == 8
    assert [one["code"] for one in first["findings"]][-1] == "deepened"
    assert second["detail"]["deepening"]["of"] == 1
    assert "_NSA_HARNESS_ANOMALY" in (ran.run_dir / second["dir"] / "command.txt").read_text()
    again = workspace.harness("report")
    assert again.report["outcomes"][0]["findings"] == first["findings"]


@pytest.mark.slow
def test_the_script_of_recorded_calls_hangs_for_the_same_cause(workspace):
    (workspace.directory / "parted.py").write_text(PARTED)
    ran = workspace.harness("run", "--script", "parted.py")
    script = ran.run_dir / "parted" / "repro" / "repro.py"
    assert ran.outcome["cause"] == "collective_order_mismatch"
    assert "parted" not in script.read_text()
    repeated = workspace.harness("run", "--script", str(script))
    assert (repeated.outcome["verdict"], repeated.outcome["cause"]) == ("HANG", "collective_order_mismatch")
