"""A built wheel, unpacked elsewhere, finds its scenarios and works outside a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ALONE = ("run", "ddp_onestep", "run.ranks=1", "parallel.wrapper=none")  # without torchrun: one process loads torch


def test_a_wheel_carries_everything_and_finds_its_scenarios_elsewhere(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")

    ran = subprocess.run(
        [sys.executable, "-P", "-c", "from nsa_harness.cli.main import main; main()", *ALONE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )

    spec = (tmp_path / "reports" / "latest" / "ddp_onestep" / "spec.json").read_text()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert str(tmp_path / "site" / "nsa") in spec
    assert str(REPOSITORY / "nsa") not in spec
    assert {path.name for path in (tmp_path / "site" / "harness" / "_scenarios").iterdir()} == {
        path.name for path in (REPOSITORY / "scenarios").iterdir()
    }
    assert {path.name for path in (tmp_path / "site" / "harness" / "_corpus").iterdir()} == {
        path.name for path in (REPOSITORY / "tests" / "faults").glob("*.py")
    }
