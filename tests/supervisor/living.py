"""A Python process to look at, which ends with the block; and what processes do, awaited."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

PATIENCE_S = 20.0


@contextmanager
def program(source: str, *words: str, options: Sequence[str] = ("-I", "-S", "-u")) -> Iterator[subprocess.Popen[bytes]]:
    """It has printed a line when the block begins; what it forked ends with it."""
    command = [sys.executable, *options, "-c", source, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready
        process.stdout.readline()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(happened: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(0.01)
