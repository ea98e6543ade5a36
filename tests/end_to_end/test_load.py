"""Healthy runs on a machine that is busy with other work are never called anything but PASS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

BUSY_PROCESSES = 4


@pytest.fixture
def load() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_PROCESSES)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("run", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_a_healthy_run_under_load_passes(workspace, run):
    ran = workspace.harness("run", "ddp_onestep", f"train.seed={run}", "train.steps=2")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
