"""The fork server's loop, and the processes forked from it: the reaper of a launch, its launcher, and its ranks.

When the server is ready, it writes one line to the control socket: {"modules": [...]}, or {"refused": reason}. The
controller then sends one byte for each launch, together with two file descriptors: the standard input and output of the
reaper to fork. This reaper reads its order from its standard input, like any other reaper. When the controller closes
the socket or exits, the server exits.
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
from typing import Any

from ..supervisor.launch import reaper
from .agent import Orders, fork_waiting_ranks, keep_only, start_ranks_from
from .program import EarlyBinding, ProcessTitle, Program, early_bindings, rebind

AWAITED = ("torch", "torch.distributed")  # the probe begins when a program has imported these
LATER = ("torch._dynamo",)  # imported by the first optimizer of any program (torch 2.13: 1.2 s, 800 modules)


class StartLauncher(BaseException):
    """Raised in a forked launcher to leave the stack of the reaper, so the program starts at the bottom of the
    stack.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self.order = order


class ForkedReaper(reaper.Reaper):
    """A reaper that forks the launcher from itself instead of starting a new process."""

    def spawn(self) -> int:
        """Fork the launcher and return the launcher's pid. In the forked process, raise StartLauncher instead."""
        pid = os.fork()
        if pid == 0:
            self._detach_from_reaper()
            raise StartLauncher(self.order)
        return pid

    def _detach_from_reaper(self) -> None:
        """Reset the reaper's signal handlers in the forked launcher, start a new session, and redirect its output to
        the order's file.
        """
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        if self.order["umask"] >= 0:
            os.umask(self.order["umask"])
        output = os.open(self.order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        _replace_streams(os.open(os.devnull, os.O_RDONLY), output, output)


def serve(control: socket.socket) -> Program:
    """Fork a reaper for each launch until the controller exits.

    This function returns only in a forked process, and returns the program that this process must run.
    """
    title = ProcessTitle()
    os.environ.pop(title.room_variable, None)
    bindings = _preload()
    why = _reason_against_forking()
    tops = sorted({name.partition(".")[0] for name in sys.modules} - {"__main__"})
    control.sendall(json.dumps({"refused": why} if why else {"modules": tops}).encode() + b"\n")
    # The output of the imports, which every new process would print again. Both streams are files in memory.
    printed = [os.pread(stream, 1 << 20, 0) for stream in (1, 2)]
    try:
        _run_reaper(*_fork_per_request(control))
    except StartLauncher as start:
        order = start.order
    return _become_launcher(order, title, printed, bindings)


def _preload() -> list[EarlyBinding]:
    """Import torch and the modules that programs usually import later. Return these later modules' references to
    torch.distributed.
    """
    for name in AWAITED:
        importlib.import_module(name)
    before = set(sys.modules)
    for name in LATER:
        importlib.import_module(name)
    return early_bindings(set(sys.modules) - before)


def _reason_against_forking() -> str | None:
    """Return why forking this process is not safe (torch has started threads), or None if it is safe."""
    # The garbage collector skips frozen objects. Without this, each collection and each exit would copy their pages.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else f"importing torch has started {threads - 1} threads"


def _fork_per_request(control: socket.socket) -> tuple[int, int]:
    """Fork a process for each request of the controller, and exit when the controller closes the socket.

    Return only in a forked process: the file descriptors of its standard input and output.
    """
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
            word, given, *_ = socket.recv_fds(control, 1, 2)
            if not word:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                control.detach()
                return given[0], given[1]
            for end in given:
                os.close(end)
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)


def _run_reaper(stdin: int, stdout: int) -> None:
    """Run a reaper on these standard streams until it is done, then exit. In the launcher that it forks, raise
    StartLauncher.
    """
    os.setsid()
    _replace_streams(stdin, stdout, os.open(os.devnull, os.O_WRONLY))
    try:
        reaper.main(ForkedReaper)
    except StartLauncher:
        raise
    except BaseException:
        # Also for SystemExit: unwinding further would run the server's exit handlers and write its buffered output.
        os._exit(1)
    os._exit(0)


def _replace_streams(stdin: int, stdout: int, stderr: int) -> None:
    for stream, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, stream)
    keep_only()


def _become_launcher(
    order: dict[str, Any], title: ProcessTitle, printed: list[bytes], bindings: list[EarlyBinding]
) -> Program:
    """Run the launcher in this process and exit, or return the program that this process must run.

    A program is returned in a rank forked from the launcher, and for a launch without torchrun. `printed` is what the
    imports of the server wrote to stdout and stderr; a rank writes it again, as a new process would.
    """
    words, environment = order["argv"], order["env"]
    title.show(words, environment)
    waiting = fork_waiting_ranks(order["forks"])
    if isinstance(waiting, list) and waiting:
        launcher = Program(words)
        launcher.prepare(environment, probed=False)
        start_ranks_from(waiting)
        launcher.run_and_exit()
    if isinstance(waiting, Orders):
        words, environment = waiting.words, waiting.environment
        title.show(words, environment)
    for stream, text in enumerate(printed, start=1):
        with contextlib.suppress(OSError):
            os.write(stream, text)
    rank = Program(words)
    rank.prepare(environment, probed=True)
    rebind(bindings)
    return rank
