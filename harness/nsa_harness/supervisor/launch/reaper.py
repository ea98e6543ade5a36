"""The reaper: starts the launcher, outlives the controller, and leaves no process behind.

A separate program (standard library only, no imports of this package): it must start in milliseconds and must not die
with the controller. It runs in its own session as a child subreaper, so that every orphan of the run becomes its
child. The controller writes JSON lines to its standard input; when that closes, the controller is dead.

The reaper ends processes first and writes records second. A process that it may not signal, and a file that it cannot
read or write, is reported and stops nothing. Stored records and orders call it "guardian".

    in    {"argv", "env", "cwd", "umask", "tag", "output", "boards", "keep", "journal", "interrupted", "reserve",
          "controller"}
          {"do": "watch", "pid": 7, "started": 123, "rank": 0}   {"do": "end", "grace_s": 1.0}   {"do": "quit"}
    out   {"event": "started" | "failed" | "exit" | "signal" | "full" | "ended", "t_ns": ..., ...}, also appended to the
          journal

A reaper that replaces a killed one gets no argv; "launcher" is the process that the killed one had started, if any.
"over" means that the run has ended, and only probe files are left, which could not be moved to the run's directory.
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
_POLL_S = 1.0
_SETTLE_S = 0.3  # a launcher's own helpers (resource tracker, log threads) exit this soon after it
_KILL_LIMIT_S = 3.0  # a process that ignores SIGKILL for this long is stuck in the kernel
_STATE, _PARENT, _STARTED, _EXIT_CODE = 0, 1, 19, 49  # fields of /proc/PID/stat after the command's closing bracket
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_BYTES = 1 << 20  # with less free, the disk counts as full
# linux/pidfd.h: since Linux 6.15 a pidfd has its process's wait status, even after another process has reaped it.
# The structure: requested and returned fields, control group, ids, wait status.
_PIDFD_INFO, _PIDFD_INFO_EXIT = struct.Struct("=QQ11Ii"), 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
OWNER = "owner.json"  # next to the probe files: which controller and reaper they belong to


@dataclass(frozen=True)
class Process:
    """The identity of a process: a pid may be reused, but not with the same start time."""

    pid: int
    started: int  # clock ticks since the boot

    def lives(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and fields[_STATE] not in "ZX" and int(fields[_STARTED]) == self.started

    def send(self, number: int) -> OSError | None:
        """Signal this process, but never another process that has reused its pid.

        Return the error if the process lives and may not be signalled.
        """
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
    """Return the identity of a process, which may be a zombie, or None if there is no such process."""
    fields = _stat(pid)
    return Process(pid, int(fields[_STARTED])) if fields else None


class Reaper:
    """Guards one run. Single-threaded: everything happens in `serve`."""

    module = "nsa_harness.supervisor.launch.reaper"  # the program that replaces this one if it is killed

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tag = f"_NSA_HARNESS_RUN={order['tag']}".encode()
        self.launcher: int | None = None
        self.root = os.getpid()  # the run's processes descend from it: a subreaper's orphans are its children
        self.child: subprocess.Popen[bytes] | None = None
        self.poll = select.poll()
        self.watched: dict[int, tuple[int, int | None]] = {}  # pidfd -> (pid, rank); None = a launcher
        self.seen_exits: set[int] = set()
        self.known: set[Process] = set()  # the run's processes so far: an orphan's parent no longer identifies it
        self.remembered_s = 0.0
        self.over = False  # no process of the run is left; only unmoved probe files
        self.refused: dict[Process, str] = {}  # processes that may not be signalled -> reason
        self.journal: int | None = None
        self.unwritten = b""  # lines for the journal
        self.unsent = b""
        self.disk_full = False

    def serve(self) -> None:
        """Run the reaper's loop until the controller sends "quit" or is gone.

        Each iteration handles exits of watched processes, commands on standard input, and SIGCHLD.
        """
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.start()
        self.poll.register(0, select.POLLIN | select.POLLHUP)
        self.poll.register(wake_read, select.POLLIN)
        pending = b""
        while True:
            for fd, _ in self.poll.poll(_POLL_S * 1000):
                if fd in self.watched:
                    self.report_exit(fd)
                elif fd == wake_read:
                    os.read(wake_read, 4096)
                elif fd == 0:
                    chunk = os.read(0, 65536)
                    if not chunk:
                        self.end_abandoned()
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        if not self.obey(json.loads(line)):
                            return
            self._reap()
            self.remember()
            self.flush()

    def start(self) -> None:
        if self.order["argv"] is None:  # replaces a killed reaper
            self.take_over()
            return
        # Made here, not by the controller: the process that makes the directory must live to remove it.
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        self.write_owner()
        try:
            self.launcher = self.spawn()
        except OSError as error:
            self.report("failed", error=str(error))
            return
        self.write_owner()
        self.report("started", pid=self.launcher, guardian=os.getpid())

    def take_over(self) -> None:
        """Continue for a killed reaper: watch its launcher, and read which processes it knew."""
        if self.order.get("launcher"):
            pid, started = self.order["launcher"]
            self.launcher = self.root = pid
            self.watch(pid, None, started)
        probe_dir = Path(self.order["boards"])
        # The killed reaper may have written nothing.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads((probe_dir / OWNER).read_bytes())["order"]["known"]
            self.known |= {Process(*identity) for identity in known}
        if probe_dir.is_dir():
            self.write_owner()

    def write_owner(self) -> None:
        """Write the controller and the reaper of this run next to its probe files.

        The watchdog and later commands read this file: they end the run only if both processes are dead.
        """
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
                "known": sorted([process.pid, process.started] for process in self.known),
                "over": self.over,
            },
        }
        try:
            _write_aside(Path(self.order["boards"]) / OWNER, json.dumps(owner).encode())
        except OSError as error:
            self.report("trouble", what="boards", why=f"they are nobody's: {error}")

    def spawn(self) -> int:
        """Start the launcher in its own session, with its output in the attempt's directory, and return its pid."""
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
        # Keep a reference: a collected Popen reaps its process, and the exit code of a short command would be lost.
        self.child = child
        return child.pid

    def obey(self, command: dict[str, Any]) -> bool:
        """Carry out a command of the controller. Return False if it is "quit", which ends the reaper."""
        if command["do"] == "watch":
            self.watch(command["pid"], command["rank"], command.get("started"))
        elif command["do"] == "end":
            self.end(command["grace_s"])
        return bool(command["do"] != "quit")

    def watch(self, pid: int, rank: int | None, started: int | None) -> None:
        """Watch for the exit of this process by its pidfd: torchrun reaps a rank within 0.1 s."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self.report("exit", pid=pid, rank=rank, status=None)
            return
        if started is not None and process_of(pid) != Process(pid, started):
            os.close(fd)
            self.report("exit", pid=pid, rank=rank, status=None)
            return
        self.watched[fd] = (pid, rank)
        self.poll.register(fd, select.POLLIN)

    def report_exit(self, fd: int) -> None:
        """Report the exit of the watched process with this pidfd, and stop watching it."""
        self.poll.unregister(fd)
        pid, rank = self.watched.pop(fd)
        status = _exit_status(pid, fd)
        os.close(fd)
        self.seen_exits.add(pid)
        self.report("exit", pid=pid, rank=rank, status=status)

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
        """End every process of the run by TERM, then KILL; then write records and move the probe files.

        Return a text for each process that survives.
        """
        if self.members():
            time.sleep(0 if self._launcher_lives() else _SETTLE_S)
        outlived = [
            f"{process.pid} {command_of(process.pid)}" for process in self.members() if not self._launcher_lives()
        ]
        self._signal(signal.SIGTERM, also_continue=True)
        self._wait_until_gone(grace_s)
        deadline = time.monotonic() + _KILL_LIMIT_S
        while self._reachable() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            self._wait_until_gone(0.2)
        left = [self._survivor(process) for process in self.members()]
        self.check_disk()
        self.flush()
        self.move_probe_files(over=not left)
        self.report("ended", outlived=outlived, left=left)
        return left

    def _launcher_lives(self) -> bool:
        fields = _stat(self.launcher) if self.launcher else None
        return fields is not None and fields[_STATE] != "Z"

    def members(self) -> list[Process]:
        """Return every living process of the run.

        A process belongs to it if, now or at an earlier call, it descends from this process or its environment has the
        run's tag.
        """
        pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
        every = {pid: fields for pid in pids if (fields := _stat(pid))}
        me = os.getpid()
        living = [Process(pid, int(fields[_STARTED])) for pid, fields in every.items() if fields[_STATE] not in "ZX"]
        roots = {self.root, *(process.pid for process in living if process in self.known)}

        def descends(pid: int) -> bool:
            while pid in every and pid not in roots:
                pid = int(every[pid][_PARENT])
            return pid in roots

        members = [
            process
            for process in living
            if process.pid != me and (process in self.known or descends(process.pid) or _has_tag(process.pid, self.tag))
        ]
        self.known.update(members)
        return members

    def remember(self) -> None:
        """Store the run's processes for a reaper that may replace this one.

        An orphan is a child of the first reaper. If that reaper is killed, its parent no longer identifies the orphan,
        and the tag does not if the process has cleared its environment.
        """
        now_s = time.monotonic()
        if now_s - self.remembered_s < _POLL_S:
            return
        self.remembered_s, before = now_s, set(self.known)
        if self.root == os.getpid():
            self.known |= {process for pid in _children() if (process := process_of(pid))}
        else:
            self.members()
        self.known = {process for process in self.known if process.lives()}
        if self.known != before and Path(self.order["boards"]).is_dir():
            self.write_owner()

    def _reachable(self) -> list[Process]:
        """Return the run's processes that this one may signal."""
        return [process for process in self.members() if process not in self.refused]

    def _survivor(self, process: Process) -> str:
        why = self.refused.get(process, "ignores SIGKILL")
        return f"{process.pid} {command_of(process.pid)} (of {user_of(process.pid)}; {why})"

    def _signal(self, number: signal.Signals, *, also_continue: bool = False) -> None:
        reached = []
        for process in self.members():
            refused = process.send(number)
            if refused is not None:
                self.refused[process] = f"may not be signalled, {refused.strerror}"
                continue
            reached.append(process.pid)
            if also_continue:  # a stopped process receives TERM only when it runs again
                process.send(signal.SIGCONT)
        if reached:
            self.note("signal", signal=number.name, pids=reached)

    def _wait_until_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._reap()
            if not self.members():
                return
            time.sleep(0.03)

    # Probe files.

    def move_probe_files(self, *, over: bool = True) -> None:
        """Move the probe files from memory to the run's directory. A file is removed only after it was copied.

        `over`: no process of the run is left. Stored for a later reaper if files could not be moved.
        """
        probe_dir = Path(self.order["boards"])
        if self.copy_probe_files(remove=True):
            with contextlib.suppress(OSError):
                (probe_dir / OWNER).unlink(missing_ok=True)
                probe_dir.rmdir()
        else:
            self.over = over
            self.write_owner()

    def copy_probe_files(self, *, remove: bool = False) -> bool:
        """Copy every probe file to the run's directory. Return False if a file could not be copied; it stays."""
        probe_dir, target_dir = Path(self.order["boards"]), Path(self.order["keep"])
        failed = []
        for file in _probe_files(probe_dir):
            try:
                if stat.S_ISREG(file.lstat().st_mode):  # a rank's socket cannot be copied
                    self._with_room(
                        target_dir / file.name, functools.partial(_copy_verified, file, target_dir / file.name)
                    )
            except OSError as error:
                failed.append(f"{file.name}: {error.strerror or error}")
                continue
            if remove:
                with contextlib.suppress(OSError):
                    file.unlink()
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            self.report(
                "trouble", what="boards", why=f"{failed[0]}{more}; what could not be copied stays in {probe_dir}"
            )
        return not failed

    # A dead controller.

    def end_abandoned(self) -> None:
        """End the run after the death of its controller, and note this in the run's directory."""
        if self.order.get("over"):
            self.move_probe_files()
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

    # Records.

    def report(self, event: str, **facts: object) -> None:
        """Write an event to the journal and to the controller at once."""
        self.note(event, **facts)
        self.flush()

    def note(self, event: str, **facts: object) -> None:
        """Add an event to the lines that the next `flush` will write."""
        line = (json.dumps({"event": event, "t_ns": time.monotonic_ns(), **facts}) + "\n").encode()
        self.unwritten += line
        self.unsent += line

    def flush(self) -> None:
        """Write the noted events to the journal and to the controller.

        What the journal does not accept is tried again at the next flush; the controller is written to only once.
        """
        if not self.unwritten:
            return
        journal = Path(self.order["journal"])
        with contextlib.suppress(OSError):
            self._with_room(journal, self._append)
        lines, self.unsent = self.unsent, b""
        with contextlib.suppress(OSError):
            os.write(1, lines)

    def _append(self) -> None:
        if self.journal is None:
            self.journal = os.open(self.order["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        while self.unwritten:
            self.unwritten = self.unwritten[os.write(self.journal, self.unwritten) :]

    def _with_room(self, place: Path, write: Callable[[], object]) -> None:
        """Call `write`; on a full disk, free the reserved space and call it again. Raises OSError."""
        try:
            write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._note_full_disk(f"{error.strerror}: {place}")
            if not _empty_reserve(self.order.get("reserve")):
                raise
            write()

    def check_disk(self) -> None:
        """Note a full disk: a rank that failed because of it could not write its error to the same disk."""
        run_dir = Path(self.order["journal"]).parent
        with contextlib.suppress(OSError):
            space = os.statvfs(run_dir)
            free_bytes = space.f_bavail * space.f_frsize
            if free_bytes < _FULL_BYTES:
                self._note_full_disk(f"{free_bytes} bytes are free for {run_dir}")
        reserve = self.order.get("reserve")
        with contextlib.suppress(OSError):
            if reserve and Path(reserve).stat().st_size == 0:
                self._note_full_disk(f"the room that was kept for the end of the run is used up: {run_dir}")

    def _note_full_disk(self, why: str) -> None:
        """Note once that the disk with the run's directory is full."""
        if not self.disk_full:
            self.disk_full = True
            self.note("full", why=why)


def this_machine() -> list[str]:
    """Return the boot and the PID namespace: pids are comparable between processes with equal values."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


def _pair(process: Process | None) -> list[int] | None:
    return [process.pid, process.started] if process else None


def _probe_files(probe_dir: Path) -> list[Path]:
    try:
        return sorted(file for file in probe_dir.iterdir() if file.name != OWNER and not file.is_dir())
    except OSError:
        return []


def _copy_verified(file: Path, target: Path) -> None:
    """Copy a file, and read the copy back to compare it. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    data = file.read_bytes()
    _write_aside(target, data)
    if target.read_bytes() != data:
        raise OSError(errno.EIO, "the copy is another one")


def _write_aside(target: Path, data: bytes) -> None:
    """Write under a random name, then rename to the target. Raises OSError."""
    aside = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        aside.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _empty_reserve(reserve: str | None) -> bool:
    """Truncate the reserve file, and return whether that worked. The empty file shows that its space was needed."""
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
    """Return the exit status of a process from /proc, or from its pidfd once it is reaped; None if neither has it."""
    fields = _stat(pid)
    if fields and fields[_STATE] == "Z":
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:
        return None
    given, *_, wait_status = _PIDFD_INFO.unpack(answer)
    return os.waitstatus_to_exitcode(wait_status) if given & _PIDFD_INFO_EXIT else None


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat that follow the command, or None if there is no such process.

    The command may contain blanks and brackets.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split() or None
    except OSError:
        return None


def _children() -> list[int]:
    """Return the pids of this single-threaded process's children; none if the kernel was built without that list."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split()]
    except OSError:
        return []


def _has_tag(pid: int, tag: bytes) -> bool:
    try:
        return tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "?"


def user_of(pid: int) -> str:
    try:
        number = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def first_line() -> bytes:
    """Read the order, the first line, byte by byte: a buffer would take lines from the poll loop."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the controller left before it gave its order")
        line += byte
    return bytes(line)


def outlive_signals() -> None:
    """Ignore the signals by which a terminal or a user ends the controller."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the run would inherit


def main(kind: type[Reaper] = Reaper) -> None:
    outlive_signals()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = json.loads(first_line())
    kind(order).serve()


if __name__ == "__main__":
    main()
