"""Starts real Python processes as ranks with the probe in them, and reads what they leave in the boards directory."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nsa_harness import protocol
from nsa_harness.core.evidence.board import parse
from nsa_harness.core.evidence.evidence import Board

REPOSITORY = Path(__file__).resolve().parents[2]
BOOTSTRAP = REPOSITORY / "harness" / "probe" / "bootstrap"
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

    def board(self, pid: int) -> Board:
        return parse(self._path(protocol.BOARD, pid).read_bytes(), 0)

    def all(self) -> list[Board]:
        boards = [parse(path.read_bytes(), 0) for path in self.directory.glob("*.board")]
        return sorted(boards, key=lambda board: -1 if board.rank is None else board.rank)

    def json(self, name: str, pid: int) -> Any:
        return json.loads(self._path(name, pid).read_text())

    def text(self, name: str, pid: int) -> str:
        path = self._path(name, pid)
        return path.read_text() if path.exists() else ""

    def request_flight(self, pid: int, number: int) -> None:
        with self._path(protocol.BOARD, pid).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            protocol.REQUEST.pack_into(memory, protocol.REQUEST_AT, number)

    def _path(self, name: str, pid: int) -> Path:
        return self.directory / name.format(pid=pid)


def environment(boards: Path | None, **extra: str) -> dict[str, str]:
    """Ours without what another run, or this test run, has put in; with the probe if there is a place for boards."""
    dropped = ("_NSA_HARNESS_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PYTHONPATH", "PYTHONFAULTHANDLER", "NSA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    kept["OMP_NUM_THREADS"] = "1"
    if boards is not None:
        boards.mkdir(parents=True, exist_ok=True)
        kept |= {"PYTHONPATH": str(BOOTSTRAP), protocol.ENV_BOARDS: str(boards)}
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


def start_ranks(
    count: int, *words: str, boards: Path | None, cwd: Path | None = None, **extra: str
) -> list[subprocess.Popen[str]]:
    port = str(_free_port())
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [
        python(*words, boards=boards, cwd=cwd, **rendezvous, RANK=str(rank), LOCAL_RANK=str(rank), **extra)
        for rank in range(count)
    ]


def ended(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return Ended(pid=process.pid, status=process.returncode, out=out, err=err)


def run_ranks(count: int, *words: str, boards: Path | None, cwd: Path | None = None, **extra: str) -> list[Ended]:
    return [ended(process) for process in start_ranks(count, *words, boards=boards, cwd=cwd, **extra)]


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
