"""A claim and a verification as a user gives them, under real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Ran, Workspace

SMALL = ("model.layers=3", "model.seq_len=64", "limits.stall_s=1")


def ledger(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ran.directory / "reports" / "claims.jsonl").read_text().splitlines()]


def counts(line: dict[str, Any]) -> list[tuple[int, int]]:
    return [(side["failed"], side["of"]) for side in line["sides"]]


@pytest.mark.slow
def test_what_reentrant_checkpointing_breaks_is_mended_by_the_other_kind(workspace: Workspace) -> None:
    """The failure is torch's own, and the answer as quick as it can be: it comes each time, and never without it."""
    words = ("ddp_gc_reentrant", "gc.mode=reentrant,non_reentrant", "run.ranks=1", "train.steps=1", *SMALL[:2])
    ran = workspace.harness("claim", *words, "--pairs", "1")
    (line,) = ledger(ran)
    assert (ran.code, line["result"], counts(line)) == (125, "undecided", [(1, 1), (0, 1)]), ran.out + ran.err
    assert "1  without it  FAIL" in ran.out
    assert "ready_twice" in ran.out
    assert {one["verdict"] for one in ran.report["outcomes"]} == {"FAIL", "PASS"}


@pytest.mark.slow
def test_a_true_mitigation_of_a_planted_hang_is_supported_and_the_failed_run_is_verified(workspace: Workspace) -> None:
    fault = "fault={kind: deadlock, rank: 1, step: 2, when: {recomputed: [1]}}"
    words = ("fault_deadlock", fault, "gc.layers=all,none", "train.steps=3", *SMALL)
    ran = workspace.harness("claim", *words)
    (line,) = ledger(ran)
    assert (ran.code, line["result"], counts(line)) == (0, "supported", [(5, 5), (0, 5)]), ran.out + ran.err
    assert (line["fixed"], line["computes"]) == ("yes", "the same")
    failed = ran.run_dir / "fault_deadlock@gc.layers=all"
    again = workspace.harness("run", "--verify", str(failed))
    assert again.code == 1, again.out + again.err
    assert "NOT FIXED  run 1 failed in the same way: HANG · backward_function_blocked" in again.out
    assert [one["result"] for one in ledger(again)] == ["supported", "not fixed"]


@pytest.mark.slow
def test_a_false_mitigation_is_refuted(workspace: Workspace) -> None:
    ran = workspace.harness("claim", "fault_deadlock", "parallel.find_unused_parameters=false,true", *SMALL)
    (line,) = ledger(ran)
    assert (ran.code, line["result"], counts(line)) == (1, "refuted", [(6, 6), (6, 6)]), ran.out + ran.err
    assert (line["fixed"], line["computes"]) == ("no", "the same")


@pytest.mark.slow
def test_a_mitigation_that_no_longer_averages_the_gradients_is_refuted_for_that(workspace: Workspace) -> None:
    ran = workspace.harness("claim", "fault_deadlock", "parallel.wrapper=ddp,none", *SMALL)
    (line,) = ledger(ran)
    assert (ran.code, line["result"], counts(line)) == (1, "refuted", [(2, 2), (2, 2)]), ran.out + ran.err
    assert line["why"].startswith("it changes what is computed: ")
    assert "of step 1" in line["computes"]
    refused = workspace.harness("claim", "fault_deadlock", "parallel.wrapper=ddp,none", "gc.layers=none,all")
    assert refused.code == 2
    assert "parallel.wrapper and gc.layers" in refused.err
    assert len(ledger(refused)) == 1


@pytest.mark.slow
def test_words_of_a_script_are_a_side_each(workspace: Workspace) -> None:
    (workspace.directory / "train.py").write_text('import sys\n\nsys.exit("--bad" in sys.argv)\n')
    ran = workspace.harness("claim", "train.py", "--ranks", "1", "--arg=--bad,--good", "--", "--steps", "5")
    (line,) = ledger(ran)
    assert (ran.code, line["result"], counts(line)) == (0, "supported", [(5, 5), (0, 5)]), ran.out + ran.err
    assert [side["what"] for side in line["sides"]] == ["--bad", "--good"]
