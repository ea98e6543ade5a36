"""Start one run under a reaper process, and exchange messages with the reaper until the run has ended."""

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
from nsa_harness.supervisor.launch.watchdog import Watchdog, end_orphaned_runs, start_reaper
from nsa_harness.supervisor.storage.rundir import AttemptDir

_PACKAGE = Path(__file__).resolve().parents[2]
BOOTSTRAP = _PACKAGE / "probe" / "bootstrap"
# The directory of the program that ships with this harness. Launched by path, so nothing can shadow it.
_CHECKED_OUT = _PACKAGE.parents[1] / IN_CHECKOUT[0]
SUBJECT = _CHECKED_OUT if _CHECKED_OUT.is_dir() else _PACKAGE.parent / "nsa_attention"
_MEMORY = Path("/dev/shm")
_BOARDS = "nsa-harness-"  # prefix of each probe directory's name, before the run's tag
_PR_SET_CHILD_SUBREAPER = 36
WATCHDOG = Watchdog()  # one for all runs of this process


def command_line(spec: RunSpec, python: str, attempt_dir: Path | None) -> list[str]:
    """Return the command to launch. Without an attempt directory, return it as a user would type it."""
    if is_command(spec):
        return list(spec.program)
    logs = [] if attempt_dir is None else ["--tee=3", f"--log-dir={attempt_dir / 'logs'}"]
    as_module = spec.program[0] == "-m"
    return [
        spec.python or python,
        "-P",  # a module in the working directory may shadow one of torchrun's
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={spec.ranks}",
        *logs,
        *(["-m"] if as_module else []),
        "--",  # torchrun also reads abbreviations of its own options after the program: --n=16
        *([_present_name(spec.program[1])] if as_module else []),
        *spec.program[2 * as_module :],
    ]


def _present_name(module: str) -> str:
    """Return the name to import `module` by. The training package had another name when old specs were stored."""
    return module.replace(f"{_PACKAGE.name}.{IN_CHECKOUT[-1]}.", f"{SUBJECT.name}.", 1)


def is_command(spec: RunSpec) -> bool:
    """Whether the program is the whole command, without torchrun. A fork of several ranks stands in for torchrun."""
    forked_alone = spec.launcher is Launcher.FORK and spec.ranks == 1 and spec.program[0] == sys.executable
    return spec.launcher is Launcher.PLAIN or forked_alone


class ReaperProcess(Protocol):
    """The parts of a reaper's process that `Guarded` uses."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int: ...


class Watchable(Protocol):
    """The interface of `Watch` to the job's processes."""

    origin_ns: int
    boards: Path
    tag: str
    probed: bool  # the ranks are expected to write status files
    lost: bool

    def events(self, wait_s: float) -> list[dict[str, Any]]: ...

    def tell(self, **command: object) -> None: ...


_MAX_REAPERS = 5  # per run; if all are killed, a further one would be, too
_END_S = 60.0  # limit for the end of a run; a reaper needs 4 s, longer on a busy machine
_LEAVE_S = 15.0


@dataclass(kw_only=True)
class Guarded:
    """A launched run: its reaper process, and the reaper's messages so far. A killed reaper is replaced."""

    reaper: ReaperProcess
    origin_ns: int
    boards: Path
    tag: str
    order: dict[str, Any]
    probed: bool  # the ranks are expected to write status files
    pending: bytes = b""
    lost: bool = False  # the reaper and all its replacements were killed
    launcher: Process | None = None
    watches: dict[int, dict[str, Any]] = field(default_factory=dict)  # pid -> command that a new reaper must get too
    replaced: int = 0

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the reaper's new messages. Waits at most `wait_s` for the first one."""
        out = self.reaper.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], wait_s)
        if not ready:
            return []
        chunk = os.read(out.fileno(), 1 << 16)
        if not chunk:
            self._replace()
            return []
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            self._receive(event)
        return events

    def tell(self, **command: Any) -> None:
        """Send a command to the reaper. If the reaper is gone, `events` notices and replaces it."""
        if command["do"] in ("watch", "adopt"):
            watched = process_of(command["pid"])
            command["started"] = watched.started if watched else None
            self.watches[command["pid"]] = command
        self._send(command)

    def end(self, grace_s: float, limit_s: float = _END_S) -> list[dict[str, Any]]:
        """End every process of the run and return the messages until then; without "ended" if that failed."""
        return self._finish(limit_s, do="end", grace_s=grace_s)

    def _finish(self, limit_s: float, **command: object) -> list[dict[str, Any]]:
        """Have the reaper carry out `command` and exit; return its messages. If it is killed, a new reaper does so."""
        messages: list[dict[str, Any]] = []
        informed: ReaperProcess | None = None
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.lost:
            if informed is not self.reaper:
                informed = self.reaper
                self.tell(**command)
            messages += self.events(0.1)
            if any(event["event"] == "ended" for event in messages):
                break
        self.tell(do="quit")
        # The reaper's work is done. On a busy machine its exit may take long.
        with suppress(subprocess.TimeoutExpired):
            self.reaper.wait(timeout=_LEAVE_S)
        return messages

    def _send(self, command: dict[str, Any]) -> None:
        assert self.reaper.stdin is not None
        with suppress(OSError):
            self.reaper.stdin.write(json.dumps(command).encode() + b"\n")
            self.reaper.stdin.flush()

    def _receive(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher = process_of(event["pid"])
        elif event["event"] == "exit":
            self.watches.pop(event["pid"], None)
            if self.replaced and self.launcher is not None and event["pid"] == self.launcher.pid:
                # This process has been its parent since the reaper was killed.
                with suppress(ChildProcessError):
                    os.waitpid(event["pid"], os.WNOHANG)

    def _replace(self) -> None:
        self.replaced += 1
        if self.replaced == _MAX_REAPERS:
            self.lost = True
            return
        self.pending = b""
        with suppress(subprocess.TimeoutExpired):
            self.reaper.wait(timeout=_LEAVE_S)
        for pipe in (self.reaper.stdin, self.reaper.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.reaper = self._next_reaper()
        for command in list(self.watches.values()):
            self._send(command)

    def _next_reaper(self) -> ReaperProcess:
        if self.launcher is not None:
            order = {**self.order, "argv": None, "launcher": [self.launcher.pid, self.launcher.started]}
            return start_reaper(order)
        # The reaper was killed during its start. If it started a launcher, only the tag is known: launch again.
        quiet = {**self.order, "argv": None, "journal": os.devnull, "interrupted": os.devnull}
        with suppress(subprocess.TimeoutExpired):
            start_reaper(quiet).communicate(timeout=_LEAVE_S)
        return start_reaper(self.order)


def launch(
    spec: RunSpec,
    attempt: AttemptDir,
    probe: str,
    devices: Sequence[int] | None = None,
    start: Callable[[dict[str, Any]], ReaperProcess] | None = None,
) -> Guarded:
    """Start `spec` with its files in `attempt` and return at once. With `devices`, it sees only these GPUs.

    `start` starts a reaper from its order; by default in a new interpreter.
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
    WATCHDOG.guard(boards)
    origin_ns = time.monotonic_ns()
    return Guarded(
        reaper=start(order) if start else start_reaper(order),
        origin_ns=origin_ns,
        boards=boards,
        tag=tag,
        order=order,
        probed=probe != protocol.PROBE_OFF,
    )


def this_process() -> list[int] | None:
    """Return this process in the form in which a reaper's order names the controller."""
    controller = process_of(os.getpid())
    return [controller.pid, controller.started] if controller else None


def _adopt_orphans() -> None:
    """Make this process the parent of a launcher if its reaper is killed, so that the exit status is not lost."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def boards_dir(tag: str) -> Path:
    """Return the run's probe directory, which the reaper makes: in /dev/shm, else in the temporary directory."""
    return _boards_home() / f"{_BOARDS}{tag}"


def _boards_home() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def sweep_dead_runs() -> None:
    """End the runs of earlier commands that were killed together with their reapers and watchdogs."""
    end_orphaned_runs(_boards_home().glob(f"{_BOARDS}*"))


def _environment(spec: RunSpec, attempt: AttemptDir, tag: str, boards: Path, probe: str) -> dict[str, str]:
    declared = dict(spec.env)
    # Here NCCL's watchdog writes the flight recorder of a rank before it aborts it. torch appends the rank.
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
    """Return the environment that is the same for every launch of the spec's program."""
    subject = str(SUBJECT) in spec.program
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(protocol.ENV_PREFIX) and not (subject and is_read_by_it(name))
    }
    return {**_unbuffered(spec), **inherited, "PYTHONPATH": _python_path(inherited.get("PYTHONPATH", ""))}


def probe_environment(python_path: str, tag: str, boards: Path, probe: str) -> dict[str, str]:
    """Return the variables that start the probe in each Python process. `python_path` is the user's PYTHONPATH."""
    return {
        "PYTHONPATH": _python_path(python_path),
        protocol.ENV_RUN: tag,
        protocol.ENV_PROBE_DIRECTORY: str(boards),
        protocol.ENV_PROBE: probe,
    }


def _python_path(python_path: str) -> str:
    return os.pathsep.join(filter(None, [str(BOOTSTRAP), python_path]))


def _unbuffered(spec: RunSpec) -> dict[str, str]:
    """Return variables that torchrun would set with five lines of warning. A plain launch gets them, too."""
    threads = {"OMP_NUM_THREADS": "1"} if spec.ranks > 1 else {}
    return {"PYTHONUNBUFFERED": "1", **threads}
