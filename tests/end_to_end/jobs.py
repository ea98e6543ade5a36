"""Jobs that are observed: started as a user starts them, found and ended by the tag in their environment."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from nsa_harness import protocol
from nsa_harness.supervisor.capture import procfs

from .conftest import COMMAND, PROGRAMS, Workspace

PATIENCE_S = 60.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
GATE = str(PROGRAMS / "gate.py")


def gate(directory: Path) -> Path:
    path = directory / "gate"
    os.mkfifo(path)
    return path


def opened(path: Path) -> None:
    """Lets the one rank through that stands at the gate."""
    descriptor = os.open(path, os.O_RDWR)
    os.write(descriptor, b"x")
    tail = select.poll()
    tail.register(descriptor, select.POLLIN)
    until(lambda: not tail.poll(0), "the gate is passed")
    os.close(descriptor)


class Reader:
    """What a job writes, read until it has said a word."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def wait_for(self, word: str) -> None:
        while word not in self.text:
            ready, _, _ = select.select([self._descriptor], [], [], PATIENCE_S)
            assert ready, f"never said: {word}"
            self.text += os.read(self._descriptor, 1024).decode()


def stands(process: psutil.Process) -> bool:
    """Whether the main thread has not run for 3 s. Under torch 2.11, gloo has a thread without a name that polls."""
    return (procfs.idle_s(process.pid, process.pid) or 0.0) > 3.0


def until(condition: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
    """Looks again until it holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        select.select([], [], [], 0.05)


def said(workspace: Workspace, word: str) -> Callable[[], bool]:
    """The command's stderr holds the word."""
    return lambda: word in (workspace.directory / "err.txt").read_text()


def tagged(workspace: Workspace) -> list[psutil.Process]:
    """The living processes of the observed job: they carry the tag of a run of this workspace."""
    runs = [path.name for path in (workspace.directory / "reports").glob("2*")]
    return [one for one in psutil.process_iter() if any(_tag(one).startswith(run) for run in runs)]


def _tag(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(protocol.ENV_RUN, "")
    except psutil.Error:
        return ""


@contextmanager
def running(command: list[str], workspace: Workspace) -> Iterator[subprocess.Popen[bytes]]:
    """A job of somebody's own, without us."""
    with (workspace.directory / "job.txt").open("wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, cwd=workspace.directory, start_new_session=True)
    try:
        yield job
    finally:
        family = [*psutil.Process(job.pid).children(recursive=True)] if job.poll() is None else []
        for process in [*family, *([psutil.Process(job.pid)] if job.poll() is None else [])]:
            process.kill()
        job.wait()


def nsa_harness(*words: str) -> list[str]:
    return [*COMMAND, *words]
