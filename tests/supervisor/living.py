"""A Python process to look at, which ends with the block."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
