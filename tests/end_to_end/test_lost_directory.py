"""A run whose folder is taken away by its own program: one attempt, one sentence, and nothing is written elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Workspace, processes_of

# The ranks need no torch: who moves the folder is all that counts.
MOVES = """
import os, shutil, sys, time
if os.environ["RANK"] == "0":
    attempt, scratch = os.environ["NSA_OUT_DIR"], os.path.abspath("scratch")
    os.rename(attempt, scratch)
    if sys.argv[1] == "link":
        os.symlink(scratch, attempt)
    elif sys.argv[1] == "delete":
        shutil.rmtree(os.path.dirname(attempt))
    open("moved", "w").write("\\n".join(os.listdir(scratch)))
while not os.path.exists("moved"):
    time.sleep(0.01)
"""


def boards(run: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"nsa-harness-{run}-*"))


@pytest.mark.parametrize("way", ["link", pytest.param("move", marks=pytest.mark.slow)])
def test_an_attempt_whose_folder_was_taken_away_is_one_attempt_and_one_sentence(workspace: Workspace, way: str) -> None:
    (workspace.directory / "moves.py").write_text(MOVES)
    ran = workspace.harness("run", "--script", "moves.py", "--ranks", "2", "--", way)
    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (125, "ERROR", "attempt_directory_lost")
    assert ran.outcome["summary"] == (
        f"reports/{ran.run_dir.name}/moves, the directory of this attempt, was removed or replaced, or cannot be"
        " accessed, so nothing was judged"
    )
    assert [one["attempt"] for one in json.loads((ran.run_dir / "report.json").read_text())["outcomes"]] == [1]
    before = (workspace.directory / "moved").read_text().splitlines()
    assert sorted(path.name for path in (workspace.directory / "scratch").iterdir()) == sorted(before)
    assert boards(ran.run_dir.name) == []
    assert processes_of(workspace.directory) == []


@pytest.mark.slow
def test_a_run_whose_folder_was_deleted_ends_with_one_sentence(workspace: Workspace) -> None:
    (workspace.directory / "moves.py").write_text(MOVES)
    ran = workspace.harness("run", "--script", "moves.py", "--ranks", "2", "--", "delete")
    name = Path(workspace.directory / "reports" / "latest").readlink().name
    assert ran.code == 125
    assert ran.err == (
        f"reports/{name}: the directory of this run was removed while the run was in progress, so no report could be"
        " written\n"
    )
    assert not (workspace.directory / "reports" / name).exists()
    assert boards(name) == []
    assert processes_of(workspace.directory) == []
