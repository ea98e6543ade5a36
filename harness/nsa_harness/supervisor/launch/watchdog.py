"""The watchdog: ends a run whose controller and reaper were both killed.

Each controller has one watchdog, a program of its own (standard library only), which knows the probe directories of all
runs. When its standard input closes, the controller is dead. The watchdog then waits until each reaper has ended its
run, and replaces reapers that were killed. If the watchdog is killed as well, `sweep` finds the run at the next start.

    in    {"boards": "/dev/shm/..."}
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

from nsa_harness.supervisor.launch.reaper import OWNER, Process, Reaper, outlive_signals, this_machine

_MODULE = "nsa_harness.supervisor.launch.watchdog"
_PROGRAM = "_GUARD_PROGRAM"
# The command line has neither nsa-harness's name nor the package's path: users run `pkill -f` with both.
_LOADER = (
    f"import importlib, os, sys; root, module = os.environ.pop({_PROGRAM!r}).rsplit(':', 1);"
    " sys.path.append(root); importlib.import_module(module).main()"
)
_ROOT = Path(__file__).parents[3]  # the directory from which the package is imported
_MAX_REAPERS = 3  # per run, before the watchdog gives up
_LOOK_MS = 2000
_SWEEP_S = 15.0
_YOUNG_S = 60.0
_MAX_OWNER_BYTES = 1 << 20


def start_program(module: str, *words: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Run a module of this package as a process in its own session. `words` only show in `ps`."""
    return subprocess.Popen(
        # Not the virtual environment's interpreter: it is in the checkout, and its packages are not needed.
        [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-c", _LOADER, *words],
        env={**os.environ, _PROGRAM: f"{_ROOT}:{module}"},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def start_reaper(order: dict[str, Any], module: str = Reaper.module) -> subprocess.Popen[bytes]:
    reaper = start_program(module, "guardian", order["tag"])
    give_order(reaper, order)
    return reaper


def give_order(reaper: Any, order: dict[str, Any]) -> None:
    reaper.stdin.write(json.dumps(order).encode() + b"\n")
    reaper.stdin.flush()


@dataclass(kw_only=True)
class Watchdog:
    """The controller's side of its watchdog process. Thread-safe."""

    _boards: list[Path] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, boards: Path) -> None:
        """Tell the watchdog process about a run that is about to begin; start it, or replace it if it was killed."""
        with self._lock:
            self._boards = [*(known for known in self._boards if known.exists()), boards]
            if self._process is not None and self._process.poll() is None and self._send([boards]):
                return
            self._process = start_program(_MODULE, "keeper", stdout=subprocess.DEVNULL)
            self._send(self._boards)

    def _send(self, boards: list[Path]) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            for directory in boards:
                self._process.stdin.write(json.dumps({"boards": str(directory)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The controller and reaper of a probe directory, as the reaper wrote them."""

    controller: Process | None
    reaper: Process | None
    module: str
    order: dict[str, Any]  # for a reaper that replaces the dead one

    def is_dead(self) -> bool:
        return not any(one is not None and one.lives() for one in (self.controller, self.reaper))

    def replace_reaper(self) -> subprocess.Popen[bytes]:
        """Start a reaper without a controller: it ends the run at once, or waits for the end of an observed job."""
        reaper = start_reaper(self.order, self.module)
        assert reaper.stdin is not None
        reaper.stdin.close()
        return reaper


def owner_of(boards: Path) -> Owner | None:
    """Return the owner, or None if it is unknown, or if this machine cannot tell whether the owner lives."""
    try:
        status = boards.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        with open(os.open(boards / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            owner = json.loads(file.read(_MAX_OWNER_BYTES))
        if owner["machine"] != this_machine():
            return None
        controller, reaper = (Process(*pair) if pair else None for pair in (owner["controller"], owner["guardian"]))
        return Owner(controller=controller, reaper=reaper, module=owner["module"], order=owner["order"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sweep(places: Iterable[Path]) -> None:
    """End the rest of runs that were killed with their controller, reaper and watchdog, and remove their probe files.

    `places`: every probe directory on this machine. Waits for these ends, but not for observed jobs that run on.
    """
    ending = []
    for boards in places:
        owner = owner_of(boards)
        if owner is None:
            _remove_empty(boards)
        elif owner.is_dead():
            reaper = owner.replace_reaper()
            ending += [reaper] if owner.module == Reaper.module else []
    deadline = time.monotonic() + _SWEEP_S
    for reaper in ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.wait(timeout=max(0.1, deadline - time.monotonic()))


def _remove_empty(boards: Path) -> None:
    """Remove a directory whose reaper was killed between two system calls, before it started anything."""
    with contextlib.suppress(OSError):
        if time.time() - boards.lstat().st_mtime > _YOUNG_S:
            boards.rmdir()


def tend(places: set[Path]) -> None:
    """Return once every run was ended by its reaper, or by a reaper that is started here."""
    started: dict[Path, list[subprocess.Popen[bytes]]] = {place: [] for place in places}
    while started:
        awaited = []
        for place in list(started):
            owner, mine = owner_of(place), started[place]
            reaper = mine[-1].pid if mine and mine[-1].poll() is None else None
            if reaper is None and owner is not None and owner.reaper is not None and owner.reaper.lives():
                reaper = owner.reaper.pid
            if owner is None or (reaper is None and len(mine) == _MAX_REAPERS):
                del started[place]
                continue
            if reaper is None:
                mine.append(owner.replace_reaper())
                reaper = mine[-1].pid
            awaited.append(reaper)
        _wait_for_one(awaited)


def _wait_for_one(pids: list[int]) -> None:
    poll = select.poll()
    descriptors = []
    for pid in pids:
        with contextlib.suppress(OSError):
            descriptors.append(os.pidfd_open(pid))
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    if descriptors:
        poll.poll(_LOOK_MS)
    for descriptor in descriptors:
        os.close(descriptor)


def main() -> None:
    outlive_signals()
    tend({Path(json.loads(line)["boards"]) for line in sys.stdin.buffer})
