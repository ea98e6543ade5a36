"""`nsa-harness bisect --engine slurm` on a real cluster: several probes at once, and a controller that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tools.slurm_lab import SlurmLab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "bad_batch.py"
BISECT = [
    str(Path(sys.executable).parent / "nsa-harness"), "bisect", str(PROGRAM), "--ranks", "1", "--items", "batch=0:8",
    "--arg", "--batches={items}",
]  # fmt: skip
ON_THE_CLUSTER = ["--engine", "slurm", "--jobs", "4"]


def bisect(directory: Path, *words: str) -> dict[str, Any]:
    """Run a bisection to its end, and return its bisect.json."""
    subprocess.run([*BISECT, *words], cwd=directory, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads((directory / "reports" / "latest" / "bisect.json").read_text())
    return document


def rounds(document: dict[str, Any]) -> int:
    """Return the number of rounds of a search. The probes of one round start together."""
    starts = [probe["started_s"] for probe in document["probes"]]
    return 1 + sum(later - earlier > 1.0 for earlier, later in pairwise(starts))


def test_four_probes_at_once_need_fewer_rounds_for_the_same_answer(tmp_path: Path, cluster: SlurmLab) -> None:
    answers = []
    for name, words in (("one", ["--no-fork"]), ("four", ON_THE_CLUSTER)):
        (tmp_path / name).mkdir()
        answers.append(bisect(tmp_path / name, *words))
    alone, together = answers
    assert alone["answer"] == together["answer"]
    assert together["answer"]["items"] == [5]
    assert rounds(together) < rounds(alone)
    assert cluster.slurm("squeue", "--noheader") == ""


def test_a_search_whose_controller_is_killed_continues_and_leaves_no_job(tmp_path: Path, cluster: SlurmLab) -> None:
    with subprocess.Popen(
        [*BISECT, *ON_THE_CLUSTER], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as command:  # fmt: skip
        # Killed while four probes are under way: after both controls.
        wait_until(lambda: (cluster.slurm("squeue", "--noheader") or "").count("\n") >= 3, "no four jobs", 300)
        os.kill(command.pid, signal.SIGKILL)
    document = bisect(tmp_path, *ON_THE_CLUSTER)
    assert document["answer"]["items"] == [5]
    assert len([path for path in (tmp_path / "reports").iterdir() if path.name != "latest"]) == 1
    assert cluster.slurm("squeue", "--noheader") == ""
