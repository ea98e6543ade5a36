"""The guardian: starts the launcher, outlives the controller, and leaves no process behind.

A program of its own (standard library only, no imports of this package): it must start in milliseconds and must not
share the controller's fate. It runs in its own session as a child subreaper, so that every orphan of the run becomes
its child. The controller speaks JSON lines on its standard input; when that closes, the controller is dead.

It ends first and records second: what may not be signalled, read or written is told, and stops nothing.

    in    {"argv", "env", "cwd", "umask", "tag", "output", "boards", "keep", "journal", "interrupted", "reserve",
          "controller"}
          {"do": "watch", "pid": 7, "started": 123, "rank": 0}   {"do": "end", "grace_s": 1.0}   {"do": "quit"}
    out   {"event": "started" | "failed" | "exit" | "signal" | "full" | "ended", "t_ns": ..., ...}, also appended to the
          journal

One that takes the place of another has no argv; "launcher" is what that one had started, if it had. "over" says that
nothing is left of the run but boards that could not be brought home.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import pwd
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 1.0
_SETTLE_S = 0.3  # what a launcher's own helpers (resource tracker, log threads) need to leave after it
_KILL_LIMIT_S = 3.0  # a process that ignores SIGKILL for this long is in the kernel's hands
_STATE, _PARENT, _STARTED, _EXIT_CODE = 0, 1, 19, 49  # fields of /proc/PID/stat after the command's closing bracket
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_BYTES = 1 << 20  # no run can do with less
# linux/pidfd.h: since 6.15 a pidfd tells how its process ended, even once somebody else has reaped it.
_PIDFD_INFO, _PIDFD_INFO_EXIT = struct.Struct("=QQ11Ii"), 1 << 3  # wanted and given, cgroup, ids, wait status
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
OWNER = "owner.json"  # in the directory of the boards: whose they are


@dataclass(frozen=True)
class Process:
    """One process for good: its number may be given away again, but not together with its start."""

    pid: int
    started: int  # clock ticks since the boot

    def lives(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[_STATE] not in "ZX" and int(found[_STARTED]) == self.started

    def send(self, number: int) -> OSError | None:
        """Never to another one that has its number by now. Returns why it could not be sent to one that is there."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            return error
        try:
            if self.lives():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return None
        except OSError as error:
            return error
        finally:
            os.close(descriptor)
        return None


def process_of(pid: int) -> Process | None:
    """None when it is gone; one that has ended and was not waited for is still there."""
    found = _stat(pid)
    return Process(pid, int(found[_STARTED])) if found else None


class Reaper:
    """One run under guard. Single-threaded: everything happens in `serve`."""

    module = "nsa_harness.supervisor.launch.reaper"  # how another one is started in the place of this one

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tag = f"_NSA_HARNESS_RUN={order['tag']}".encode()
        self.launcher: int | None = None
        self.root = os.getpid()  # whose descendants are the run: a subreaper's own
        self.child: subprocess.Popen[bytes] | None = None
        self.poll = select.poll()
        self.watched: dict[int, tuple[int, int | None]] = {}  # pidfd -> (pid, rank); None = a launcher
        self.seen_exits: set[int] = set()
        self.known: set[Process] = set()  # of the run, whoever its parent is by now
        self.looked_s = 0.0
        self.over = False  # no process of it is left
        self.refused: dict[Process, str] = {}  # may not be signalled, and why
        self.journal: int | None = None
        self.unwritten = b""  # of the journal
        self.unsaid = b""
        self.full = False

    def serve(self) -> None:
        """Guard the run until the controller says quit, or is gone."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.start()
        self.poll.register(0, select.POLLIN | select.POLLHUP)
        self.poll.register(wake_read, select.POLLIN)
        pending = b""
        while True:
            for fd, _ in self.poll.poll(_LOOK_S * 1000):
                if fd in self.watched:
                    self.process_left(fd)
                elif fd == wake_read:
                    os.read(wake_read, 4096)
                elif fd == 0:
                    chunk = os.read(0, 65536)
                    if not chunk:
                        self.abandoned()
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        if not self.obey(json.loads(line)):
                            return
            self._reap()
            self.remember()
            self.flush()

    def start(self) -> None:
        if self.order["argv"] is None:  # in the place of another one
            self.take_over()
            return
        # Made here, not by the controller: whoever makes it must live to remove it.
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        self.claim()
        try:
            self.launcher = self.spawn()
        except OSError as error:
            self.say("failed", error=str(error))
            return
        self.claim()
        self.say("started", pid=self.launcher, guardian=os.getpid())

    def take_over(self) -> None:
        if self.order.get("launcher"):
            pid, started = self.order["launcher"]
            self.launcher = self.root = pid
            self.watch(pid, None, started)
        boards = Path(self.order["boards"])
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # that one may have written nothing
            self.known |= {Process(*one) for one in json.loads((boards / OWNER).read_bytes())["order"]["known"]}
        if boards.is_dir():
            self.claim()

    def claim(self) -> None:
        """Write beside the boards whose they are: who finds them may have to end the run, and must not do so early."""
        launcher = process_of(self.launcher) if self.launcher else None
        kept = ("tag", "boards", "keep", "journal", "interrupted", "reserve")
        owner = {
            "machine": this_machine(),
            "controller": self.order.get("controller"),
            "guardian": _pair(process_of(os.getpid())),
            "module": self.module,
            "order": {
                **{name: self.order[name] for name in kept if name in self.order},
                "argv": None,
                "launcher": None if self.over else _pair(launcher) or self.order.get("launcher"),
                "known": sorted([one.pid, one.started] for one in self.known),
                "over": self.over,
            },
        }
        try:
            _write_aside(Path(self.order["boards"]) / OWNER, json.dumps(owner).encode())
        except OSError as error:
            self.say("trouble", what="boards", why=f"they are nobody's: {error}")

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

    def obey(self, command: dict[str, Any]) -> bool:
        """False ends the guardian."""
        if command["do"] == "watch":
            self.watch(command["pid"], command["rank"], command.get("started"))
        elif command["do"] == "end":
            self.end(command["grace_s"])
        return bool(command["do"] != "quit")

    def watch(self, pid: int, rank: int | None, started: int | None) -> None:
        """Be told of this process's end. torchrun reaps a rank within 0.1 s."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self.say("exit", pid=pid, rank=rank, status=None)
            return
        if started is not None and process_of(pid) != Process(pid, started):
            os.close(fd)
            self.say("exit", pid=pid, rank=rank, status=None)
            return
        self.watched[fd] = (pid, rank)
        self.poll.register(fd, select.POLLIN)

    def process_left(self, fd: int) -> None:
        self.poll.unregister(fd)
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
                self.note("exit", pid=pid, rank=ranks.get(pid), status=os.waitstatus_to_exitcode(wait_status))

    def end(self, grace_s: float) -> list[str]:
        """TERM, then KILL, to every process of the run; only then the records and the boards. Returns what is left."""
        if self.members():
            time.sleep(0 if self._launcher_lives() else _SETTLE_S)
        outlived = [f"{one.pid} {command_of(one.pid)}" for one in self.members() if not self._launcher_lives()]
        self._signal(signal.SIGTERM, also_continue=True)
        self._wait_gone(grace_s)
        deadline = time.monotonic() + _KILL_LIMIT_S
        while self._within_reach() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            self._wait_gone(0.2)
        left = [self._survivor(one) for one in self.members()]
        self.look_at_disk()
        self.flush()
        self.copy_probe_files(over=not left)
        self.say("ended", outlived=outlived, left=left)
        return left

    def _launcher_lives(self) -> bool:
        found = _stat(self.launcher) if self.launcher else None
        return found is not None and found[_STATE] != "Z"

    def members(self) -> list[Process]:
        """Every living process of the run: who descends from here, carries the tag in its environment, or once did."""
        pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
        every = {pid: found for pid in pids if (found := _stat(pid))}
        me = os.getpid()
        living = [Process(pid, int(found[_STARTED])) for pid, found in every.items() if found[_STATE] not in "ZX"]
        roots = {self.root, *(one.pid for one in living if one in self.known)}

        def descends(pid: int) -> bool:
            while pid in every and pid not in roots:
                pid = int(every[pid][_PARENT])
            return pid in roots

        members = [
            one
            for one in living
            if one.pid != me and (one in self.known or descends(one.pid) or _carries(one.pid, self.tag))
        ]
        self.known.update(members)
        return members

    def remember(self) -> None:
        """Write down who is of the run where neither parents nor tag may tell it to a guardian in this one's place.

        An orphan becomes a child of the first guardian's, and of nobody known once another one has taken over.
        """
        now_s = time.monotonic()
        if now_s - self.looked_s < _LOOK_S:
            return
        self.looked_s, before = now_s, set(self.known)
        if self.root == os.getpid():
            self.known |= {one for pid in _children() if (one := process_of(pid))}
        else:
            self.members()
        self.known = {one for one in self.known if one.lives()}
        if self.known != before and Path(self.order["boards"]).is_dir():
            self.claim()

    def _within_reach(self) -> list[Process]:
        return [one for one in self.members() if one not in self.refused]

    def _survivor(self, one: Process) -> str:
        why = self.refused.get(one, "ignores SIGKILL")
        return f"{one.pid} {command_of(one.pid)} (of {owner_of(one.pid)}; {why})"

    def _signal(self, number: signal.Signals, *, also_continue: bool = False) -> None:
        reached = []
        for one in self.members():
            refused = one.send(number)
            if refused is not None:
                self.refused[one] = f"may not be signalled, {refused.strerror}"
                continue
            reached.append(one.pid)
            if also_continue:  # a stopped process takes its TERM only when it runs again
                one.send(signal.SIGCONT)
        if reached:
            self.note("signal", signal=number.name, pids=reached)

    def _wait_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._reap()
            if not self.members():
                return
            time.sleep(0.03)

    # Boards.

    def copy_probe_files(self, *, over: bool = True) -> None:
        """Boards live in memory; what the judge needs of them goes into the run's directory, and only then from there.

        `over`: no process of the run is left.
        """
        boards = Path(self.order["boards"])
        if self.copy_boards(remove=True):
            with contextlib.suppress(OSError):
                (boards / OWNER).unlink(missing_ok=True)
                boards.rmdir()
        else:
            self.over = over
            self.claim()

    def copy_boards(self, *, remove: bool = False) -> bool:
        """Every file by itself. False where one could not be copied; it stays where it is."""
        boards, home = Path(self.order["boards"]), Path(self.order["keep"])
        failed = []
        for file in _files(boards):
            try:
                if stat.S_ISREG(file.lstat().st_mode):  # else a rank's own ear, which cannot be copied
                    self._with_room(home / file.name, functools.partial(_copied, file, home / file.name))
            except OSError as error:
                failed.append(f"{file.name}: {error.strerror or error}")
                continue
            if remove:
                with contextlib.suppress(OSError):
                    file.unlink()
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            self.say("trouble", what="boards", why=f"{failed[0]}{more}; what could not be copied stays in {boards}")
        return not failed

    # A controller that is gone.

    def abandoned(self) -> None:
        """The controller is dead: its run ends with it."""
        if self.order.get("over"):
            self.copy_probe_files()
            return
        self.note("abandoned")
        left = self.end(0.5)
        what = f"could not end all of it: {'; '.join(left)}" if left else "ended the run"
        interrupted = Path(self.order["interrupted"])
        text = f"the controller died; the guardian {what}\n".encode()
        with contextlib.suppress(OSError):  # the journal has it too
            self._with_room(interrupted, lambda: interrupted.write_bytes(text))
        with contextlib.suppress(OSError):
            os.unlink(self.order.get("reserve", ""))

    # What is told.

    def say(self, event: str, **facts: object) -> None:
        self.note(event, **facts)
        self.flush()

    def note(self, event: str, **facts: object) -> None:
        """To be told when there is time for it."""
        line = (json.dumps({"event": event, "t_ns": time.monotonic_ns(), **facts}) + "\n").encode()
        self.unwritten += line
        self.unsaid += line

    def flush(self) -> None:
        """What cannot be written is kept for the next time; the controller, which may be gone, is told once."""
        if not self.unwritten:
            return
        journal = Path(self.order["journal"])
        with contextlib.suppress(OSError):
            self._with_room(journal, self._append)
        told, self.unsaid = self.unsaid, b""
        with contextlib.suppress(OSError):
            os.write(1, told)

    def _append(self) -> None:
        if self.journal is None:
            self.journal = os.open(self.order["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        while self.unwritten:
            self.unwritten = self.unwritten[os.write(self.journal, self.unwritten) :]

    def _with_room(self, place: Path, write: Callable[[], object]) -> None:
        """Again with the room that was kept for the end, where there is none left. Raises OSError."""
        try:
            write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._tell_full(f"{error.strerror}: {place}")
            if not _emptied(self.order.get("reserve")):
                raise
            write()

    def look_at_disk(self) -> None:
        """Whoever met the end of it may have said so nowhere: a rank's words go to the same disk."""
        home = Path(self.order["journal"]).parent
        with contextlib.suppress(OSError):
            found = os.statvfs(home)
            free_bytes = found.f_bavail * found.f_frsize
            if free_bytes < _FULL_BYTES:
                self._tell_full(f"{free_bytes} bytes are free for {home}")
        reserve = self.order.get("reserve")
        with contextlib.suppress(OSError):
            if reserve and Path(reserve).stat().st_size == 0:
                self._tell_full(f"the room that was kept for the end of the run is used up: {home}")

    def _tell_full(self, why: str) -> None:
        if not self.full:
            self.full = True
            self.note("full", why=why)


def this_machine() -> list[str]:
    """Process numbers mean something between two processes that have this in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


def _pair(process: Process | None) -> list[int] | None:
    return [process.pid, process.started] if process else None


def _files(boards: Path) -> list[Path]:
    try:
        return sorted(file for file in boards.iterdir() if file.name != OWNER and not file.is_dir())
    except OSError:
        return []


def _copied(file: Path, target: Path) -> None:
    """A copy that is known to be whole. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    data = file.read_bytes()
    _write_aside(target, data)
    if target.read_bytes() != data:
        raise OSError(errno.EIO, "the copy is another one")


def _write_aside(target: Path, data: bytes) -> None:
    """Under a name that nobody can have taken before. Raises OSError."""
    aside = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        aside.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _emptied(reserve: str | None) -> bool:
    """The file keeps its name: that it is empty says that somebody needed the room."""
    try:
        descriptor = os.open(reserve or "", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            return False
        os.ftruncate(descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _exit_status(pid: int, pidfd: int) -> int | None:
    """Of a process that has ended: from /proc until it is reaped, by its pidfd after that; None = neither tells."""
    found = _stat(pid)
    if found and found[_STATE] == "Z":
        return os.waitstatus_to_exitcode(int(found[_EXIT_CODE]))
    try:
        told = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:
        return None
    given, *_, wait_status = _PIDFD_INFO.unpack(told)
    return os.waitstatus_to_exitcode(wait_status) if given & _PIDFD_INFO_EXIT else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command, which may hold blanks and brackets itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split() or None
    except OSError:
        return None


def _children() -> list[int]:
    """Of this process, which has one thread; none where the kernel was built without that list."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split()]
    except OSError:
        return []


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


def owner_of(pid: int) -> str:
    try:
        number = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


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


def main(kind: type[Reaper] = Reaper) -> None:
    outlive_signals()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = json.loads(first_line())
    kind(order).serve()


if __name__ == "__main__":
    main()
