"""The guardian: starts the launcher, outlives the controller, and leaves no process behind.

A program of its own (standard library only, no imports of this package): it must start in milliseconds and must not
share the controller's fate. It runs in its own session as a child subreaper, so that every orphan of the run becomes
its child. The controller speaks JSON lines on its standard input; when that closes, the controller is dead.

    in    {"argv", "env", "cwd", "umask", "tag", "output", "boards", "keep", "journal", "interrupted"}     first line
          {"do": "watch", "pid": 7, "rank": 0}   {"do": "end", "grace_s": 1.0}   {"do": "quit"}
    out   {"event": "started" | "failed" | "exit" | "signal" | "ended", "t_ns": ..., ...}, also appended to the journal
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_SETTLE_S = 0.3  # what a launcher's own helpers (resource tracker, log threads) need to leave after it
_KILL_LIMIT_S = 3.0  # a process that ignores SIGKILL for this long is in the kernel's hands
NO_SOCKETS = shutil.ignore_patterns("*.sock")  # a rank's own ear, which cannot be copied
_STAT_STATE, _STAT_PARENT, _STAT_EXIT_CODE = 0, 1, 49  # fields after the command's closing bracket
# linux/pidfd.h: since 6.15 a pidfd tells how its process ended, even once somebody else has reaped it.
_PIDFD_INFO, _PIDFD_INFO_EXIT = struct.Struct("=QQ11Ii"), 1 << 3  # wanted and given, cgroup, ids, wait status
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Guardian:
    """One run under guard. Single-threaded: everything happens in `serve`."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tag = f"_NSA_HARNESS_RUN={order['tag']}".encode()
        self.journal = os.open(order["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.launcher: int | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.watched: dict[int, tuple[int, int | None]] = {}  # pidfd -> (pid, rank); None = a launcher
        self.seen_exits: set[int] = set()

    def serve(self) -> None:
        """Guard the run until the controller says quit, or is gone."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.start()
        poll = select.poll()
        poll.register(0, select.POLLIN | select.POLLHUP)
        poll.register(wake_read, select.POLLIN)
        pending = b""
        while True:
            for fd, _ in poll.poll(1000):
                if fd in self.watched:
                    poll.unregister(fd)
                    self.process_left(fd)
                elif fd == wake_read:
                    os.read(wake_read, 4096)
                elif fd == 0:
                    chunk = os.read(0, 65536)
                    if not chunk:
                        self.abandoned(poll)
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        if not self.obey(json.loads(line), poll):
                            return
            self._reap()

    def start(self) -> None:
        if self.order["argv"] is None:  # called to sweep after another guardian was killed
            return
        # Made here, not by the controller: whoever makes it must live to remove it.
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        try:
            self.launcher = self.spawn()
        except OSError as error:
            self.say("failed", error=str(error))
            return
        self.say("started", pid=self.launcher, guardian=os.getpid())

    def spawn(self) -> int:
        """Start the launcher in a session of its own; its output goes to the attempt."""
        with open(self.order["output"], "ab") as output:
            child = subprocess.Popen(
                self.order["argv"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.order["env"],
                cwd=self.order["cwd"],
                start_new_session=True,
                umask=self.order["umask"],
            )
        # Kept alive: a Popen that is collected reaps its process, and the exit code of a quick command would be lost.
        self.child = child
        return child.pid

    def obey(self, command: dict[str, Any], poll: select.poll) -> bool:
        """False ends the guardian."""
        if command["do"] == "watch":
            self.watch(command["pid"], command["rank"], poll)
        elif command["do"] == "end":
            self._end(command["grace_s"])
        return bool(command["do"] != "quit")

    def watch(self, pid: int, rank: int | None, poll: select.poll) -> None:
        """Be told of this rank's end. torchrun reaps it within 0.1 s."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self.say("exit", pid=pid, rank=rank, status=None)
            return
        self.watched[fd] = (pid, rank)
        poll.register(fd, select.POLLIN)

    def process_left(self, fd: int) -> None:
        pid, rank = self.watched.pop(fd)
        status = _exit_status(pid, fd)
        os.close(fd)
        self.seen_exits.add(pid)
        self.say("exit", pid=pid, rank=rank, status=status)

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.seen_exits:
                ranks = dict(self.watched.values())
                self.say("exit", pid=pid, rank=ranks.get(pid), status=os.waitstatus_to_exitcode(wait_status))

    def _end(self, grace_s: float) -> None:
        """TERM, then KILL, to every process of the run; then bring the boards home."""
        if self.members():
            time.sleep(0 if self.launcher and _stat(self.launcher) else _SETTLE_S)
        outlived = [f"{pid} {command_of(pid)}" for pid in self.members() if not self._launcher_lives()]
        self._signal(signal.SIGTERM, also_continue=True)
        self._wait_gone(grace_s)
        deadline = time.monotonic() + _KILL_LIMIT_S
        while self.members() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            self._wait_gone(0.2)
        left = [f"{pid} {command_of(pid)}" for pid in self.members()]
        self.bring_home()
        self.say("ended", outlived=outlived, left=left)

    @property
    def root(self) -> int:
        """Whose descendants are the run: a subreaper's own."""
        return os.getpid()

    def _launcher_lives(self) -> bool:
        stat = _stat(self.launcher) if self.launcher else None
        return stat is not None and stat[_STAT_STATE] != "Z"

    def members(self) -> list[int]:
        """Every living process of the run: who descends from here, or carries the tag in its environment."""
        pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
        parents = {pid: (int(stat[_STAT_PARENT]), stat[_STAT_STATE]) for pid in pids if (stat := _stat(pid))}
        me, root = os.getpid(), self.root

        def descends(pid: int) -> bool:
            while pid in parents and pid != root:
                pid = parents[pid][0]
            return pid == root

        return [
            pid
            for pid, (_, state) in parents.items()
            if pid != me and state != "Z" and (descends(pid) or _carries(pid, self.tag))
        ]

    def _signal(self, number: signal.Signals, *, also_continue: bool = False) -> None:
        members = self.members()
        for pid in members:
            _kill(pid, number)
            if also_continue:  # a stopped process takes its TERM only when it runs again
                _kill(pid, signal.SIGCONT)
        if members:
            self.say("signal", signal=number.name, pids=members)

    def _wait_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._reap()
            if not self.members():
                return
            time.sleep(0.03)

    def bring_home(self) -> None:
        """Boards live in memory; what the judge needs of them goes into the run's directory."""
        self.copy_boards()
        shutil.rmtree(self.order["boards"], ignore_errors=True)

    def copy_boards(self) -> None:
        try:
            shutil.copytree(self.order["boards"], self.order["keep"], ignore=NO_SOCKETS, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            self.say("trouble", what="boards", why=str(error))

    def abandoned(self, _: select.poll) -> None:
        """The controller is dead: its run ends with it."""
        Path(self.order["interrupted"]).write_text("the controller died; the guardian ended the run\n")
        self.say("abandoned")
        self._end(0.5)

    def say(self, event: str, **facts: object) -> None:
        line = (json.dumps({"event": event, "t_ns": time.monotonic_ns(), **facts}) + "\n").encode()
        os.write(self.journal, line)
        with contextlib.suppress(OSError):  # the controller may be gone; the journal has it
            os.write(1, line)


def _exit_status(pid: int, pidfd: int) -> int | None:
    """Of a process that has ended: from /proc until it is reaped, by its pidfd after that; None = neither tells."""
    stat = _stat(pid)
    if stat and stat[_STAT_STATE] == "Z":
        return os.waitstatus_to_exitcode(int(stat[_STAT_EXIT_CODE]))
    try:
        told = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:
        return None
    given, *_, wait_status = _PIDFD_INFO.unpack(told)
    return os.waitstatus_to_exitcode(wait_status) if given & _PIDFD_INFO_EXIT else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command, which may hold blanks and brackets itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None


def _carries(pid: int, tag: bytes) -> bool:
    try:
        return tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "?"


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def first_line() -> bytes:
    """Byte by byte: what follows the first line belongs to the poll loop, not to a buffer."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the controller left before it gave its order")
        line += byte
    return bytes(line)


def outlive_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: the run would inherit it


def main(kind: type[Guardian] = Guardian) -> None:
    outlive_signals()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = json.loads(first_line())
    kind(order).serve()


if __name__ == "__main__":
    main()
