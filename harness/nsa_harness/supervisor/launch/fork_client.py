"""Launches runs by forking a process that has already imported torch.

A bisection or a pytest session makes many short launches, most of whose time would be spent in imports. The reaper,
torchrun's agent and the ranks are all forked, so the evidence is the same as for a normal launch. Three things differ.
The ranks share the hash seed of strings, and so the order of sets. Their memory has the same addresses. Settings that
the program makes before it imports torch have no effect. Therefore the caller confirms its conclusions from forked
launches under torchrun.

The fork server exits when its control socket closes, which also happens if its controller is killed. A parent-death
signal would not work: it would already be sent when the thread that started the server ends.
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
from nsa_harness.core.raw_bytes import with_raw_bytes
from nsa_harness.core.scenario.env_names import CUDA_PREFIXES
from nsa_harness.supervisor.launch.launcher import SUBJECT, LaunchedRun, is_plain_command, launch, shared_environment
from nsa_harness.supervisor.launch.watchdog import send_order
from nsa_harness.supervisor.storage.rundir import AttemptDir

_SERVER = Path(__file__).resolve().parents[2] / "fork_server" / "server.py"
_ENV_RESERVE = "_NSA_HARNESS_ROOM"
# Bytes reserved for a launch's command line and for the variables that the server itself does not have. torchrun adds a
# few hundred bytes.
_ARGUMENTS_BYTES, _VARIABLES_BYTES, _SPARE_BYTES = 32 << 10, 64 << 10, 8 << 10
_READY_S = 120.0  # limit for importing torch; on a busy machine it takes long
_START_S = 30.0  # limit for a fork
_EXIT_S = 5.0
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Prefixes of variables that the interpreter, libc or torch read once at their start. A fork cannot change them.
_STARTUP_VARIABLES = (
    "TORCH", "PYTORCH", "ATEN", "OMP", "GOMP", "KMP", "MKL", "OPENBLAS", "NUMEXPR", "GLOO", "NCCL", "CUDA",
    "PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "TMPDIR",
)  # fmt: skip
# Variables that are read in a fork: `Program.prepare` makes torch read the first again, and torch reads the second when
# it records the first collective call.
_RELOADED_VARIABLES = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_BUFFER_SIZE")
_SET_IN_SOURCE = re.compile(rf"(?:environ|putenv)\b.*[\"']((?:{'|'.join(_STARTUP_VARIABLES)})\w*)")
# NumPy loads OpenBLAS, which starts one thread per core by default. A process with threads cannot be forked safely.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
_NO_SERVER = "launched without forking: only a bisection and pytest have a fork server"


class CannotFork(Exception):
    """Raised if a run cannot be launched by forking. The message states the reason."""


def unforkable_reason(spec: RunSpec) -> str | None:
    """Return the reason why a run cannot be launched by forking, or None if nothing in its spec prevents it."""
    if not sys.platform.startswith("linux"):
        return "forked launches need Linux"
    if spec.device == "cuda" or (spec.device == "any" and any(path.exists() for path in _GPUS)):
        return f"device {spec.device}: CUDA does not survive a fork"
    if spec.backend not in ("gloo", "any"):
        return f"backend {spec.backend} is not gloo"
    # Without a GPU no library reads the variables of CUDA and NCCL.
    startup_variables = [
        name for name, _ in spec.env if name.startswith(_STARTUP_VARIABLES) and not name.startswith(CUDA_PREFIXES)
    ]
    too_late = [name for name in startup_variables if name not in _RELOADED_VARIABLES]
    if too_late:
        return f"{too_late[0]} is read when a program starts"
    if spec.python is not None:
        return f"it runs under {spec.python}, and nsa-harness under another interpreter"
    if "PYTHON_EXEC" in os.environ:
        return "PYTHON_EXEC names another interpreter"
    return _unforkable_program(spec) or _late_setting(spec)


def without_fork(spec: RunSpec, reason: str = _NO_SERVER) -> RunSpec:
    """Return a copy of the spec that is launched without forking, with `reason` added to its notes."""
    launcher = Launcher.PLAIN if is_plain_command(spec) else Launcher.TORCHRUN
    return replace(spec, launcher=launcher, notes=(*spec.notes, reason))


def _unforkable_program(spec: RunSpec) -> str | None:
    if spec.launcher is Launcher.PLAIN and (spec.ranks != 1 or spec.program[0] != sys.executable):
        return "a user's own command is started unchanged"
    file = _program_file(spec)
    is_runnable = file == "-m" or file.endswith(".py") or file == str(SUBJECT)
    return None if is_runnable else f"{file} is neither a Python file nor a module"


def _program_file(spec: RunSpec) -> str:
    """Return the path of the program's file, "-m" for a module, or "" if there is none."""
    return next((with_raw_bytes(word) for word in spec.program if word != sys.executable), "")


def _late_setting(spec: RunSpec) -> str | None:
    """Return the reason why a setting in the source code would come too late after forking, or None if none would."""
    file = Path(spec.cwd or ".", _program_file(spec))
    if file.suffix != ".py" or not file.is_file():
        return None
    setting = _SET_IN_SOURCE.search(file.read_text(encoding="utf-8", errors="replace"))
    return f"{file.name} sets {setting[1]}, which is read when torch is imported" if setting else None


@dataclass(kw_only=True)
class _ForkedReaper:
    """A reaper process forked by the server, and therefore not a child of this process."""

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
    """A fork server process. The constructor raises CannotFork if the server does not start."""

    def __init__(self, environment: dict[str, str], cwd: str | None, preload: Sequence[str]) -> None:
        self._variables = {f"{name}={value}" for name, value in environment.items()}
        self._output_fd = os.memfd_create("printed")
        self._control, server_end = socket.socketpair()
        # A forked process overwrites the server's last variable and last argument, see `ProcessTitle`.
        room = {_ENV_RESERVE: " " * _VARIABLES_BYTES}
        with server_end, open(os.memfd_create("printed"), "wb") as stdout:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    str(_SERVER),
                    str(server_end.fileno()),
                    ",".join(preload),
                    " " * _ARGUMENTS_BYTES,
                ],
                env={**_ONE_THREAD, **environment, **room},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=self._output_fd,
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        self.modules = frozenset(self._await_modules())

    def start(self, order: dict[str, Any]) -> _ForkedReaper:
        """Make the server fork a process that runs the reaper. Raise CannotFork if that fails."""
        self._check_size(order)
        stdin, order_pipe = os.pipe()
        event_pipe, stdout = os.pipe()
        reaper = _ForkedReaper(stdin=os.fdopen(order_pipe, "wb"), stdout=os.fdopen(event_pipe, "rb", buffering=0))
        try:
            socket.send_fds(self._control, [b"."], [stdin, stdout])
        except OSError as error:
            raise CannotFork(f"the fork server has exited: {error}") from None
        finally:
            os.close(stdin)
            os.close(stdout)
        return self._await_launcher(reaper, order)

    def _await_launcher(self, reaper: _ForkedReaper, order: dict[str, Any]) -> _ForkedReaper:
        try:
            send_order(reaper, order)
        except OSError as error:
            raise CannotFork(f"the fork server has exited: {error}") from None
        poll = select.poll()
        poll.register(reaper.stdout.fileno() if reaper.stdout else -1, select.POLLIN)
        if not any(event & select.POLLIN for _, event in poll.poll(_START_S * 1000)):
            raise CannotFork(f"the fork server started no process within {_START_S:.0f} s")
        return reaper

    def close(self) -> None:
        """End the server process. The processes that it has forked continue to run."""
        self._control.close()
        os.close(self._output_fd)
        try:
            self._process.wait(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _await_modules(self) -> list[str]:
        self._control.settimeout(_READY_S)
        with self._control.makefile("rb") as lines:
            try:
                line = lines.readline()
            except TimeoutError:
                line = b""
        answer = json.loads(line) if line else {"refused": self._last_output_line()}
        if "refused" in answer:
            self.close()
            raise CannotFork(f"no fork server: {answer['refused']}")
        return [str(name) for name in answer["modules"]]

    def _last_output_line(self) -> str:
        lines = os.pread(self._output_fd, 1 << 16, 0).decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line), f"not ready within {_READY_S:.0f} s")

    def _check_size(self, order: dict[str, Any]) -> None:
        """Raise CannotFork if the command line or the environment variables in `order` are too long."""
        variables = [f"{name}={value}" for name, value in order["env"].items()]
        for entries, reserved_bytes, label in (
            (order["argv"], _ARGUMENTS_BYTES, "command line"),
            ([entry for entry in variables if entry not in self._variables], _VARIABLES_BYTES, "environment"),
        ):
            size, limit = sum(len(os.fsencode(entry)) + 1 for entry in entries), reserved_bytes - _SPARE_BYTES
            if size > limit:
                raise CannotFork(f"its {label} has {size} bytes, and a forked process has room for {limit}")


class ForkServer:
    """The fork servers of one bisection or pytest session, one per environment and working directory.

    This class is thread-safe.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Create no server yet. `preload`: modules that each server imports, in addition to torch."""
        self._preload = tuple(preload)
        self._servers: dict[tuple[str | None, frozenset[tuple[str, str]]], _Server | CannotFork] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for server in self._servers.values():
            if isinstance(server, _Server):
                server.close()

    def with_launcher(self, spec: RunSpec) -> RunSpec:
        """Return the spec, with a normal launcher and a note if it requests forking but cannot be forked."""
        if spec.launcher is not Launcher.FORK:
            return spec
        reason = unforkable_reason(spec)
        if reason is None:
            try:
                self._server(spec)
                return spec
            except CannotFork as error:
                reason = str(error)
        return without_fork(spec, f"launched without forking: {reason}")

    def launch(
        self, spec: RunSpec, attempt: AttemptDir, probe: str, devices: Sequence[int] | None = None
    ) -> LaunchedRun:
        """Launch a run, by forking if its spec requests that and the fork succeeds. A failed fork is recorded."""
        if spec.launcher is not Launcher.FORK:
            return launch(spec, attempt, probe, devices)
        try:
            return launch(spec, attempt, probe, devices, lambda order: self._start(spec, order))
        except CannotFork as error:
            attempt.append_record(
                attempt.watch, {"event": "trouble", "what": "fork", "why": f"launched without forking: {error}"}
            )
            return launch(spec, attempt, probe, devices)

    def _start(self, spec: RunSpec, order: dict[str, Any]) -> _ForkedReaper:
        return self._server(spec).start({**order, "forks": 0 if is_plain_command(spec) else spec.ranks})

    def _server(self, spec: RunSpec) -> _Server:
        environment = shared_environment(spec)
        key = spec.cwd, frozenset(environment.items())
        with self._lock:
            if key not in self._servers:
                try:
                    self._servers[key] = _Server(environment, spec.cwd, self._preload)
                except CannotFork as reason:
                    self._servers[key] = reason
                except OSError as error:
                    self._servers[key] = CannotFork(f"no fork server: {error}")
        server = self._servers[key]
        if isinstance(server, CannotFork):
            raise server
        shadow = _shadowing_file(spec, server.modules)
        if shadow:
            raise CannotFork(f"{shadow} would shadow a module that the fork server has already imported")
        return server


def _shadowing_file(spec: RunSpec, modules: frozenset[str]) -> Path | None:
    """Return a file in the program's directory with the same name as one of `modules`, or None if there is none."""
    file = _program_file(spec)
    place = Path(spec.cwd or ".", "" if file == "-m" else file)
    home = place if place.is_dir() else place.parent
    modules_in_home = (path for path in home.glob("*.py") if path.stem in modules)
    packages = (path.parent for path in home.glob("*/__init__.py") if path.parent.name in modules)
    return next(iter([*modules_in_home, *packages]), None)
