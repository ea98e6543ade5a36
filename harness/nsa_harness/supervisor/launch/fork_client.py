"""Launches whose processes are forked from one that has imported torch: for probes, which spend their time importing.

What is forked is the launch as it is, guardian, torchrun's agent and ranks, so that the evidence is the same. Three
things differ and cannot be helped: the ranks share the hash seed of their strings, and so the order of a set; they lie
at the same addresses; and what the program sets before it imports torch comes too late. So the caller confirms under
torchrun what it concludes from forked probes.

Nothing kills the server when its controller dies: it leaves when the control socket closes, whatever closed it. (A
signal at the parent's death would come when the thread ends that has started it.)
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.scenario.env_names import CUDA_PREFIXES
from nsa_harness.supervisor.launch.launcher import (
    SUBJECT,
    Guarded,
    is_command,
    launch,
    shared_environment,
)
from nsa_harness.supervisor.launch.watchdog import give_order
from nsa_harness.supervisor.storage.rundir import AttemptDir, append_line

_SERVER = Path(__file__).resolve().parents[2] / "fork_server" / "server.py"
_ENV_ROOM = "_NSA_HARNESS_ROOM"
# Bytes in a launch's command line and in what its environment has beyond the server's; torchrun adds a few hundred.
_WORDS_BYTES, _VARIABLES_BYTES, _SPARE_BYTES = 32 << 10, 64 << 10, 8 << 10
_READY_S = 120.0  # importing torch on a machine that is busy
_START_S = 30.0  # a fork
_LEAVE_S = 5.0
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Read once, by the interpreter, libc or torch as they start: too late to change after a fork.
_READ_AT_START = (
    "TORCH", "PYTORCH", "ATEN", "OMP", "GOMP", "KMP", "MKL", "OPENBLAS", "NUMEXPR", "GLOO", "NCCL", "CUDA",
    "PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "TMPDIR",
)  # fmt: skip
# Which a fork is told once more, in `settle` of its program.
_READ_AGAIN = ("TORCH_DISTRIBUTED_DEBUG",)
_SET_IN_SOURCE = re.compile(rf"(?:environ|putenv)\b.*[\"']((?:{'|'.join(_READ_AT_START)})\w*)")
# Numpy imports OpenBLAS, which starts a thread for each core unless it is told not to; a fork must find none.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
_NO_SERVER = "launched anew: only a bisection has a fork server"


class NoFork(Exception):
    """Why this launch cannot be forked."""


def can_fork(spec: RunSpec) -> str | None:
    """Why this spec cannot be forked; None: it can, as far as the spec tells."""
    if not sys.platform.startswith("linux"):
        return "forked launches need Linux"
    if spec.device == "cuda" or (spec.device == "any" and any(path.exists() for path in _GPUS)):
        return f"device {spec.device}: CUDA does not survive a fork"
    if spec.backend not in ("gloo", "any"):
        return f"backend {spec.backend} is not gloo"
    # Without a GPU nobody reads what is CUDA's or NCCL's.
    read = [name for name, _ in spec.env if name.startswith(_READ_AT_START) and not name.startswith(CUDA_PREFIXES)]
    too_late = [name for name in read if name not in _READ_AGAIN]
    if too_late:
        return f"{too_late[0]} is read when a program starts"
    if spec.python is not None:
        return f"it runs under {spec.python}, which is not ours"
    if "PYTHON_EXEC" in os.environ:
        return "PYTHON_EXEC names another interpreter"
    return _no_program(spec) or _sets_too_late(spec)


def anew(spec: RunSpec, why: str = _NO_SERVER) -> RunSpec:
    """A spec that asks for a fork, as it is launched without one; says so."""
    launcher = Launcher.PLAIN if is_command(spec) else Launcher.TORCHRUN
    return replace(spec, launcher=launcher, notes=(*spec.notes, why))


def _no_program(spec: RunSpec) -> str | None:
    """Only what Python runs itself: a file, a module, a directory."""
    if spec.launcher is Launcher.PLAIN and (spec.ranks != 1 or spec.program[0] != sys.executable):
        return "a command of the user's own is started as it is"
    file = _file(spec)
    known = file == "-m" or file.endswith(".py") or file == str(SUBJECT)
    return None if known else f"{file} is neither a file of Python's nor a module"


def _file(spec: RunSpec) -> str:
    """The program itself: what follows the interpreter, where there is one."""
    return next((word for word in spec.program if word != sys.executable), "")


def _sets_too_late(spec: RunSpec) -> str | None:
    file = Path(spec.cwd or ".", _file(spec))
    if file.suffix != ".py" or not file.is_file():
        return None
    found = _SET_IN_SOURCE.search(file.read_text(encoding="utf-8", errors="replace"))
    return f"{file.name} sets {found[1]}, which is read when torch is imported" if found else None


@dataclass(kw_only=True)
class _ForkedReaper:
    """A grandchild: when it has left, its end of the pipe is closed."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int:
        assert self.stdin is not None
        assert self.stdout is not None
        deadline = time.monotonic() + (timeout or _START_S)
        while select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(self.stdout.fileno(), 1 << 16):
                self.stdin.close()
                self.stdout.close()
                return 0
        raise subprocess.TimeoutExpired("guardian", timeout or _START_S)


class _Server:
    """One server process. Raises NoFork where it cannot be had."""

    def __init__(self, environment: dict[str, str], cwd: str | None) -> None:
        self._given = {f"{name}={value}" for name, value in environment.items()}
        self._printed = os.memfd_create("printed")
        self._control, theirs = socket.socketpair()
        room = {_ENV_ROOM: " " * _VARIABLES_BYTES}  # the last variable, and the last word: there the server may write
        with theirs, open(os.memfd_create("printed"), "wb") as stdout:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_SERVER), str(theirs.fileno()), " " * _WORDS_BYTES],
                env={**_ONE_THREAD, **environment, **room},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=self._printed,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.modules = frozenset(self._ready())

    def start(self, order: dict[str, Any]) -> _ForkedReaper:
        """A guardian of this server's. Returns when it has started its launcher."""
        self._check_room(order)
        stdin, mouth = os.pipe()
        ear, stdout = os.pipe()
        guardian = _ForkedReaper(stdin=os.fdopen(mouth, "wb"), stdout=os.fdopen(ear, "rb", buffering=0))
        try:
            socket.send_fds(self._control, [b"."], [stdin, stdout])
        except OSError as error:
            raise NoFork(f"the fork server has left: {error}") from None
        finally:
            os.close(stdin)
            os.close(stdout)
        return self._started(guardian, order)

    def _started(self, guardian: _ForkedReaper, order: dict[str, Any]) -> _ForkedReaper:
        try:
            give_order(guardian, order)
        except OSError as error:
            raise NoFork(f"the fork server has left: {error}") from None
        poll = select.poll()
        poll.register(guardian.stdout.fileno() if guardian.stdout else -1, select.POLLIN)
        if not any(event & select.POLLIN for _, event in poll.poll(_START_S * 1000)):
            raise NoFork(f"the fork server has started nothing in {_START_S:.0f} s")
        return guardian

    def close(self) -> None:
        """What it has forked goes on. It leaves when nobody can ask it any more."""
        self._control.close()
        os.close(self._printed)
        try:
            self._process.wait(timeout=_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> list[str]:
        self._control.settimeout(_READY_S)
        with self._control.makefile("rb") as lines:
            try:
                line = lines.readline()
            except TimeoutError:
                line = b""
        answer = json.loads(line) if line else {"refused": self._last_words()}
        if "refused" in answer:
            self.close()
            raise NoFork(f"no fork server: {answer['refused']}")
        return [str(name) for name in answer["modules"]]

    def _last_words(self) -> str:
        lines = os.pread(self._printed, 1 << 16, 0).decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line), f"not ready within {_READY_S:.0f} s")

    def _check_room(self, order: dict[str, Any]) -> None:
        new = [f"{name}={value}" for name, value in order["env"].items()]
        for words, bound, what in (
            (order["argv"], _WORDS_BYTES, "command line"),
            ([entry for entry in new if entry not in self._given], _VARIABLES_BYTES, "environment"),
        ):
            size = sum(len(os.fsencode(word)) + 1 for word in words)
            if size > bound - _SPARE_BYTES:
                raise NoFork(f"its {what} has {size} bytes, and a forked process room for {bound - _SPARE_BYTES}")


class ForkServer:
    """The servers of one bisection, each started when it is first needed: one for each environment that torch reads.

    May be used by several threads. Ends its servers, but nothing that they forked.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[str | None, frozenset[tuple[str, str]]], _Server | NoFork] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for server in self._servers.values():
            if isinstance(server, _Server):
                server.close()

    def settled(self, spec: RunSpec) -> RunSpec:
        """The spec as it will be launched: a fork where that can be, else launched anew, with a note that says why."""
        if spec.launcher is not Launcher.FORK:
            return spec
        why = can_fork(spec)
        if why is None:
            try:
                self._server(spec)
                return spec
            except NoFork as error:
                why = str(error)
        return anew(spec, f"launched anew, not forked: {why}")

    def launch(self, spec: RunSpec, attempt: AttemptDir, probe: str, devices: Sequence[int] | None = None) -> Guarded:
        """As `launch` does. What cannot be forked after all is launched anew, which is noted as trouble."""
        if spec.launcher is not Launcher.FORK:
            return launch(spec, attempt, probe, devices)
        try:
            return launch(spec, attempt, probe, devices, lambda order: self._start(spec, order))
        except NoFork as error:
            append_line(attempt.watch, {"event": "trouble", "what": "fork", "why": f"launched anew: {error}"})
            return launch(spec, attempt, probe, devices)

    def _start(self, spec: RunSpec, order: dict[str, Any]) -> _ForkedReaper:
        return self._server(spec).start({**order, "forks": 0 if is_command(spec) else spec.ranks})

    def _server(self, spec: RunSpec) -> _Server:
        environment = shared_environment(spec)
        key = spec.cwd, frozenset(environment.items())
        with self._lock:
            if key not in self._servers:
                try:
                    self._servers[key] = _Server(environment, spec.cwd)
                except NoFork as why:
                    self._servers[key] = why
                except OSError as error:
                    self._servers[key] = NoFork(f"no fork server: {error}")
        server = self._servers[key]
        if isinstance(server, NoFork):
            raise server
        shadow = _shadowing(spec, server.modules)
        if shadow:
            raise NoFork(f"{shadow} stands where a module of that name is imported already")
        return server


def _shadowing(spec: RunSpec, modules: frozenset[str]) -> Path | None:
    """A file beside the program that a new process would import in place of what the server has imported."""
    file = _file(spec)
    place = Path(spec.cwd or ".", "" if file == "-m" else file)
    home = place if place.is_dir() else place.parent
    ours = (path for path in home.glob("*.py") if path.stem in modules)
    packages = (path.parent for path in home.glob("*/__init__.py") if path.parent.name in modules)
    return next(iter([*ours, *packages]), None)
