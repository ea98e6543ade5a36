"""What every benchmark result says about how it came to be."""

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


def circumstances(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Command, commit, date, versions and machine, without a word that names the machine."""
    return {
        "command": " ".join(["python", str(Path(script).resolve().relative_to(REPOSITORY)), *arguments]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "harness", "nsa")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip()
