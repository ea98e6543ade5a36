"""A real Slurm cluster for the tests marked `cluster`. It is started once, and nothing of it is left at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.slurm_lab import SlurmLab, missing_reason


@pytest.fixture(scope="session")
def lab() -> Iterator[SlurmLab]:
    """The cluster. Its directory is not the one of pytest, which other users than root must not enter."""
    if reason := missing_reason():
        pytest.skip(reason)
    home = Path(tempfile.mkdtemp(prefix="nsa-slurm-", dir="/tmp"))
    home.chmod(0o755)
    lab = SlurmLab(home=home, node_timeout_s=5)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(home)
        assert lab.processes() == []


@pytest.fixture
def cluster(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> SlurmLab:
    """The same cluster, with the variables that the commands of Slurm need."""
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    return lab
