"""Starts one run under the guardian, and speaks with the guardian until it is over."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from nsa_harness import protocol
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.subject.environment import is_read_by_it
from nsa_harness.subject.files import IN_CHECKOUT
from nsa_harness.supervisor.launch.machine import device_words
from nsa_harness.supervisor.launch.reaper import Process, process_of
from nsa_harness.supervisor.launch.umask import program_umask
from nsa_harness.supervisor.launch.watchdog import Watchdog, start_guardian, sweep
from nsa_harness.supervisor.storage.rundir import AttemptDir

_PACKAGE = Path(__file__).resolve().parents[2]
BOOTSTRAP = _PACKAGE / "probe" / "bootstrap"
# The directory of the program that ships with this harness. Launched by path, so nothing can shadow it.
_CHECKED_OUT = _PACKAGE.parents[1] / IN_CHECKOUT[0]
SUBJECT = _CHECKED_OUT if _CHECKED_OUT.is_dir() else _PACKAGE.parent / "nsa_attention"
_MEMORY = Path("/dev/shm")
_BOARDS = "nsa-harness-"  # how each directory of boards is called, before its tag
_PR_SET_CHILD_SUBREAPER = 36
KEEPER = Watchdog()  # of this process, for all its runs


def command_line(spec: RunSpec, python: str, attempt_dir: Path | None) -> list[str]:
    """The command that is launched. Without an attempt directory: as one would type it."""
    if is_command(spec):
        return list(spec.program)
    logs = [] if attempt_dir is None else ["--tee=3", f"--log-dir={attempt_dir / 'logs'}"]
    as_module = spec.program[0] == "-m"
    return [
        spec.python or python,
        "-P",  # the working directory may hold a module that shadows one of torchrun's
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={spec.ranks}",
        *logs,
        *(["-m"] if as_module else []),
        "--",  # torchrun takes the beginning of one of its options for it also behind the program: --n=16
        *([_present_name(spec.program[1])] if as_module else []),
        *spec.program[2 * as_module :],
    ]


def _present_name(module: str) -> str:
    """Return the name to import `module` by. The training package had another name when old specs were stored."""
    return module.replace(f"{_PACKAGE.name}.{IN_CHECKOUT[-1]}.", f"{SUBJECT.name}.", 1)


def is_command(spec: RunSpec) -> bool:
    """The program is the whole command. torchrun is never given an interpreter, so neither is a fork in its place."""
    forked_alone = spec.launcher is Launcher.FORK and spec.ranks == 1 and spec.program[0] == sys.executable
    return spec.launcher is Launcher.PLAIN or forked_alone


class ReaperProcess(Protocol):
    """The guardian's process, as far as it is spoken with."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int: ...


class Watchable(Protocol):
    """What a watch needs of whatever stands between it and the processes."""

    origin_ns: int
    boards: Path
    tag: str
    probed: bool  # a board is to be expected
    lost: bool

    def events(self, wait_s: float) -> list[dict[str, Any]]: ...

    def tell(self, **command: object) -> None: ...


_GUARDIANS = 5  # of one run, each of which was killed: more of them would be no better
_END_S = 60.0  # in which the guardian says that the run is over; it needs four, and a machine may be busy
_LEAVE_S = 15.0


@dataclass(kw_only=True)
class Guarded:
    """A launched run: the guardian's process, and what it has said so far. One that was killed is replaced."""

    guardian: ReaperProcess
    origin_ns: int
    boards: Path
    tag: str
    order: dict[str, Any]
    probed: bool  # a board is to be expected
    pending: bytes = b""
    lost: bool = False  # the guardian is gone, and so were those that took its place
    launcher: Process | None = None
    watches: dict[int, dict[str, Any]] = field(default_factory=dict)  # what another guardian must be told again, by pid
    replaced: int = 0

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        """What the guardian has said since, waiting at most `wait_s` for the first word."""
        out = self.guardian.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], wait_s)
        if not ready:
            return []
        chunk = os.read(out.fileno(), 1 << 16)
        if not chunk:
            self._replace()
            return []
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        said = [json.loads(line) for line in lines]
        for event in said:
            self._hear(event)
        return said

    def tell(self, **command: Any) -> None:
        """A guardian that is gone is noticed, and replaced, by `events`."""
        if command["do"] in ("watch", "adopt"):
            watched = process_of(command["pid"])
            command["started"] = watched.started if watched else None
            self.watches[command["pid"]] = command
        self._send(command)

    def end(self, grace_s: float, limit_s: float = _END_S) -> list[dict[str, Any]]:
        """End every process of the run; returns what was said until then. Without "ended" nobody could end it."""
        return self._ended(limit_s, do="end", grace_s=grace_s)

    def _ended(self, limit_s: float, **command: object) -> list[dict[str, Any]]:
        """Let the guardian finish, and go. One that is killed in it is followed by another, which is told again."""
        said: list[dict[str, Any]] = []
        told: ReaperProcess | None = None
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.lost:
            if told is not self.guardian:
                told = self.guardian
                self.tell(**command)
            said += self.events(0.1)
            if any(event["event"] == "ended" for event in said):
                break
        self.tell(do="quit")
        # What it had to do is done; on a machine that is busy it may take long to leave.
        with suppress(subprocess.TimeoutExpired):
            self.guardian.wait(timeout=_LEAVE_S)
        return said

    def _send(self, command: dict[str, Any]) -> None:
        assert self.guardian.stdin is not None
        with suppress(OSError):
            self.guardian.stdin.write(json.dumps(command).encode() + b"\n")
            self.guardian.stdin.flush()

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher = process_of(event["pid"])
        elif event["event"] == "exit":
            self.watches.pop(event["pid"], None)
            if self.replaced and self.launcher is not None and event["pid"] == self.launcher.pid:
                # Its parent was the killed guardian, and is this process since.
                with suppress(ChildProcessError):
                    os.waitpid(event["pid"], os.WNOHANG)

    def _replace(self) -> None:
        self.replaced += 1
        if self.replaced == _GUARDIANS:
            self.lost = True
            return
        self.pending = b""
        with suppress(subprocess.TimeoutExpired):
            self.guardian.wait(timeout=_LEAVE_S)
        for pipe in (self.guardian.stdin, self.guardian.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.guardian = self._next_guardian()
        for command in list(self.watches.values()):
            self._send(command)

    def _next_guardian(self) -> ReaperProcess:
        if self.launcher is not None:
            order = {**self.order, "argv": None, "launcher": [self.launcher.pid, self.launcher.started]}
            return start_guardian(order)
        # It was killed as it started. If there is a launcher, only its tag is known: the launch begins anew.
        quiet = {**self.order, "argv": None, "journal": os.devnull, "interrupted": os.devnull}
        with suppress(subprocess.TimeoutExpired):
            start_guardian(quiet).communicate(timeout=_LEAVE_S)
        return start_guardian(self.order)


def launch(
    spec: RunSpec,
    attempt: AttemptDir,
    probe: str,
    devices: Sequence[int] | None = None,
    start: Callable[[dict[str, Any]], ReaperProcess] | None = None,
) -> Guarded:
    """Start `spec`; its files go to `attempt`. With `devices` it sees only these GPUs. Returns at once.

    `start` makes the guardian from its order; None: in an interpreter of its own.
    """
    tag = f"{attempt.path.parent.name}-{secrets.token_hex(4)}"
    boards = boards_dir(tag)
    seen = {} if devices is None else {"CUDA_VISIBLE_DEVICES": device_words(devices)}
    order = {
        "argv": command_line(spec, sys.executable, attempt.path.resolve()),
        "env": _environment(spec, attempt, tag, boards, probe) | seen,
        "cwd": spec.cwd,
        "umask": program_umask(),
        "tag": tag,
        "output": str(attempt.output.resolve()),
        "boards": str(boards),
        "keep": str(attempt.boards.resolve()),
        "journal": str(attempt.processes.resolve()),
        "interrupted": str(attempt.abandoned.resolve()),
        "reserve": str(attempt.ballast_file.resolve()),
        "controller": this_process(),
    }
    _adopt_orphans()
    KEEPER.keep(boards)
    origin_ns = time.monotonic_ns()
    return Guarded(
        guardian=start(order) if start else start_guardian(order),
        origin_ns=origin_ns,
        boards=boards,
        tag=tag,
        order=order,
        probed=probe != protocol.PROBE_OFF,
    )


def this_process() -> list[int] | None:
    """This process, as a guardian's order names the controller."""
    controller = process_of(os.getpid())
    return [controller.pid, controller.started] if controller else None


def _adopt_orphans() -> None:
    """A launcher whose guardian was killed becomes a child of this process: nobody else's would know how it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def boards_dir(tag: str) -> Path:
    """A name in memory, or in the temporary directory where there is no /dev/shm to write to. The guardian makes it."""
    return _boards_home() / f"{_BOARDS}{tag}"


def _boards_home() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def sweep_dead_runs() -> None:
    """What earlier commands of ours could not end, as they and all their guards were killed, is ended here."""
    sweep(_boards_home().glob(f"{_BOARDS}*"))


def _environment(spec: RunSpec, attempt: AttemptDir, tag: str, boards: Path, probe: str) -> dict[str, str]:
    declared = dict(spec.env)
    # Where NCCL's watchdog leaves the flight recorder of a rank that it is about to abort; torch appends the rank.
    nccl_dump = {"TORCH_FR_DUMP_TEMP_FILE": str(boards / protocol.NCCL_DUMP.format(rank=""))}
    ours = {
        **probe_environment(declared.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), tag, boards, probe),
        "NSA_OUT_DIR": str(attempt.path.resolve()),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}] ",
        **({protocol.ENV_SOLO: "1"} if is_command(spec) and spec.ranks == 1 else {}),
        **({protocol.ENV_FAULT: json.dumps(asdict(spec.fault))} if spec.fault else {}),
    }
    return {**nccl_dump, **shared_environment(spec), **declared, **ours}


def shared_environment(spec: RunSpec) -> dict[str, str]:
    """What every launch of such a program finds, whatever it declares and wherever its attempt lies."""
    subject = str(SUBJECT) in spec.program
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(protocol.ENV_PREFIX) and not (subject and is_read_by_it(name))
    }
    return {**_unbuffered(spec), **inherited, "PYTHONPATH": _python_path(inherited.get("PYTHONPATH", ""))}


def probe_environment(python_path: str, tag: str, boards: Path, probe: str) -> dict[str, str]:
    """What lets the probe into every Python process that inherits it; `python_path` is what it would have otherwise."""
    return {
        "PYTHONPATH": _python_path(python_path),
        protocol.ENV_RUN: tag,
        protocol.ENV_BOARDS: str(boards),
        protocol.ENV_PROBE: probe,
    }


def _python_path(python_path: str) -> str:
    return os.pathsep.join(filter(None, [str(BOOTSTRAP), python_path]))


def _unbuffered(spec: RunSpec) -> dict[str, str]:
    """What torchrun would set itself, and say so in five lines of warning; a plain launch gets the same."""
    threads = {"OMP_NUM_THREADS": "1"} if spec.ranks > 1 else {}
    return {"PYTHONUNBUFFERED": "1", **threads}
