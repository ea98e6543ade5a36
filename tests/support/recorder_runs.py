"""Runs programs with the recorder, and reads their recordings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.recording.reading import read_recording
from nsa_harness.core.recording.recording import Activation, Execution, RankRecording, Values

BOOTSTRAP = Path(__file__).parents[2] / "harness" / "nsa_harness" / "probe" / "bootstrap"
PYENV = Path.home() / ".pyenv" / "versions"
PYTHONS = [sys.executable, *(str(PYENV / version / "bin" / "python") for version in ("3.12.1", "3.13.0"))]


def record(
    python: str,
    program: str,
    directory: Path,
    settings: dict[str, object] | None = None,
    *before: str,
    returns: int = 0,
    path: str = "",
) -> list[RankRecording]:
    """Run a program with the recorder, and return the recordings of its processes in the order of their start."""
    script = directory / "program.py"
    script.write_text(program)
    environment = {
        **os.environ,
        protocol.ENV_PROBE_DIRECTORY: str(directory),
        protocol.ENV_RECORD: json.dumps(settings or {}),
        "PYTHONPATH": f"{BOOTSTRAP}:{path}" if path else str(BOOTSTRAP),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    environment.pop(protocol.ENV_OWNER, None)
    environment.pop(protocol.ENV_PROBE, None)
    ended = subprocess.run([python, *before, str(script)], env=environment, timeout=60)
    assert ended.returncode == returns
    files = sorted(directory.glob("*.record"), key=lambda file: file.stat().st_ctime_ns)
    return [read_recording(file.read_bytes(), 0) for file in files]


def executions(activation: Activation) -> Iterator[tuple[Activation, Execution]]:
    for execution in activation.executions:
        yield activation, execution
        for call in execution.calls:
            yield from executions(call)


def in_function(recording: RankRecording, function: str) -> list[Execution]:
    everything = (pair for one in recording.threads[0].activations for pair in executions(one))
    return [execution for activation, execution in everything if activation.function == function]


def values(pairs: Values) -> dict[str, str]:
    return {name: value.text for name, value in pairs}


def trouble(directory: Path) -> list[str]:
    """Return the errors of the instrumentation in all processes."""
    lines = [line for file in directory.glob("*.trouble.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line)["error"] for line in lines]
