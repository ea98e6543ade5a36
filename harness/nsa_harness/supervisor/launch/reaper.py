"""A process (the "reaper") that starts the launcher of a run and, when the run is over, ends all remaining processes.

The controller is the nsa-harness command that watches the run. The reaper is a separate program that loads only the
standard library: it must start in milliseconds and must not die with the controller. It runs in its own session as a
child subreaper, so every orphaned process of the run becomes its child. The controller writes JSON lines to the
reaper's standard input. When this input closes, the controller is dead.

The reaper ends processes first and writes records afterwards. If it may not signal a process, or cannot read or write a
file, it reports this and continues. Stored records and orders call the reaper "guardian".

    in    {"argv", "env", "cwd", "umask", "tag", "output", "boards", "keep", "journal", "interrupted", "reserve",
          "controller", "keeper", "folder"}
          {"do": "watch", "pid": 7, "started": 123, "rank": 0}   {"do": "end", "grace_s": 1.0}   {"do": "quit"}
    out   {"event": "started" | "failed" | "exit" | "signal" | "full" | "ended", "t_ns": ..., ...}, also appended to the
          journal

If a reaper replaces a killed reaper, its order has no argv, and "launcher" is the process that the killed reaper had
started, if any. "over" means that the run has ended, and that only some probe files are left to be moved. "last"
means that nobody will try again to move them, so they are removed if they cannot be moved. "folder" is the device and
inode of the attempt's directory; if another directory or a link has taken its place, nothing is written.
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

from ..storage.safe_directory import DOCUMENTS_BYTES, SafeDirectory, is_disk_full, shrink_ballast

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 1.0
_SETTLE_S = 0.3  # a launcher's helper processes, such as the resource tracker, exit within this time after it
_KILL_LIMIT_S = 3.0  # a process that is still alive this long after SIGKILL is stuck in the kernel
_STATE, _PARENT, _START_TICKS, _EXIT_CODE = 0, 1, 19, 49  # fields of /proc/PID/stat after the command's closing bracket
_FULL_BYTES = 1 << 20  # the disk counts as full if less space is free
# linux/pidfd.h: since Linux 6.15, a pidfd returns the wait status of its process, even after another process has reaped
# the process. The structure has the requested and returned fields, the control group, ids, and the wait status.
_PIDFD_INFO, _PIDFD_INFO_EXIT = struct.Struct("=QQ11Ii"), 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
OWNER = "owner.json"  # file in the probe directory that names the controller and the reaper of the run


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, identified by its pid and start time, because a pid can be reused."""

    pid: int
    start_ticks: int  # clock ticks since the boot

    def is_alive(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and fields[_STATE] not in "ZX" and int(fields[_START_TICKS]) == self.start_ticks

    def continue_if_stopped(self) -> bool:
        """Continue this process if a signal, such as SIGSTOP, has stopped it. Return whether it was stopped."""
        fields = _stat(self.pid)
        is_stopped = fields is not None and fields[_STATE] == "T"
        if is_stopped:
            self.send_signal(signal.SIGCONT)
        return is_stopped

    def send_signal(self, number: int) -> OSError | None:
        """Send a signal to this process, but never to another that reused its pid. Return the error, if any."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            return error
        try:
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return None
        except OSError as error:
            return error
        finally:
            os.close(descriptor)
        return None


def process_identity(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process with this pid, or None if there is no such process."""
    fields = _stat(pid)
    return ProcessIdentity(pid, int(fields[_START_TICKS])) if fields else None


class Reaper:
    """A single-threaded process that starts the launcher of one run, watches its processes, and ends them."""

    module = "nsa_harness.supervisor.launch.reaper"  # the module to start if this reaper is killed

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tag = f"_NSA_HARNESS_RUN={order['tag']}".encode()
        self.launcher_pid: int | None = None
        self.root_pid = os.getpid()  # all processes of the run descend from this process; orphans become its children
        self.child: subprocess.Popen[bytes] | None = None
        self.poll = select.poll()
        self.watched: dict[int, tuple[int, int | None]] = {}  # pidfd -> (pid, rank); rank None = the launcher
        self.reported_exits: set[int] = set()
        # The run's processes so far. They are remembered because an orphan's parent no longer identifies it.
        self.known_processes: set[ProcessIdentity] = set()
        self.updated_s = 0.0
        self.is_run_over = False  # no process of the run is left, but some probe files could not be moved
        self.unsignalled: dict[ProcessIdentity, str] = {}  # processes that may not be signalled -> reason
        self.journal: int | None = None  # no file object, which a forked launcher would inherit, and close
        self.unwritten = b""  # lines for the journal
        self.unsent = b""  # lines for the controller
        self.has_full_disk = False
        self.open_attempt()

    def open_attempt(self) -> None:
        """Remember the directory of the attempt, so that nothing is written to another directory or through a link."""
        self.attempt = Path(self.order["keep"]).parent
        self.directory = SafeDirectory(self.attempt.parent)
        if "folder" in self.order:
            self.directory.pinned[self.attempt] = tuple(self.order["folder"])
        else:
            with contextlib.suppress(OSError):
                self.order["folder"] = self.directory.pin(self.attempt)

    def serve(self) -> None:
        """Run the loop of the reaper until the controller sends "quit" or has exited."""
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
                        if not self.execute(json.loads(line)):
                            return
            self._reap()
            self.update_known_processes()
            self.flush()

    def start(self) -> None:
        """Start the launcher, or take over from an earlier reaper that was killed."""
        if self.order["argv"] is None:
            self.take_over()
            return
        # The reaper creates the directory, because the reaper outlives the controller and can remove it.
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        self.write_owner()
        try:
            self.launcher_pid = self.spawn()
        except OSError as error:
            self.report("failed", error=str(error))
            return
        self.write_owner()
        self.report("started", pid=self.launcher_pid, guardian=os.getpid())

    def take_over(self) -> None:
        """Continue to watch a run whose earlier reaper was killed."""
        if self.order.get("launcher"):
            pid, start_ticks = self.order["launcher"]
            self.launcher_pid = self.root_pid = pid
            self.watch(pid, None, start_ticks)
        probe_dir = Path(self.order["boards"])
        # The file may be missing or incomplete if the reaper was killed early.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            identities = json.loads((probe_dir / OWNER).read_bytes())["order"]["known"]
            self.known_processes |= {ProcessIdentity(*identity) for identity in identities}
        if probe_dir.is_dir():
            self.write_owner()

    def write_owner(self) -> None:
        """Write a file with the controller and the reaper. Others end the run only if both are dead."""
        launcher = process_identity(self.launcher_pid) if self.launcher_pid else None
        stored_keys = ("tag", "boards", "keep", "journal", "interrupted", "reserve", "keeper", "folder")
        owner = {
            "machine": this_machine(),
            "controller": self.order.get("controller"),
            "guardian": identity_pair(process_identity(os.getpid())),
            "module": self.module,
            "order": {
                **{name: self.order[name] for name in stored_keys if name in self.order},
                "argv": None,
                "launcher": None if self.is_run_over else identity_pair(launcher) or self.order.get("launcher"),
                "known": sorted([process.pid, process.start_ticks] for process in self.known_processes),
                "over": self.is_run_over,
            },
        }
        try:
            probe_dir = Path(self.order["boards"])
            with SafeDirectory(probe_dir).replace_file(probe_dir / OWNER) as file:
                file.write(json.dumps(owner).encode())
        except OSError as error:
            self.report("trouble", what="probe files", why=f"their owner could not be recorded: {error}")

    def spawn(self) -> int:
        """Start the launcher in its own session and return its pid."""
        with self.directory.open_for_append(Path(self.order["output"])) as output:
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
        # Keep a reference: a Popen that is garbage-collected reaps its process, and the exit code would be lost.
        self.child = child
        return child.pid

    def execute(self, command: dict[str, Any]) -> bool:
        """Execute a command from the controller. Return False if the reaper must exit."""
        if command["do"] == "watch":
            self.watch(command["pid"], command["rank"], command.get("started"))
        elif command["do"] == "end":
            self.end(command["grace_s"])
        return bool(command["do"] != "quit")

    def watch(self, pid: int, rank: int | None, start_ticks: int | None) -> None:
        """Watch the process `pid`, and report its exit when it happens.

        Polling /proc would be too slow, because torchrun reaps a rank within 0.1 s. `rank` is None for the launcher.
        `start_ticks` is None if the start time is unknown.
        """
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self.report("exit", pid=pid, rank=rank, status=None)
            return
        if start_ticks is not None and process_identity(pid) != ProcessIdentity(pid, start_ticks):
            os.close(fd)
            self.report("exit", pid=pid, rank=rank, status=None)
            return
        self.watched[fd] = (pid, rank)
        self.poll.register(fd, select.POLLIN)

    def report_exit(self, fd: int) -> None:
        """Report the exit of the watched process with the pidfd `fd`."""
        self.poll.unregister(fd)
        pid, rank = self.watched.pop(fd)
        status = _exit_status(pid, fd)
        os.close(fd)
        self.reported_exits.add(pid)
        self.report("exit", pid=pid, rank=rank, status=status)

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.reported_exits:
                ranks = dict(self.watched.values())
                self.record("exit", pid=pid, rank=ranks.get(pid), status=os.waitstatus_to_exitcode(wait_status))

    def end(self, grace_s: float) -> list[str]:
        """End every process of the run, then move the probe files. Return a description of each survivor."""
        if self.members():
            time.sleep(0 if self._is_launcher_alive() else _SETTLE_S)
        outlived_launcher = [
            f"{process.pid} {command_of(process.pid)}" for process in self.members() if not self._is_launcher_alive()
        ]
        self._signal(signal.SIGTERM, also_continue=True)
        self._wait_until_gone(grace_s)
        deadline = time.monotonic() + _KILL_LIMIT_S
        while self._signallable() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            self._wait_until_gone(0.2)
        survivors = [self._describe_survivor(process) for process in self.members()]
        self.check_disk()
        self.flush()
        self.move_probe_files(is_run_over=not survivors)
        self.report("ended", outlived=outlived_launcher, left=survivors)
        return survivors

    def _is_launcher_alive(self) -> bool:
        fields = _stat(self.launcher_pid) if self.launcher_pid else None
        return fields is not None and fields[_STATE] != "Z"

    def members(self) -> list[ProcessIdentity]:
        """Return the living processes of the run: descendants, those with its tag, and earlier members."""
        pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
        stats = {pid: fields for pid in pids if (fields := _stat(pid))}
        own_pid = os.getpid()
        living = [
            ProcessIdentity(pid, int(fields[_START_TICKS]))
            for pid, fields in stats.items()
            if fields[_STATE] not in "ZX"
        ]
        roots = {self.root_pid, *(process.pid for process in living if process in self.known_processes)}

        def descends(pid: int) -> bool:
            while pid in stats and pid not in roots:
                pid = int(stats[pid][_PARENT])
            return pid in roots

        members = [
            process
            for process in living
            if process.pid != own_pid
            and (process in self.known_processes or descends(process.pid) or _has_tag(process.pid, self.tag))
        ]
        self.known_processes.update(members)
        return members

    def update_known_processes(self) -> None:
        """Store the list of the run's processes for a reaper that might later replace this one."""
        now_s = time.monotonic()
        if now_s - self.updated_s < _POLL_S:
            return
        self.updated_s, processes_before = now_s, set(self.known_processes)
        # If this reaper is killed, the parent of an orphan no longer identifies it as a process of the run.
        if self.root_pid == os.getpid():
            self.known_processes |= {process for pid in _children() if (process := process_identity(pid))}
        else:
            self.members()
        self.known_processes = {process for process in self.known_processes if process.is_alive()}
        if self.known_processes != processes_before and Path(self.order["boards"]).is_dir():
            self.write_owner()

    def _signallable(self) -> list[ProcessIdentity]:
        return [process for process in self.members() if process not in self.unsignalled]

    def _describe_survivor(self, process: ProcessIdentity) -> str:
        reason = self.unsignalled.get(process, "ignores SIGKILL")
        return f"{process.pid} {command_of(process.pid)} (of {user_of(process.pid)}; {reason})"

    def _signal(self, number: signal.Signals, *, also_continue: bool = False) -> None:
        signalled_pids = []
        for process in self.members():
            error = process.send_signal(number)
            if error is not None:
                self.unsignalled[process] = f"may not be signalled, {error.strerror}"
                continue
            signalled_pids.append(process.pid)
            if also_continue:  # a stopped process receives SIGTERM only when it continues
                process.send_signal(signal.SIGCONT)
        if signalled_pids:
            self.record("signal", signal=number.name, pids=signalled_pids)

    def _wait_until_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._reap()
            if not self.members():
                return
            time.sleep(0.03)

    # Probe files.

    def move_probe_files(self, *, is_run_over: bool = True) -> None:
        """Move the instrumentation's files from memory to the run's directory.

        If some files could not be moved, `is_run_over` is stored for a later reaper. It says whether no process of the
        run is left. The files are removed if no later reaper could move them either.
        """
        if keeper := self.order.get("keeper"):
            ProcessIdentity(*keeper).continue_if_stopped()
        if self.copy_probe_files(remove=True):
            with contextlib.suppress(OSError):
                self._remove_probe_directory()
        else:
            self.is_run_over = is_run_over
            self.write_owner()

    def _remove_probe_directory(self) -> None:
        probe_dir = Path(self.order["boards"])
        for file in (*_probe_files(probe_dir), probe_dir / OWNER):
            file.unlink(missing_ok=True)
        probe_dir.rmdir()

    def copy_probe_files(self, *, remove: bool = False) -> bool:
        """Copy the probe's files to the run's directory (`remove`: move them). Return whether no file is left."""
        probe_dir, target_dir = Path(self.order["boards"]), Path(self.order["keep"])
        failures = []
        for file in _probe_files(probe_dir):
            try:
                if stat.S_ISREG(file.lstat().st_mode):  # the socket of a rank's worker server cannot be copied
                    self._write_with_reserve(
                        target_dir / file.name, functools.partial(self._copy_verified, file, target_dir / file.name)
                    )
            except OSError as error:
                if os.path.lexists(file):  # otherwise its process has just renamed or removed it
                    failures.append(f"{file.name}: {error.strerror or error}")
                continue
            if remove:
                with contextlib.suppress(OSError):
                    file.unlink()
        is_last = remove and (self.order.get("last") or not self.directory.is_in_place(self.attempt))
        if failures:
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            rest = "were removed" if is_last else f"are in {probe_dir}"
            self.report(
                "trouble", what="probe files", why=f"{failures[0]}{more}; files that could not be copied {rest}"
            )
        return not failures or is_last

    def _copy_verified(self, file: Path, target: Path) -> None:
        """Copy a file, and check that the copy is identical. Raise OSError if it is not, or if copying fails."""
        self.directory.make_directory(target.parent)
        with SafeDirectory(file.parent).open_file(file) as original:
            data = original.read()
        self._write_file(target, data)
        with self.directory.open_file(target) as copy:
            if copy.read() != data:
                raise OSError(errno.EIO, "the copy differs from the original")

    # A dead controller.

    def end_abandoned(self) -> None:
        """End the run because its controller is dead, and write a notice."""
        if self.order.get("over"):
            self.move_probe_files()
            return
        self.record("abandoned")
        survivors = self.end(0.5)
        result = f"could not end all of its processes: {'; '.join(survivors)}" if survivors else "ended the run"
        notice = Path(self.order["interrupted"])
        text = f"nsa-harness was killed; its reaper process {result}\n".encode()
        with contextlib.suppress(OSError):  # the journal contains this event as well
            self._write_with_reserve(notice, functools.partial(self._write_file, notice, text))
        with contextlib.suppress(OSError):
            os.unlink(self.order.get("reserve", ""))

    def _write_file(self, path: Path, data: bytes) -> None:
        with self.directory.replace_file(path) as file:
            file.write(data)

    # Records.

    def report(self, event: str, **facts: object) -> None:
        """Record an event, and send it to the journal and the controller at once."""
        self.record(event, **facts)
        self.flush()

    def record(self, event: str, **facts: object) -> None:
        """Record an event, which the next call to `flush` writes."""
        line = (json.dumps({"event": event, "t_ns": time.monotonic_ns(), **facts}) + "\n").encode()
        self.unwritten += line
        self.unsent += line

    def flush(self) -> None:
        """Write the recorded events to the journal and to the controller."""
        if not self.unwritten:
            return
        with contextlib.suppress(OSError):
            self._write_with_reserve(Path(self.order["journal"]), self._append)
        lines, self.unsent = self.unsent, b""
        with contextlib.suppress(OSError):
            os.write(1, lines)

    def _append(self) -> None:
        if self.journal is None:
            with self.directory.open_for_append(Path(self.order["journal"])) as journal:
                self.journal = os.dup(journal.fileno())
        while self.unwritten:
            self.unwritten = self.unwritten[os.write(self.journal, self.unwritten) :]

    def _write_with_reserve(self, place: Path, write: Callable[[], object]) -> None:
        """Call `write`. If the disk is full, free the space reserved at `place` and call `write` again."""
        try:
            write()
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._note_full_disk(f"{error.strerror}: {place}")
            if not shrink_ballast(Path(self.order.get("reserve", ""))):
                raise
            write()

    def check_disk(self) -> None:
        """Record an event if the disk with the run's directory is full."""
        run_dir = self.attempt
        with contextlib.suppress(OSError):
            space = os.statvfs(run_dir)
            free_bytes = space.f_bavail * space.f_frsize
            if free_bytes < _FULL_BYTES:
                self._note_full_disk(f"{free_bytes} bytes are free for {run_dir}")
        reserve = self.order.get("reserve")
        with contextlib.suppress(OSError):
            if reserve and Path(reserve).stat().st_size <= DOCUMENTS_BYTES:
                self._note_full_disk(f"the disk space reserved for the end of the run has been used: {run_dir}")

    def _note_full_disk(self, why: str) -> None:
        """Record that the disk is full, with the reason `why`, but only once."""
        if not self.has_full_disk:
            self.has_full_disk = True
            self.record("full", why=why)


def this_machine() -> list[str]:
    """Return the boot id and the PID namespace. Pids of two processes are comparable only if both are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


def identity_pair(process: ProcessIdentity | None) -> list[int] | None:
    return [process.pid, process.start_ticks] if process else None


def _probe_files(probe_dir: Path) -> list[Path]:
    try:
        return sorted(file for file in probe_dir.iterdir() if file.name != OWNER and not file.is_dir())
    except OSError:
        return []


def _exit_status(pid: int, pidfd: int) -> int | None:
    fields = _stat(pid)
    if fields and fields[_STATE] == "Z":
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:
        return None
    mask, *_, wait_status = _PIDFD_INFO.unpack(answer)
    return os.waitstatus_to_exitcode(wait_status) if mask & _PIDFD_INFO_EXIT else None


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command name, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split() or None
    except OSError:
        return None


def _children() -> list[int]:
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


def read_order() -> bytes:
    """Return the first line of standard input, which says what the reaper must launch."""
    # A buffered read could consume later lines, which the poll loop must see.
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the controller exited before it sent its order")
        line += byte
    return bytes(line)


def ignore_end_signals() -> None:
    """Ignore the signals SIGINT, SIGHUP and SIGTERM, which are meant for the controller."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the run would inherit


def main(kind: type[Reaper] = Reaper) -> None:
    ignore_end_signals()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = json.loads(read_order())
    kind(order).serve()
