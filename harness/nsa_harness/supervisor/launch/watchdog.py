"""A process (the "watchdog") that ends a run whose controller and reaper were both killed.

Each controller (nsa-harness command) has one watchdog, a separate program that uses only the standard library. The
controller sends it the probe directory of each run. When the watchdog's standard input closes, the controller is dead.
The watchdog then waits until each reaper has ended its run, and replaces reapers that were killed. If the watchdog is
killed as well, `end_orphaned_runs` ends the run when nsa-harness starts the next time.

    in    {"boards": "/dev/shm/..."}    a probe directory
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_harness.supervisor.launch.reaper import (
    OWNER,
    ProcessIdentity,
    Reaper,
    identity_pair,
    ignore_end_signals,
    process_identity,
    this_machine,
)

_MODULE = "nsa_harness.supervisor.launch.watchdog"
_ENV_PROGRAM = "_GUARD_PROGRAM"
# The command line contains neither the name nsa-harness nor the path of the package, because users run `pkill -f` with
# both.
_LOADER = (
    f"import importlib, os, sys; root, module = os.environ.pop({_ENV_PROGRAM!r}).rsplit(':', 1);"
    " sys.path.append(root); importlib.import_module(module).main()"
)
_ROOT = Path(__file__).parents[3]  # the directory from which the package is imported
_MAX_REAPERS = 3  # reapers that the watchdog starts per run before it gives up
_POLL_MS = 2000
_SWEEP_S = 15.0
_MIN_AGE_S = 60.0
_MAX_OWNER_BYTES = 1 << 20


def start_program(module: str, *labels: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a module of this package as a process. `labels` are unused arguments that are visible in `ps`."""
    return subprocess.Popen(
        # Not the interpreter of the virtual environment: its path may contain the name of the checkout.
        [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-c", _LOADER, *labels],
        env={**os.environ, _ENV_PROGRAM: f"{_ROOT}:{module}"},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def start_reaper(order: dict[str, Any], module: str = Reaper.module) -> subprocess.Popen[bytes]:
    reaper = start_program(module, "guardian", order["tag"])
    send_order(reaper, order)
    return reaper


def send_order(reaper: Any, order: dict[str, Any]) -> None:
    reaper.stdin.write(json.dumps(order).encode() + b"\n")
    reaper.stdin.flush()


@dataclass(kw_only=True)
class Watchdog:
    """A thread-safe connection to the watchdog process, which is started when it is first needed."""

    _probe_dirs: list[Path] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def guard(self, probe_dir: Path) -> list[int] | None:
        """Tell the watchdog, started if necessary, to guard a run. Return the watchdog's pid and start time."""
        with self._lock:
            self._probe_dirs = [*(directory for directory in self._probe_dirs if directory.exists()), probe_dir]
            if self._process is not None and self._process.poll() is None and self._send([probe_dir]):
                return identity_pair(process_identity(self._process.pid))
            self._process = start_program(_MODULE, "keeper", stdout=subprocess.DEVNULL)
            self._send(self._probe_dirs)
            return identity_pair(process_identity(self._process.pid))

    def _send(self, probe_dirs: list[Path]) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            for probe_dir in probe_dirs:
                self._process.stdin.write(json.dumps({"boards": str(probe_dir)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The two processes that control a run: its controller and its reaper."""

    controller: ProcessIdentity | None
    reaper: ProcessIdentity | None
    module: str
    order: dict[str, Any]  # the order for a reaper that replaces the dead one

    def is_dead(self) -> bool:
        return not any(process is not None and process.is_alive() for process in (self.controller, self.reaper))

    def continue_reaper(self) -> bool:
        """Continue the reaper if it was stopped and its controller is dead. Return whether that was the case."""
        is_abandoned = self.controller is None or not self.controller.is_alive()
        return is_abandoned and self.reaper is not None and self.reaper.continue_if_stopped()

    def replace_reaper(self, *, is_last: bool = False) -> subprocess.Popen[bytes]:
        """Start a new reaper process for a run whose controller is dead.

        This reaper ends a launched run at once. In an observed job, it waits until the job ends. `is_last`: it removes
        the probe files that it cannot move.
        """
        reaper = start_reaper({**self.order, "last": is_last}, self.module)
        assert reaper.stdin is not None
        reaper.stdin.close()
        return reaper


def read_owner(probe_dir: Path) -> Owner | None:
    """Return the processes that control a run, or None if unknown or of another user, boot or PID namespace."""
    try:
        status = probe_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        with open(os.open(probe_dir / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            owner = json.loads(file.read(_MAX_OWNER_BYTES))
        if owner["machine"] != this_machine():
            return None
        controller, reaper = (
            ProcessIdentity(*pair) if pair else None for pair in (owner["controller"], owner["guardian"])
        )
        return Owner(controller=controller, reaper=reaper, module=owner["module"], order=owner["order"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def end_orphaned_runs(probe_dirs: Iterable[Path]) -> None:
    """End the runs whose controller, reaper and watchdog were all killed. This takes at most 15 s.

    `probe_dirs` are all probe directories on this machine. Observed jobs are not ended. If the controller was killed
    and the reaper was stopped, for example by SIGSTOP, the reaper is continued and ends its run.
    """
    ending: list[subprocess.Popen[bytes]] = []
    continued: list[ProcessIdentity] = []
    for probe_dir in probe_dirs:
        owner = read_owner(probe_dir)
        if owner is None:
            _remove_empty(probe_dir)
        elif owner.is_dead():
            reaper = owner.replace_reaper(is_last=True)
            ending += [reaper] if owner.module == Reaper.module else []
        elif owner.continue_reaper() and owner.reaper is not None and owner.module == Reaper.module:
            continued.append(owner.reaper)
    deadline = time.monotonic() + _SWEEP_S
    for reaper in ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.wait(timeout=max(0.1, deadline - time.monotonic()))
    while (pids := [reaper.pid for reaper in continued if reaper.is_alive()]) and time.monotonic() < deadline:
        _wait_for_any(pids)


def _remove_empty(probe_dir: Path) -> None:
    """Remove the directory `probe_dir` if it is empty and more than a minute old."""
    with contextlib.suppress(OSError):  # its reaper was killed directly after creating it
        if time.time() - probe_dir.lstat().st_mtime > _MIN_AGE_S:
            probe_dir.rmdir()


def guard_all(probe_dirs: set[Path]) -> None:
    """Guard the runs in `probe_dirs` until all have ended, replacing each reaper that is killed."""
    reapers: dict[Path, list[subprocess.Popen[bytes]]] = {probe_dir: [] for probe_dir in probe_dirs}
    while reapers:
        reaper_pids = []
        for probe_dir in list(reapers):
            owner, run_reapers = read_owner(probe_dir), reapers[probe_dir]
            reaper = run_reapers[-1].pid if run_reapers and run_reapers[-1].poll() is None else None
            if reaper is None and owner is not None and owner.reaper is not None and owner.reaper.is_alive():
                reaper = owner.reaper.pid
            if owner is None or (reaper is None and len(run_reapers) == _MAX_REAPERS):
                del reapers[probe_dir]
                continue
            if reaper is None:
                run_reapers.append(owner.replace_reaper())
                reaper = run_reapers[-1].pid
            if identity := process_identity(reaper):
                identity.continue_if_stopped()
            reaper_pids.append(reaper)
        _wait_for_any(reaper_pids)


def _wait_for_any(pids: list[int]) -> None:
    """Wait for at most two seconds until one of the processes `pids` exits."""
    poll = select.poll()
    descriptors = []
    for pid in pids:
        with contextlib.suppress(OSError):
            descriptors.append(os.pidfd_open(pid))
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    if descriptors:
        poll.poll(_POLL_MS)
    for descriptor in descriptors:
        os.close(descriptor)


def main() -> None:
    ignore_end_signals()
    guard_all({Path(json.loads(line)["boards"]) for line in sys.stdin.buffer})
