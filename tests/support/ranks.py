"""Starts real Python processes as ranks with the probe in them, and reads what they leave in the boards directory."""

from __future__ import annotations

import functools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import StatusFile
from nsa_harness.core.evidence.status_file import parse

REPOSITORY = Path(__file__).resolve().parents[2]
BOOTSTRAP = REPOSITORY / "harness" / "nsa_harness" / "probe" / "bootstrap"
PROGRAMS = REPOSITORY / "tests" / "programs"
T = TypeVar("T")
PATIENCE_S = 240.0  # for a machine that does much else; nothing here takes that long by itself


@dataclass(frozen=True, kw_only=True)
class Ended:
    pid: int
    status: int
    out: str
    err: str


class Boards:
    """The boards directory of one job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def board(self, pid: int) -> StatusFile:
        return parse(self._path(protocol.STATUS_FILE, pid).read_bytes(), 0)

    def all(self) -> list[StatusFile]:
        boards = [parse(path.read_bytes(), 0) for path in self.directory.glob("*.board")]
        return sorted(boards, key=lambda board: -1 if board.rank is None else board.rank)

    def json(self, name: str, pid: int) -> Any:
        return json.loads(self._path(name, pid).read_text())

    def text(self, name: str, pid: int) -> str:
        path = self._path(name, pid)
        return path.read_text() if path.exists() else ""

    def request_flight(self, pid: int, number: int) -> None:
        with self._path(protocol.STATUS_FILE, pid).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            protocol.REQUEST.pack_into(memory, protocol.REQUEST_AT, number)

    def _path(self, name: str, pid: int) -> Path:
        return self.directory / name.format(pid=pid)


def environment(boards: Path | None, **extra: str) -> dict[str, str]:
    """Ours without what another run, or this test run, has put in; with the probe if there is a place for boards."""
    dropped = ("_NSA_HARNESS_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PYTHONPATH", "PYTHONFAULTHANDLER", "NSA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    kept["OMP_NUM_THREADS"] = "1"
    # Signal handlers of test programs print, and a buffered stream refuses that while a print of the program goes on.
    kept["PYTHONUNBUFFERED"] = "1"
    if boards is not None:
        boards.mkdir(parents=True, exist_ok=True)
        kept |= {"PYTHONPATH": str(BOOTSTRAP), protocol.ENV_PROBE_DIRECTORY: str(boards)}
    return kept | extra


def python(*words: str, boards: Path | None, cwd: Path | None = None, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment(boards, **extra),
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Forked:
    """As a Popen is used here; its process is a child of the forge."""

    def __init__(self, pid: int, streams: tuple[IO[str], IO[str], IO[str]], reap: Callable[[], int]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._reap = reap

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            said = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                out, err = (one.result(timeout) for one in said)
            finally:
                if not all(one.done() for one in said):
                    self.kill()
        self.returncode = os.waitstatus_to_exitcode(self._reap())
        self.stdout.close()
        self.stderr.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forge:
    """One process that has imported torch, and forks; it leaves when this one has."""

    def __init__(self) -> None:
        self._programs = tempfile.TemporaryDirectory()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-u", str(Path(__file__).with_name("forge.py")), str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=environment(None), pass_fds=[theirs.fileno()])

    def start(self, words: tuple[str, ...], environ: dict[str, str], cwd: Path | None) -> Forked:
        ours, theirs = zip(*(os.pipe()[::way] for way in (-1, 1, 1)), strict=True)
        order = {"words": [sys.executable, *self._file(words)], "environment": environ, "cwd": cwd and str(cwd)}
        socket.send_fds(self._control, [json.dumps(order).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        pid = int(self._control.recv(64))
        stdin, stdout, stderr = (os.fdopen(one, mode) for one, mode in zip(ours, "wrr", strict=True))
        return Forked(pid, (stdin, stdout, stderr), lambda: self._reaped(pid))

    def _file(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """What follows `-c` as a program of its own: forks run files."""
        if words[0] != "-c":
            return words
        file = Path(self._programs.name) / f"{len(os.listdir(self._programs.name))}.py"
        file.write_text(words[1])
        return str(file), *words[2:]

    def _reaped(self, pid: int) -> int:
        self._control.send(json.dumps({"reap": pid}).encode())
        return int(self._control.recv(64))


forge = functools.cache(Forge)
AnyProcess = subprocess.Popen[str] | Forked


def start_ranks(
    count: int, *words: str, boards: Path | None, cwd: Path | None = None, **extra: str
) -> list[subprocess.Popen[str]]:
    return [python(*words, boards=boards, cwd=cwd, **one) for one in _ranks(count, extra)]


def fork_ranks(count: int, *words: str, boards: Path | None, cwd: Path | None = None, **extra: str) -> list[Forked]:
    """Where how an interpreter starts and imports torch is not the claim, nobody waits for it."""
    return [forge().start(words, environment(boards, **one), cwd) for one in _ranks(count, extra)]


def _ranks(count: int, extra: dict[str, str]) -> list[dict[str, str]]:
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(count)}
    return [{**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra} for rank in range(count)]


def ended(process: AnyProcess) -> Ended:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode is not None
    return Ended(pid=process.pid, status=process.returncode, out=out, err=err)


def run_ranks(count: int, *words: str, boards: Path | None, cwd: Path | None = None, **extra: str) -> list[Ended]:
    return [ended(process) for process in start_ranks(count, *words, boards=boards, cwd=cwd, **extra)]


def run_forks(count: int, *words: str, boards: Path | None, cwd: Path | None = None, **extra: str) -> list[Ended]:
    return [ended(process) for process in fork_ranks(count, *words, boards=boards, cwd=cwd, **extra)]


def wait_for(claim: Callable[[], T], what: str) -> T:
    """Look until there is something true to see."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        seen = claim()
        if seen:
            return seen
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {PATIENCE_S:.0f} s: {what}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
