"""Standard streams that are closed, full, or no longer read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

import pytest


def in_shell(script: str, *words: str, cwd: Path, stdout: int | IO[str] = subprocess.PIPE) -> CompletedProcess[str]:
    """Run a shell script whose "$@" is the command line of nsa-harness with these arguments."""
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "nsa_harness", *words]
    return subprocess.run(command, cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("words", [("list",), ("explain", "--help"), ("--version",), ("run", "no_such", "--json")])
def test_a_full_disk_behind_stdout_is_reported_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = in_shell('exec "$@"', *words, cwd=tmp_path, stdout=full)
    assert done.returncode == (2 if words[0] == "run" else 125)
    assert done.stderr.splitlines()[-1] == "standard output could not be written completely: no space left on device"
    assert "Traceback" not in done.stderr
    assert "itself failed" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_like_dev_null(closed: str, tmp_path: Path) -> None:
    assert in_shell(f'exec "$@" {closed}', "list", cwd=tmp_path).returncode == 0
    wrong = in_shell(f'exec "$@" {closed}', "explain", "no_such_scenario", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def test_a_full_disk_behind_stderr_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    assert in_shell('exec "$@" 2>/dev/full', "explain", "no_such_scenario", cwd=tmp_path).returncode == 2


def test_a_reader_that_stops_reading_is_not_a_failure(tmp_path: Path) -> None:
    """The pipe has no reader at all, so every write fails, however fast the machine is."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert in_shell('exec "$@"', "list", "-v", cwd=tmp_path, stdout=writer).returncode == 0
    finally:
        os.close(writer)


def test_a_name_that_is_too_long_for_a_file_is_a_usage_error(tmp_path: Path) -> None:
    for command in (("run", "{}"), ("run", "{}.py"), ("report", "{}"), ("read", "{}")):
        done = in_shell('exec "$@"', *(word.format("a" * 300) for word in command), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "is too long for a file" in done.stderr
