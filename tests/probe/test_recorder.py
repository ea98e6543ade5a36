"""The recording of a program: its statements, with their values, calls, exceptions and random draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_harness import protocol
from nsa_harness.core.recording.reading import read_recording
from nsa_harness.core.recording.recording import Activation, Execution, RankRecording

BOOTSTRAP = Path(__file__).parents[2] / "harness" / "nsa_harness" / "probe" / "bootstrap"
PYENV = Path.home() / ".pyenv" / "versions"
PYTHONS = [sys.executable, *(str(PYENV / version / "bin" / "python") for version in ("3.12.1", "3.13.0"))]

COUNTER = """
import random

class Stopper:
    def __init__(self, patience):
        self.patience = patience
        self.bad = 0

    def step(self, value):
        if value > 0.5:
            self.bad += 1
        return self.bad >= self.patience

def numbers(count):
    for number in range(count):
        yield number

def main():
    stopper = Stopper(2)
    random.seed(0)
    for number in numbers(3):
        value = random.random()
        if stopper.step(
            value
        ):
            break
    try:
        int("x")
    except ValueError as error:
        text = str(error)
    return [stopper.step(0) for _ in range(2)]

main()
"""


@pytest.fixture(params=PYTHONS, ids=["3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    if not Path(request.param).exists():
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def record(
    python: str, program: str, directory: Path, settings: dict[str, object] | None = None, *before: str
) -> list[RankRecording]:
    """Run a program with the recorder, and return the recordings of its processes in the order of their start."""
    script = directory / "program.py"
    script.write_text(program)
    environment = {
        **os.environ,
        protocol.ENV_PROBE_DIRECTORY: str(directory),
        protocol.ENV_RECORD: json.dumps(settings or {}),
        "PYTHONPATH": str(BOOTSTRAP),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    environment.pop(protocol.ENV_OWNER, None)
    subprocess.run([python, *before, str(script)], env=environment, check=True, timeout=60)
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


def values(pairs: tuple[tuple[str, object], ...]) -> dict[str, str]:
    return {name: value.text for name, value in pairs}  # type: ignore[attr-defined]


def test_statements_are_recorded_with_their_values_and_calls(python: str, tmp_path: Path) -> None:
    (recording,) = record(python, COUNTER, tmp_path)
    assert not recording.problems
    assert recording.python == tuple(
        map(int, subprocess.check_output([python, "-V"], text=True).split()[1].split(".")[:2])
    )
    main = in_function(recording, "main")
    assert [execution.line for execution in main][:8] == [19, 20, 21, 22, 23, 21, 22, 23]
    step = next(execution for execution in main if execution.line == 23)
    (call,) = step.calls
    assert call.function == "Stopper.step"
    assert call.ended
    assert call.returned is not None
    assert call.returned.text == "False"
    increments = [one for one in in_function(recording, "Stopper.step") if one.line == 11]
    assert [values(one.writes)["self.bad"] for one in increments] == ["1", "2"]
    stopper = next(value for name, value in main[0].writes if name == "stopper")
    assert stopper.type == "Stopper"
    assert stopper.identity == next(value for name, value in increments[0].reads if name == "self").identity
    draw = next(execution for execution in main if execution.line == 22)
    assert [draw[0] for draw in draw.draws] == ["random"]
    assert [call.function for call in main[2].calls] == ["numbers"]
    raised = next(execution.raised for execution in main if execution.line == 28)
    assert raised is not None
    assert (raised.type, raised.handled) == ("ValueError", True)
    assert [call.function for call in main[-1].calls] == ["Stopper.step"] * 2


def test_a_recording_without_values_has_none(python: str, tmp_path: Path) -> None:
    (recording,) = record(python, COUNTER, tmp_path, {"values": False})
    main = in_function(recording, "main")
    assert [execution.line for execution in main][:8] == [19, 20, 21, 22, 23, 21, 22, 23]
    assert not any(execution.reads or execution.writes for execution in main)
