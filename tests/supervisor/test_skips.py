"""What this machine cannot run has a folder of its own in the run, with its result, and counts as no attempt."""

from __future__ import annotations

from pathlib import Path

from nsa_harness.commands.judge import record_skip
from nsa_harness.core.plan import Skip
from nsa_harness.core.report import Status
from nsa_harness.supervisor.storage.rundir import RunDir

SKIP = Skip(scenario="ddp_nccl", about="", reason="NCCL needs a GPU for each of 2 ranks; this machine has no GPU")


def test_a_skip_leaves_its_result_in_its_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    outcome = record_skip(run.attempt("ddp_nccl"), SKIP)
    assert (outcome.verdict.status, outcome.verdict.summary, outcome.trouble) == (Status.SKIP, SKIP.reason, ())
    assert [path.name for path in (tmp_path / "ddp_nccl").iterdir()] == ["result.txt"]
    assert (tmp_path / "ddp_nccl" / "result.txt").read_text() == "SKIP\n"
    assert list(run.attempts()) == []


def test_it_says_so_again_where_a_run_is_gone_on_with(tmp_path: Path) -> None:
    first, second = (record_skip(RunDir(tmp_path).attempt("ddp_nccl"), SKIP) for _ in range(2))
    assert first == second


def test_a_place_that_something_else_has_is_trouble_and_the_skip_stands(tmp_path: Path) -> None:
    (tmp_path / "ddp_nccl").symlink_to(tmp_path)
    outcome = record_skip(RunDir(tmp_path).attempt("ddp_nccl"), SKIP)
    assert outcome.verdict.status is Status.SKIP
    assert [one.what for one in outcome.trouble] == ["ddp_nccl"]
    assert not (tmp_path / "result.txt").exists()
