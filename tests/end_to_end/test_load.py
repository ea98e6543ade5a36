"""Healthy runs on a machine that is busy with other work are never called anything but PASS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from .conftest import Forks, Workspace

BUSY_PROCESSES = {"quick": 2, "slow": 4}


@pytest.fixture
def busy_launcher(request: pytest.FixtureRequest, launcher: Workspace | Forks) -> Iterator[Workspace | Forks]:
    count = BUSY_PROCESSES["quick" if request.node.get_closest_marker("slow") is None else "slow"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield launcher
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.parametrize("run", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_a_healthy_run_under_load_passes(busy_launcher, run):
    more = "trace: {module_bwd: true, buckets: true}"
    text = f"about: under load\nextends: base/ddp_step\ntrain: {{seed: {run}}}\n{more}\n"
    outcome = busy_launcher.outcome_of("busy", text)

    assert (outcome["verdict"], outcome["expected"]) == ("PASS", True)
