"""Describe the circumstances in which a benchmark result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def measurement_context(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command, commit, date, versions and machine load for a measurement.

    Nothing in the result identifies the machine. `script` is the path of the benchmark.
    """
    return {
        "command": " ".join(["python", str(Path(script).resolve().relative_to(REPOSITORY)), *arguments]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "harness", "nsa")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
    }


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip()
