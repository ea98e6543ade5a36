"""torchrun's own agent, whose ranks are forked instead of started: they wait, blank, until it says what they are.

They are forked before the agent loads what it needs: a rank must find the modules that a new process would have, and a
process with threads, which the agent soon is, is no safe parent of a fork.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_LOOK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A forked process that waits at the other end of `ear`."""

    pid: int
    ear: int


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a blank is to become."""

    words: list[str]
    environment: dict[str, str]


def fork_blanks(count: int) -> list[Blank] | Orders:
    """In the agent: its blanks. In a blank, much later: its orders; one whose agent leaves without any leaves too."""
    blanks = []
    for _ in range(count):
        ear, mouth = (end.detach() for end in socket.socketpair())
        pid = os.fork()
        if pid == 0:
            return _await_orders(mouth)
        os.close(mouth)
        os.read(ear, 1)  # it leads its session: the agent ends ranks by their group
        blanks.append(Blank(pid=pid, ear=ear))
    return blanks


def _await_orders(mouth: int) -> Orders:
    os.setsid()
    os.write(mouth, b"r")
    mouth = keep_only(mouth)
    with socket.socket(fileno=mouth) as agent:
        word, (stdout, stderr, *_), *_ = _received(agent)
        while chunk := agent.recv(1 << 16):
            word += chunk
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(min(stdout, stderr), max(stdout, stderr) + 1)
    return Orders(**json.loads(word))


def _received(agent: socket.socket) -> tuple[bytes, list[int], int, Any]:
    received = socket.recv_fds(agent, 1, 2)
    if not received[0]:
        os._exit(0)
    return received


def start_ranks_by(blanks: Sequence[Blank]) -> None:
    """From here on torchrun's agent finds its ranks among the blanks."""
    importlib.import_module(_HANDLER).Popen = functools.partial(Rank, list(blanks))  # type: ignore[attr-defined]


class Rank:
    """What the agent needs of subprocess.Popen."""

    def __init__(
        self,
        blanks: list[Blank],
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        if not blanks:
            raise RuntimeError("no more ranks were forked than the launch said, and torchrun asks for another one")
        blank = blanks.pop(0)
        self.args, self.pid, self.returncode = args, blank.pid, None
        streams = [stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2]
        orders = json.dumps({"words": list(args), "environment": dict(env)}).encode()
        with socket.socket(fileno=blank.ear) as ear:
            socket.send_fds(ear, [orders[:1]], streams)
            ear.sendall(orders[1:])

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def keep_only(*kept: int) -> int:
    """Close everything above the three standard streams except `kept`; returns the first of them."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    start = 3
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 1 << 30 if most == resource.RLIM_INFINITY else most)
    return kept[0] if kept else -1
