"""The main loop of the fork server, and the processes that it forks.

For each launch the server forks a reaper, which forks the launcher. When the server is ready, it writes one line to the
control socket: {"modules": [...]}, or {"refused": reason}. The controller then sends one byte for each launch, together
with two file descriptors: the standard input and output of the reaper to fork. This reaper reads its order from its
standard input, like any other reaper. When the controller closes the socket or exits, the server exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..supervisor.launch import reaper
from .agent import Orders, fork_waiting_ranks, keep_only, start_ranks_from
from .program import EarlyBinding, ProcessTitle, Program, early_bindings, rebind

PROBE_TRIGGERS = ("torch", "torch.distributed")  # the probe sets up a rank when the program has imported these
PRELOADED = ("torch._dynamo",)  # imported by any program's first optimizer (torch 2.13: 1.2 s, 800 modules)


class StartLauncher(BaseException):
    """Raised in a forked launcher to unwind the call stack that it inherited, before its program starts."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self.order = order


class ForkedReaper(reaper.Reaper):
    """The supervisor of a launch, which forks the launcher instead of starting it as a new process."""

    def spawn(self) -> int:
        """Fork the launcher and return its pid. In the forked process, raise StartLauncher."""
        pid = os.fork()
        if pid == 0:
            self._detach_from_reaper()
            raise StartLauncher(self.order)
        return pid

    def _detach_from_reaper(self) -> None:
        """Give the forked launcher its own session, signal handlers and output streams."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        if self.order["umask"] >= 0:
            os.umask(self.order["umask"])
        with self.directory.open_for_append(Path(self.order["output"])) as file:
            output = os.dup(file.fileno())
        _replace_streams(os.open(os.devnull, os.O_RDONLY), output, output)


def serve(control: socket.socket, preload: Sequence[str]) -> Program:
    """Fork one reaper for each launch. Return only in a forked process, with the program that it must run."""
    title = ProcessTitle()
    os.environ.pop(title.reserved_variable, None)
    bindings = _preload(preload)
    reason = _reason_against_forking()
    top_level_modules = sorted({name.partition(".")[0] for name in sys.modules} - {"__main__"})
    control.sendall(json.dumps({"refused": reason} if reason else {"modules": top_level_modules}).encode() + b"\n")
    # The output of the imports so far, which every new process would print. Both streams are files in memory.
    import_output = [os.pread(stream, 1 << 20, 0) for stream in (1, 2)]
    try:
        _run_reaper(*_fork_per_request(control))
    except StartLauncher as start:
        order = start.order
    return _become_launcher(order, title, import_output, bindings)


def _preload(names: Sequence[str] = ()) -> list[EarlyBinding]:
    """Import torch, what most programs need, and `names`. Return their references to torch.distributed."""
    for name in PROBE_TRIGGERS:
        importlib.import_module(name)
    modules_before = set(sys.modules)
    for name in (*PRELOADED, *names):
        importlib.import_module(name)
    return early_bindings(set(sys.modules) - modules_before)


def _reason_against_forking() -> str | None:
    """Return the reason why forking this process is unsafe, or None if it is safe."""
    # Without freezing, each garbage collection and each exit in a fork would copy the memory pages of all objects.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else f"importing torch has started {threads - 1} threads"


def _fork_per_request(control: socket.socket) -> tuple[int, int]:
    """Fork a process for each request. In the forked process, return its standard input and output descriptors."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, int] = {}  # pidfd -> pid
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.waitpid(children.pop(descriptor), 0)
                os.close(descriptor)
                continue
            data, descriptors, *_ = socket.recv_fds(control, 1, 2)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                control.detach()
                return descriptors[0], descriptors[1]
            for end in descriptors:
                os.close(end)
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)


def _run_reaper(stdin: int, stdout: int) -> None:
    """Supervise one launch until it is done, then exit. In the launcher that is forked, raise StartLauncher."""
    os.setsid()
    _replace_streams(stdin, stdout, os.open(os.devnull, os.O_WRONLY))
    try:
        reaper.main(ForkedReaper)
    except StartLauncher:
        raise
    except BaseException:
        # SystemExit is caught as well: otherwise the server's exit handlers would run and write its buffered output.
        os._exit(1)
    os._exit(0)


def _replace_streams(stdin: int, stdout: int, stderr: int) -> None:
    for stream, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, stream)
    keep_only()


def _become_launcher(
    order: dict[str, Any], title: ProcessTitle, import_output: list[bytes], bindings: list[EarlyBinding]
) -> Program:
    """Run the launcher in this process, or return the program to run instead.

    A program is returned in a rank forked from the launcher, and for a launch without torchrun. `import_output` is what
    the imports of the server wrote to stdout and stderr; a rank writes it again, as a new process would.
    """
    arguments, environment = order["argv"], order["env"]
    title.show(arguments, environment)
    waiting = fork_waiting_ranks(order["forks"])
    if isinstance(waiting, list) and waiting:
        launcher = Program(arguments)
        launcher.prepare(environment, with_probe=False)
        start_ranks_from(waiting)
        launcher.run_and_exit()
    if isinstance(waiting, Orders):
        arguments, environment = waiting.arguments, waiting.environment
        title.show(arguments, environment)
    for stream, text in enumerate(import_output, start=1):
        with contextlib.suppress(OSError):
            os.write(stream, text)
    rank = Program(arguments)
    rank.prepare(environment, with_probe=True)
    rebind(bindings)
    return rank
