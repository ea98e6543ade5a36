"""The benchmark of the probe's cost runs, and keeps what a reader needs to believe or repeat it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import PATIENCE_S, REPOSITORY, environment

SCRIPT = REPOSITORY / "benchmarks" / "probe_cost.py"


@pytest.mark.slow
def test_the_quick_form_keeps_raw_samples_and_circumstances(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    command = [sys.executable, str(SCRIPT), "--pairs=2", "--steps=1", "--repeats=2", f"--out={out}"]
    done = subprocess.run(
        command, env=environment(None), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"command", "commit", "uncommitted_changes", "date", "versions", "cpus", "load_1min"} <= set(result)
    assert [pair["first"] for pair in result["samples"]["pairs"]] == ["with", "without"]
    assert all(pair["with_wall_s"] > 0 and pair["without_cpu_s"] > 0 for pair in result["samples"]["pairs"])
    assert {len(result["samples"][name]) for name in ("mark_ns", "call_ns", "beat_ns")} == {2}
    assert json.loads(done.stdout) == result["summary"]
