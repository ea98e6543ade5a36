"""A claim and a verification as a user gives them, under real ranks."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from .conftest import Ran, Workspace
from .jobs import until

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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_claim_about_commits_that_is_ended_in_a_run_leaves_no_worktree_and_goes_on(
    workspace: Workspace, number: signal.Signals
) -> None:
    home, log, hold = workspace.directory, workspace.directory / "log", workspace.directory / "hold"
    program = f"""
import time
from pathlib import Path
with Path({str(log)!r}).open("a") as log:
    log.write("run ")
while Path({str(hold)!r}).exists() and Path({str(log)!r}).read_text().count("run") == 2:
    time.sleep(0.05)
"""

    def git(*words: str) -> str:
        command = ["git", "-C", str(home), "-c", "user.email=a@b", "-c", "user.name=a", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for comment in ("# one", "# two"):
        (home / "train.py").write_text(program + comment)
        git("add", "train.py")
        git("commit", "-qm", comment)
    hold.touch()
    words = ("claim", "train.py", "--ranks", "1", "--commits", "HEAD~1..HEAD", "--pairs", "1")
    command = workspace.start(*words)
    until(lambda: log.exists() and log.read_text().count("run") == 2, "second run", 120)
    assert len(git("worktree", "list").splitlines()) == 3
    command.send_signal(number)
    command.wait(120)
    until(lambda: len(git("worktree", "list").splitlines()) == 1, "worktrees removed", 60)
    hold.unlink()
    ran = workspace.harness(*words)
    *_, line = ledger(ran)
    assert (ran.code, line["attempts"], counts(line)) == (125, 2, [(0, 1), (0, 1)]), ran.out + ran.err
    assert "1 run already finished" in " ".join(ran.out.split())
    assert log.read_text().count("run") == 3  # the first run, the one that was cut short, and that one again
    assert len(git("worktree", "list").splitlines()) == 1
