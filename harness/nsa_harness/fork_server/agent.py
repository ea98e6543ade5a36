"""Runs torchrun's agent with ranks that are forked from the fork server.

The ranks are forked before the agent imports its modules, for two reasons: a rank must start with only the modules of a
new process, and the agent starts threads, after which forking it is no longer safe.
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
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class WaitingFork:
    """A forked process that waits until the agent turns it into a rank."""

    pid: int
    agent_end: int


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The command line and environment that turn a waiting process into a rank."""

    arguments: list[str]
    environment: dict[str, str]


def fork_waiting_ranks(count: int) -> list[WaitingFork] | Orders:
    """Fork `count` processes that wait for orders. Return them in the parent, and the orders received in each fork.

    In each forked process, this function returns that process's orders once the agent has sent them. A forked process
    exits if the agent exits before sending orders.
    """
    forks = []
    for _ in range(count):
        agent_end, rank_end = (end.detach() for end in socket.socketpair())
        pid = os.fork()
        if pid == 0:
            return _await_orders(rank_end)
        os.close(rank_end)
        os.read(agent_end, 1)  # wait until the process has its own session, because the agent signals process groups
        forks.append(WaitingFork(pid=pid, agent_end=agent_end))
    return forks


def _await_orders(rank_end: int) -> Orders:
    """Become a session leader, wait for orders from the agent, and return the orders."""
    os.setsid()
    os.write(rank_end, b"r")
    rank_end = keep_only(rank_end)
    with socket.socket(fileno=rank_end) as agent:
        data, (stdout, stderr, *_), *_ = _receive(agent)
        while chunk := agent.recv(1 << 16):
            data += chunk
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(min(stdout, stderr), max(stdout, stderr) + 1)
    return Orders(**json.loads(data))


def _receive(agent: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """Receive one byte and two descriptors from the agent. Exit this process if the agent has closed its socket."""
    message = socket.recv_fds(agent, 1, 2)
    if not message[0]:
        os._exit(0)
    return message


def start_ranks_from(forks: Sequence[WaitingFork]) -> None:
    """Make torchrun's agent use the waiting processes instead of starting new ones."""
    importlib.import_module(_HANDLER).Popen = functools.partial(Rank, list(forks))  # type: ignore[attr-defined]
    _shorten_rendezvous(importlib.import_module(_RENDEZVOUS))


def _shorten_rendezvous(module: Any) -> None:
    """Take two delays out of torchrun's rendezvous that a job on one node does not need.

    torchrun sleeps for a random time of up to 0.3 s, so that many nodes do not connect at once. It also calls
    `inspect.stack()` to name each of its log events, which searches all imported modules (torch 2.13: 0.2 s of CPU
    time per launch).
    """
    delay = getattr(module, "_delay", time.sleep)
    module._delay = lambda seconds: None if isinstance(seconds, tuple) else delay(seconds)
    module.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class Rank:
    """A rank created by orders to a waiting process, with the part of Popen's interface that torchrun uses."""

    def __init__(
        self,
        forks: list[WaitingFork],
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        if not forks:
            raise RuntimeError("torchrun starts more ranks than the launch declared, so no forked process is left")
        fork = forks.pop(0)
        self.args, self.pid, self.returncode = args, fork.pid, None
        streams = [stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2]
        orders = json.dumps({"arguments": list(args), "environment": dict(env)}).encode()
        with socket.socket(fileno=fork.agent_end) as agent_end:
            socket.send_fds(agent_end, [orders[:1]], streams)
            agent_end.sendall(orders[1:])

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the rank's exit code once it exits. Raise TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def keep_only(*kept_descriptors: int) -> int:
    """Close all descriptors from 3 upwards except `kept_descriptors`. Return the first of these, or -1."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    start = 3
    for descriptor in sorted(kept_descriptors):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 1 << 30 if limit == resource.RLIM_INFINITY else limit)
    return kept_descriptors[0] if kept_descriptors else -1
