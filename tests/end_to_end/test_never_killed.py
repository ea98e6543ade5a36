"""Slow is not stuck: whatever moves a byte or computes is left alone, however short the limits are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .conftest import PROGRAMS
from .jobs import GATE, gate, opened, until
from .test_waits import scenario

SHORT = "stall_s: 3, busy_s: 5, open_wait_s: 5, deadline_s: 400"
LONG = "deadline_s: 600"
SHORT_S = 16  # three times what the limits allow to something that does not move


@pytest.fixture
def source() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def slow_source(started: list[subprocess.Popen[str]], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAMS / "slow_source.py"), *words]
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return started[-1]


def port_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def passes(workspace, what: str, value: str, limits: str) -> None:
    """It was suspected, because no mark came, and it passed all the same."""
    workspace.scenario("slow", scenario(what, value, limits))
    ran = workspace.harness("run", "slow")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS"), ran.out
    events = [json.loads(line)["event"] for line in (ran.run_dir / "slow" / "watch.jsonl").read_text().splitlines()]
    assert "suspect" in events


@pytest.mark.slow
def test_a_writer_that_is_slow_is_waited_for(workspace, source):
    fifo = workspace.directory / "fifo"
    os.mkfifo(fifo)
    slow_source(source, "fifo", str(fifo), str(SHORT_S))
    passes(workspace, "trickle", str(fifo), SHORT)


@pytest.mark.slow
def test_a_throttled_connection_is_waited_for(workspace, source):
    passes(workspace, "receive", port_of(slow_source(source, "socket", str(SHORT_S))), SHORT)


@pytest.mark.slow
def test_a_silent_download_in_a_worker_of_the_data_loader_is_waited_for(workspace, source):
    passes(workspace, "download", port_of(slow_source(source, "socket", str(SHORT_S))), SHORT)


@pytest.mark.slow
def test_a_save_on_rank_0_with_the_others_at_a_barrier_is_waited_for(workspace):
    passes(workspace, "save", f"{workspace.directory / 'checkpoint'},{SHORT_S}", SHORT)


@pytest.mark.slow
def test_a_compiler_is_waited_for(workspace):
    passes(workspace, "compile", str(SHORT_S), SHORT)


@pytest.mark.slow
def test_a_save_of_150_seconds_passes(workspace):
    passes(workspace, "save", f"{workspace.directory / 'checkpoint'},150", LONG)


@pytest.mark.slow
def test_a_compilation_of_90_seconds_passes(workspace):
    passes(workspace, "compile", "90", LONG)


@pytest.mark.slow
def test_a_silent_download_of_100_seconds_passes(workspace, source):
    passes(workspace, "download", port_of(slow_source(source, "socket", "100")), LONG)


@pytest.mark.slow
def test_a_rank_that_somebody_else_stopped_is_waited_for(workspace):
    pipe = gate(workspace.directory)
    process = workspace.start("run", str(GATE), "--", str(pipe))
    until(lambda: told(workspace, "rank 1 is blocked in read"), "rank 1 is at the gate")
    os.kill(ranks_of(workspace)[1], signal.SIGSTOP)
    until(lambda: told(workspace, "rank 1 is stopped by a signal"), "the stop is reported")
    os.kill(ranks_of(workspace)[1], signal.SIGCONT)
    opened(pipe)

    ran = workspace.finished(process)
    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS"), ran.out


def told(workspace, message: str) -> bool:
    return any(message in (workspace.directory / name).read_text() for name in ("out.txt", "err.txt"))


def ranks_of(workspace) -> dict[int, int]:
    """Return the process id of each rank that the running harness has found."""
    lines = [line for file in workspace.directory.glob("reports/2*/*/watch.jsonl") for line in file.open()]
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {event["rank"]: event["pid"] for event in events if event["event"] == "rank"}
