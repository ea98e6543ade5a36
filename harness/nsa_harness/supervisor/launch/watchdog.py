"""The keeper: no run outlives both its controller and its guardian, whoever killed them.

One a controller, a program of its own (standard library only). It is told where the boards of each run lie. When its
standard input closes, the controller is dead: it then waits until each guardian has done its work, and starts another
one where it died before. What is killed together with the keeper is found by `sweep`, at the next start.

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
# Neither our name nor the place of the package stands in a command line: `pkill -f` with either is how people end us.
_LOADER = (
    f"import importlib, os, sys; root, module = os.environ.pop({_PROGRAM!r}).rsplit(':', 1);"
    " sys.path.append(root); importlib.import_module(module).main()"
)
_ROOT = Path(__file__).parents[3]  # the directory from which the package is imported
_GUARDIANS = 3  # are started at most for a run that none of them ends
_LOOK_MS = 2000
_SWEEP_S = 15.0
_YOUNG_S = 60.0
_MAX_OWNER_BYTES = 1 << 20


def start_program(module: str, *words: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """A module of this package as a process of its own, in a session of its own. `words` are for who reads `ps`."""
    return subprocess.Popen(
        # Not that of a virtual environment: it lies in the checkout, and nothing of it is needed.
        [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-c", _LOADER, *words],
        env={**os.environ, _PROGRAM: f"{_ROOT}:{module}"},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def start_guardian(order: dict[str, Any], module: str = Reaper.module) -> subprocess.Popen[bytes]:
    guardian = start_program(module, "guardian", order["tag"])
    give_order(guardian, order)
    return guardian


def give_order(guardian: Any, order: dict[str, Any]) -> None:
    guardian.stdin.write(json.dumps(order).encode() + b"\n")
    guardian.stdin.flush()


@dataclass(kw_only=True)
class Watchdog:
    """The controller's end of it. May be used by several threads."""

    _boards: list[Path] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, boards: Path) -> None:
        """To be called before the run begins. One that was killed is replaced here."""
        with self._lock:
            self._boards = [*(known for known in self._boards if known.exists()), boards]
            if self._process is not None and self._process.poll() is None and self._told([boards]):
                return
            self._process = start_program(_MODULE, "keeper", stdout=subprocess.DEVNULL)
            self._told(self._boards)

    def _told(self, boards: list[Path]) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            for one in boards:
                self._process.stdin.write(json.dumps({"boards": str(one)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose boards these are, as their guardian wrote it beside them."""

    controller: Process | None
    guardian: Process | None
    module: str
    order: dict[str, Any]  # for a guardian that takes the place of a dead one

    def is_dead(self) -> bool:
        return not any(one is not None and one.lives() for one in (self.controller, self.guardian))

    def revived(self) -> subprocess.Popen[bytes]:
        """A guardian without a controller: it ends the run at once, or waits for the end of somebody else's job."""
        guardian = start_guardian(self.order, self.module)
        assert guardian.stdin is not None
        guardian.stdin.close()
        return guardian


def owner_of(boards: Path) -> Owner | None:
    """None where nobody is known to own them, or where it cannot be said from here whether they live."""
    try:
        status = boards.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        with open(os.open(boards / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            said = json.loads(file.read(_MAX_OWNER_BYTES))
        if said["machine"] != this_machine():
            return None
        controller, guardian = (Process(*one) if one else None for one in (said["controller"], said["guardian"]))
        return Owner(controller=controller, guardian=guardian, module=said["module"], order=said["order"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sweep(places: Iterable[Path]) -> None:
    """Ends what is left of runs of ours that were killed with all who guarded them, and clears their boards.

    `places`: every directory of boards on this machine. Waits, but not for a job of somebody else's that runs on.
    """
    ending = []
    for boards in places:
        owner = owner_of(boards)
        if owner is None:
            _remove_empty(boards)
        elif owner.is_dead():
            guardian = owner.revived()
            ending += [guardian] if owner.module == Reaper.module else []
    deadline = time.monotonic() + _SWEEP_S
    for guardian in ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            guardian.wait(timeout=max(0.1, deadline - time.monotonic()))


def _remove_empty(boards: Path) -> None:
    """Its guardian was killed between two system calls: nothing was started."""
    with contextlib.suppress(OSError):
        if time.time() - boards.lstat().st_mtime > _YOUNG_S:
            boards.rmdir()


def tend(places: set[Path]) -> None:
    """Returns when every run has been ended, by its guardian or by one that was started here."""
    started: dict[Path, list[subprocess.Popen[bytes]]] = {place: [] for place in places}
    while started:
        awaited = []
        for place in list(started):
            owner, mine = owner_of(place), started[place]
            guardian = mine[-1].pid if mine and mine[-1].poll() is None else None
            if guardian is None and owner is not None and owner.guardian is not None and owner.guardian.lives():
                guardian = owner.guardian.pid
            if owner is None or (guardian is None and len(mine) == _GUARDIANS):
                del started[place]
                continue
            if guardian is None:
                mine.append(owner.revived())
                guardian = mine[-1].pid
            awaited.append(guardian)
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
