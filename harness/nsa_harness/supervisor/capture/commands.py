"""Runs a diagnostic command with a limit that holds even where the command, or a child of it, does not die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence

_MAX_OUTPUT_BYTES = 32 << 20
_MAX_ERROR_BYTES = 1 << 14
_DEATH_S = 0.2  # what a killed process needs to leave; one that hangs in the kernel is left behind


class CommandFailed(Exception):
    """Says which command gave no answer, and why."""


def answer_of(command: Sequence[str], limit_s: float, before_killed: Callable[[int], None] | None = None) -> str:
    """What the command prints. Its output goes to a file, so that no child that keeps a pipe open is waited for.

    `before_killed` is called with the process that is about to be killed. Raises CommandFailed when it cannot start,
    fails, or has not ended within `limit_s`; then it is killed.
    """
    name = os.path.basename(command[0])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise CommandFailed(f"{name}: {error.strerror or error}") from error
        try:
            status = process.wait(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            if before_killed:
                before_killed(process.pid)
            raise CommandFailed(f"{name}: no answer within {limit_s:.1f} s{_killed(process)}") from None
        if status != 0:
            raise CommandFailed(f"{name}: {_reason(_output(err.fileno(), _MAX_ERROR_BYTES)) or f'status {status}'}")
        return _output(out.fileno(), _MAX_OUTPUT_BYTES)


def _killed(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=_DEATH_S)
    except subprocess.TimeoutExpired:
        return ", and SIGKILL did not end it"
    return ""


def _output(file: int, limit_bytes: int) -> str:
    return os.pread(file, limit_bytes, 0).decode(errors="replace")


def _reason(text: str) -> str:
    """The line that names the error; a trace of the tool's own may follow it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.lower().startswith("error")]
    return (named or lines[-1:] or [""])[0][:300]
