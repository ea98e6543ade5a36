"""A run whose disk is filled by its own program: the end is written from the reserve, and nothing is left.

The quick siblings, with a disk that only the file calls of one process find full: supervisor/test_reserve.py, and
test_guardian.py beside it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Workspace, processes_of
from .jobs import until

pytestmark = pytest.mark.slow
FILLS = """
import os, sys, time
try:
    with open(os.path.join(os.environ["NSA_OUT_DIR"], "filler" + os.environ["RANK"]), "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
except OSError:
    pass
open(f"full.{os.environ['RANK']}", "w").close()
"""


@pytest.fixture
def filled(request: pytest.FixtureRequest, workspace: Workspace) -> Iterator[Workspace]:
    """Its reports lie on a small disk: of 24 MiB a run keeps 8 for its end."""
    reports, size = workspace.directory / "reports", getattr(request, "param", "24m")
    reports.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(reports)], check=False)
    if mounted.returncode != 0:
        pytest.skip("no file system may be mounted here")
    yield workspace
    subprocess.run(["umount", "--lazy", str(reports)], check=True)


def script(workspace: Workspace, then: str) -> None:
    (workspace.directory / "fills.py").write_text(FILLS + then)


def boards(run: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"nsa-harness-{run.name}-*"))


def test_a_run_that_fills_its_disk_is_told_as_that_with_all_its_documents(filled: Workspace) -> None:
    script(filled, "os._exit(3)\n")
    ran = filled.harness("run", "--script", "fills.py", "--ranks", "2")
    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (1, "FAIL", "disk_full")
    assert "disk_full" in (ran.run_dir / "SUMMARY.md").read_text()
    assert (ran.run_dir / "fills" / "result.txt").read_text().startswith("FAIL")
    assert (ran.run_dir / "fills" / "verdict.json").stat().st_size > 0
    assert boards(ran.run_dir) == []
    again = filled.harness("report")
    assert (again.code, again.outcome["cause"]) == (1, "disk_full")


def test_a_controller_that_dies_on_a_full_disk_leaves_nothing(filled: Workspace) -> None:
    script(filled, "time.sleep(600)\n")
    controller = filled.start("run", "--script", "fills.py", "--ranks", "2")
    until(lambda: all((filled.directory / f"full.{rank}").exists() for rank in (0, 1)), "the disk is full")
    controller.kill()
    controller.wait()
    until(lambda: not processes_of(filled.directory), "everything has been ended", limit_s=20.0)
    run = (filled.directory / "reports" / "latest").resolve()
    until(lambda: not boards(run), "the boards are home")
    told = filled.harness("report")
    assert (told.outcome["verdict"], told.outcome["cause"]) == ("ERROR", "interrupted")
    assert "its guardian ended the run" in told.outcome["summary"]


@pytest.mark.parametrize("filled", [f"{size}k" for size in (60, 100, 150, 300, 700, 1200, 3000)], indirect=True)
def test_a_run_on_a_disk_with_little_space_is_judged_and_has_a_summary(filled: Workspace) -> None:
    (filled.directory / "fails.py").write_text("import sys; sys.exit(3)\n")
    ran = filled.harness("run", "--script", "fails.py", "--ranks", "2")
    assert "itself failed" not in ran.out + ran.err
    assert "Traceback" not in ran.out + ran.err
    assert ran.outcome["verdict"] in ("FAIL", "ERROR")
    assert (ran.run_dir / "SUMMARY.md").stat().st_size > 0
    filled.harness("watch", "--quiet", "--out", "next", "--", "true")
    assert boards(ran.run_dir) == []


@pytest.mark.parametrize("filled", ["4k"], indirect=True)
def test_a_disk_without_space_for_a_run_is_told_in_one_sentence(filled: Workspace) -> None:
    (filled.directory / "fails.py").write_text("import sys; sys.exit(3)\n")
    ran = filled.harness("run", "--script", "fails.py", "--ranks", "2")
    assert (ran.code, ran.out) == (2, "")
    assert "no space left on device; choose a directory on another disk with --out DIR" in ran.err
    assert len(ran.err.splitlines()) == 1
