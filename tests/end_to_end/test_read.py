"""`read PATH...`: real jobs that ran without us, known by the logs and dumps that they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import PROGRAMS, Workspace
from .jobs import TORCHRUN, running, until
from .test_attach import ranks_of

PROGRAM = PROGRAMS / "left_behind.py"
PY_SPY = str(Path(sys.executable).parent / "py-spy")


def read(workspace: Workspace, *paths: str) -> tuple[int, dict[str, Any]]:
    ran = workspace.harness("read", *paths, "--json")
    return ran.code, json.loads(ran.out)["outcomes"][0]


def ended(workspace: Workspace, mode: str, *options: str) -> None:
    """torchrun's own output is in torchrun.txt, that of the ranks where its options lead it."""
    with (workspace.directory / "torchrun.txt").open("wb") as output:
        words = [*TORCHRUN, *options, str(PROGRAM), mode]
        subprocess.run(words, cwd=workspace.directory, stdout=output, stderr=output, check=False, timeout=120)


def logs_of(*words: str) -> Sequence[str]:
    return ("--log-dir", "logs", *words)


@pytest.mark.slow
def test_a_hung_job_is_told_from_its_files_as_a_run_tells_it(workspace: Workspace) -> None:
    left = workspace.directory / "left"
    left.mkdir()
    for rank in range(2):
        os.mkfifo(left / f"ask.{rank}")
    command = [*TORCHRUN, *logs_of("--redirects", "3"), str(PROGRAM), "hang", str(left)]
    with running(command, workspace) as job:
        until(lambda: len(ranks_of(job)) == 2, "both ranks are started")
        stand = lambda one: one.status() == psutil.STATUS_SLEEPING and _in_call(one.pid)  # noqa: E731
        until(lambda: all(map(stand, ranks_of(job))), "both ranks stand in a collective")
        for rank, process in enumerate(ranks_of(job)):
            (left / f"ask.{rank}").write_bytes(b"x")
            stack = subprocess.run([PY_SPY, "dump", "--pid", str(process.pid)], capture_output=True, check=True)
            (left / f"spy_rank{rank}.txt").write_bytes(stack.stdout)
        until(lambda: len(list(left.glob("dumped.*"))) == 2, "both ranks have written their dumps")
    watched = workspace.outcome_of_script(PROGRAM, 2, "hang")

    for kept in (["left", "logs"], ["left/spy_rank0.txt", "left/spy_rank1.txt", "left/threads_rank0.txt"]):
        code, outcome = read(workspace, *kept)
        told, known = outcome["culprit"], watched["culprit"]
        assert (code, outcome["verdict"], outcome["cause"]) == (124, "HANG", watched["cause"])
        assert told["ranks"] == known["ranks"]
        assert [told["place"][key] for key in ("file", "line")] == [known["place"][key] for key in ("file", "line")]
        assert 0.6 <= outcome["findings"][0]["confidence"] < 0.9
    assert watched["findings"][0]["confidence"] >= outcome["findings"][0]["confidence"]


def _in_call(pid: int) -> bool:
    """Its main thread stands in the operation: the collective before the last is over."""
    done = subprocess.run([PY_SPY, "dump", "--pid", str(pid)], capture_output=True, text=True, check=False)
    return "log_mean (" in done.stdout or "barrier (" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [logs_of("--redirects", "3"), logs_of("--tee", "3"), ()], ids=["redirected", "teed", "plain"]
)
def test_the_rank_that_raised_is_named_wherever_its_lines_are(workspace: Workspace, options: Sequence[str]) -> None:
    ended(workspace, "raise", *options)
    code, outcome = read(workspace, "torchrun.txt", *(["logs"] if options and "--tee" not in options else []))
    line = next(at for at, text in enumerate(PROGRAM.read_text().splitlines(), start=1) if "bad batch" in text)
    assert (code, outcome["verdict"], outcome["cause"], outcome["culprit"]["ranks"]) == (1, "FAIL", "exception", [1])
    assert (outcome["culprit"]["place"]["line"], outcome["scenario"]) == (line, "left_behind")
    assert outcome["exit_codes"]["1"] == 1


@pytest.mark.slow
def test_a_rank_that_was_killed_is_told_from_torchruns_own_words(workspace: Workspace) -> None:
    ended(workspace, "kill", *logs_of("--redirects", "3"))
    code, outcome = read(workspace, "torchrun.txt", "logs")
    assert (code, outcome["verdict"], outcome["cause"], outcome["culprit"]["ranks"]) == (1, "FAIL", "killed", [1])
    with (workspace.directory / "torchrun.txt").open("a") as log:  # what srun says where the kernel did it
        log.write("slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks")
        log.write(" have been OOM Killed.\n")
    assert read(workspace, "torchrun.txt", "logs")[1]["cause"] == "host_oom"


@pytest.mark.slow
def test_a_job_that_ended_well_is_neither_failed_nor_hung(workspace: Workspace) -> None:
    ended(workspace, "healthy", *logs_of("--tee", "3"))
    (workspace.directory / "torchrun.txt").open("a").write("loss 0.1\n")
    code, outcome = read(workspace, "torchrun.txt")
    assert (code, outcome["verdict"], outcome["cause"]) == (125, "ERROR", "inconclusive")
