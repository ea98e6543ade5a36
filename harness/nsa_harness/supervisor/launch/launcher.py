"""Starts a run under a reaper process, and exchanges messages with this reaper until the run ends."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from nsa_harness import protocol
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.raw_bytes import with_raw_bytes
from nsa_harness.subject.environment import is_read_by_program
from nsa_harness.subject.files import IN_CHECKOUT
from nsa_harness.supervisor.launch.machine import visible_devices_value
from nsa_harness.supervisor.launch.reaper import ProcessIdentity, process_identity
from nsa_harness.supervisor.launch.umask import program_umask
from nsa_harness.supervisor.launch.watchdog import Watchdog, end_orphaned_runs, read_owner, start_reaper
from nsa_harness.supervisor.storage.rundir import AttemptDir

_PACKAGE = Path(__file__).resolve().parents[2]
BOOTSTRAP = _PACKAGE / "probe" / "bootstrap"
# The directory of the training program that ships with nsa-harness. It is launched by path, so nothing can shadow it.
_CHECKOUT_SUBJECT = _PACKAGE.parents[1] / IN_CHECKOUT[0]
SUBJECT = _CHECKOUT_SUBJECT if _CHECKOUT_SUBJECT.is_dir() else _PACKAGE.parent / "nsa_attention"
_MEMORY = Path("/dev/shm")
_BYTES_PER_RANK = 2 * protocol.STATUS_FILE_SIZE  # the status file, and the other files of the probe
_DIRECTORY_PREFIX = "nsa-harness-"  # start of a probe directory's name, followed by the run's tag
_PR_SET_CHILD_SUBREAPER = 36
WATCHDOG = Watchdog()  # guards all runs of this process


def command_line(spec: RunSpec, python: str, attempt_dir: Path | None) -> list[str]:
    """Return the command that launches a run. Without `attempt_dir`, for torchrun's logs, it is as a user types it."""
    if is_plain_command(spec):
        return list(spec.program)
    logs = [] if attempt_dir is None else ["--tee=3", f"--log-dir={attempt_dir / 'logs'}"]
    as_module = spec.program[0] == "-m"
    return [
        *torchrun_command(spec, python),
        "--standalone",
        f"--nproc-per-node={spec.ranks}",
        *logs,
        *(["-m"] if as_module else []),
        "--",  # otherwise torchrun would interpret program arguments such as --n=16 as abbreviations of its options
        *([_current_module_name(spec.program[1])] if as_module else []),
        *spec.program[2 * as_module :],
    ]


def torchrun_command(spec: RunSpec, python: str) -> tuple[str, ...]:
    """Return the command of torchrun without its options."""
    # -P: otherwise a module in the working directory could shadow a module of torchrun
    return (spec.python or python, "-P", "-m", "torch.distributed.run")


def _current_module_name(module: str) -> str:
    """Return the current name of a module, given that name or the one from an older version."""
    return module.replace(f"{_PACKAGE.name}.{IN_CHECKOUT[-1]}.", f"{SUBJECT.name}.", 1)


def is_plain_command(spec: RunSpec) -> bool:
    """Return whether the program of the spec is started without torchrun."""
    is_single_fork = spec.launcher is Launcher.FORK and spec.ranks == 1 and spec.program[0] == sys.executable
    return spec.launcher is Launcher.PLAIN or is_single_fork


class ReaperProcess(Protocol):
    """The interface of the reaper process through which a `LaunchedRun` controls its run."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int: ...


class JobProcesses(Protocol):
    """The interface of a launched or observed job's processes, as used by the code that watches the job."""

    origin_ns: int
    probe_dir: Path
    tag: str
    has_probe: bool  # the ranks are expected to write status files
    is_lost: bool

    def events(self, wait_s: float) -> list[dict[str, Any]]: ...

    def send_command(self, **command: object) -> None: ...


_MAX_REAPERS = 5  # per run; if all were killed, a further one would be killed as well
_END_S = 60.0  # limit for ending a run; a reaper needs 4 s, and longer on a busy machine
_LEAVE_S = 15.0  # limit for the exit of a reaper


@dataclass(kw_only=True)
class LaunchedRun:
    """A launched run, which is controlled through its reaper process. A reaper that is killed is replaced."""

    reaper: ReaperProcess
    origin_ns: int
    probe_dir: Path
    tag: str
    order: dict[str, Any]
    has_probe: bool  # the ranks are expected to write status files
    pending: bytes = b""
    is_lost: bool = False  # the reaper and all its replacements were killed
    launcher: ProcessIdentity | None = None
    # pid -> the command to watch this process, which a new reaper must also get
    watch_commands: dict[int, dict[str, Any]] = field(default_factory=dict)
    replacements: int = 0
    reaper_process: ProcessIdentity | None = None

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the new messages from the reaper, after waiting at most `wait_s` seconds for the first one."""
        out = self.reaper.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], wait_s)
        if not ready:
            self.continue_reaper()
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

    def continue_reaper(self) -> None:
        """Continue the reaper if a signal, such as SIGSTOP, has stopped it."""
        if self.reaper_process is None or not self.reaper_process.is_alive():
            owner = read_owner(self.probe_dir)
            self.reaper_process = owner.reaper if owner else None
        if self.reaper_process is not None:
            self.reaper_process.continue_if_stopped()

    def send_command(self, **command: Any) -> None:
        """Send a command to the reaper.

        `command` has the key "do" and the arguments of the command. If the reaper is dead, the next call of `events`
        replaces it, and commands to watch a process are sent again.
        """
        if command["do"] in ("watch", "adopt"):
            identity = process_identity(command["pid"])
            command["started"] = identity.start_ticks if identity else None
            self.watch_commands[command["pid"]] = command
        self._send(command)

    def end(self, grace_s: float, limit_s: float = _END_S) -> list[dict[str, Any]]:
        """End every process of the run, and return the messages from the reaper.

        The processes receive SIGTERM, and after `grace_s` seconds SIGKILL. If there is no "ended" message, they could
        not be ended within `limit_s` seconds.
        """
        return self._finish(limit_s, do="end", grace_s=grace_s)

    def _finish(self, limit_s: float, **command: object) -> list[dict[str, Any]]:
        """Send a last command to the reaper, wait until it has exited, and return its messages."""
        messages: list[dict[str, Any]] = []
        commanded_reaper: ReaperProcess | None = None
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.is_lost:
            if commanded_reaper is not self.reaper:
                commanded_reaper = self.reaper
                self.send_command(**command)
            messages += self.events(0.1)
            if any(event["event"] == "ended" for event in messages):
                break
        self.send_command(do="quit")
        # The reaper has nothing left to do, but on a busy machine its exit may take a while.
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                self.reaper.wait(timeout=1.0)
                break
            self.continue_reaper()
        return messages

    def _send(self, command: dict[str, Any]) -> None:
        assert self.reaper.stdin is not None
        with suppress(OSError):
            self.reaper.stdin.write(json.dumps(command).encode() + b"\n")
            self.reaper.stdin.flush()

    def _receive(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher = process_identity(event["pid"])
        elif event["event"] == "exit":
            self.watch_commands.pop(event["pid"], None)
            if self.replacements and self.launcher is not None and event["pid"] == self.launcher.pid:
                # After the first reaper was killed, this process became the launcher's parent and must reap it.
                with suppress(ChildProcessError):
                    os.waitpid(event["pid"], os.WNOHANG)

    def _replace(self) -> None:
        self.replacements += 1
        if self.replacements == _MAX_REAPERS:
            self.is_lost = True
            return
        self.pending = b""
        with suppress(subprocess.TimeoutExpired):
            self.reaper.wait(timeout=_LEAVE_S)
        for pipe in (self.reaper.stdin, self.reaper.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.reaper = self._next_reaper()
        for command in list(self.watch_commands.values()):
            self._send(command)

    def _next_reaper(self) -> ReaperProcess:
        if self.launcher is not None:
            order = {**self.order, "argv": None, "launcher": [self.launcher.pid, self.launcher.start_ticks]}
            return start_reaper(order)
        # The reaper was killed during its start. It may have started a launcher, which can be found only by its tag.
        # End such a launcher with a temporary reaper, then launch again.
        cleanup_order = {**self.order, "argv": None, "journal": os.devnull, "interrupted": os.devnull}
        with suppress(subprocess.TimeoutExpired):
            start_reaper(cleanup_order).communicate(timeout=_LEAVE_S)
        return start_reaper(self.order)


def launch(
    spec: RunSpec,
    attempt: AttemptDir,
    probe: str,
    devices: Sequence[int] | None = None,
    start: Callable[[dict[str, Any]], ReaperProcess] | None = None,
) -> LaunchedRun:
    """Start a run, and return without waiting for it.

    Its files are stored in `attempt`. `probe` is a mode of the probe. `devices` are the numbers of the GPUs that the
    run may use (default: all). `start` starts a reaper from its order; by default the reaper is a new process.
    """
    tag = f"{attempt.path.parent.name}-{secrets.token_hex(4)}"
    probe_dir = probe_directory(tag, spec.ranks)
    note_probe_directory(attempt, probe_dir)
    visible_devices = {} if devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices_value(devices)}
    order = {
        "argv": list(map(with_raw_bytes, command_line(spec, sys.executable, attempt.path.resolve()))),
        "env": _environment(spec, attempt, tag, probe_dir, probe) | visible_devices,
        "cwd": with_raw_bytes(spec.cwd) if spec.cwd else spec.cwd,
        "umask": program_umask(),
        "tag": tag,
        "output": str(attempt.output.resolve()),
        "boards": str(probe_dir),
        "keep": str(attempt.probe_files.resolve()),
        "journal": str(attempt.processes.resolve()),
        "interrupted": str(attempt.interruption_note.resolve()),
        "reserve": str(attempt.ballast_file.resolve()),
        "controller": this_process(),
        "keeper": WATCHDOG.guard(probe_dir),
        "folder": attempt.directory.pin(attempt.path),
    }
    _adopt_orphans()
    origin_ns = time.monotonic_ns()
    return LaunchedRun(
        reaper=start(order) if start else start_reaper(order),
        origin_ns=origin_ns,
        probe_dir=probe_dir,
        tag=tag,
        order=order,
        has_probe=probe != protocol.PROBE_OFF,
    )


def this_process() -> list[int] | None:
    """Return the pid and start time of this process, or None if the start time is unknown."""
    controller = process_identity(os.getpid())
    return [controller.pid, controller.start_ticks] if controller else None


def _adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (a "subreaper")."""
    # If the reaper is killed, this process then gets the exit status of the launcher.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def probe_directory(tag: str, ranks: int = 1) -> Path:
    """Return the path of the directory in which a run's ranks write their status files.

    `tag` identifies the run. The reaper creates the directory. It is in /dev/shm, or in the temporary directory if
    /dev/shm is not writable or has too little space for this number of ranks.
    """
    return _probe_root(ranks) / f"{_DIRECTORY_PREFIX}{tag}"


def _probe_root(ranks: int) -> Path:
    has_space = os.access(_MEMORY, os.W_OK) and _free_bytes(_MEMORY) >= ranks * _BYTES_PER_RANK
    return _MEMORY if has_space else Path(tempfile.gettempdir())


def _free_bytes(directory: Path) -> int:
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def note_probe_directory(attempt: AttemptDir, probe_dir: Path) -> None:
    """Record in the journal of the attempt if the status files are on a disk because /dev/shm has too little space."""
    if probe_dir.parent != _MEMORY and os.access(_MEMORY, os.W_OK):
        free_kb = _free_bytes(_MEMORY) // 1000
        reason = f"{_MEMORY} has only {free_kb} kB of free space, so they were written to {probe_dir.parent}"
        attempt.append_record(attempt.watch, {"event": "trouble", "what": "status files", "why": reason, "rank": None})


def end_dead_runs() -> None:
    """End the runs that were left behind when earlier nsa-harness commands were killed."""
    end_orphaned_runs(probe_directories(""))


def probe_directories(run_id: str) -> Iterator[Path]:
    """Yield the probe directories of a run, one for each attempt in progress. `run_id`: "" stands for every run."""
    for root in {_MEMORY, Path(tempfile.gettempdir())}:
        yield from root.glob(f"{_DIRECTORY_PREFIX}{run_id}*")


def _environment(spec: RunSpec, attempt: AttemptDir, tag: str, probe_dir: Path, probe: str) -> dict[str, str]:
    spec_environment = dict(spec.env)
    # NCCL's watchdog writes a rank's flight recorder to this file before it aborts the rank. torch appends the rank.
    nccl_dump = {"TORCH_FR_DUMP_TEMP_FILE": str(probe_dir / protocol.NCCL_DUMP.format(rank=""))}
    harness_environment = {
        **probe_environment(
            spec_environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")),
            tag,
            probe_dir,
            probe,
            reads_values=attempt.reads_values,
        ),
        "NSA_OUT_DIR": str(attempt.path.resolve()),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}] ",
        **({protocol.ENV_SOLO: "1"} if is_plain_command(spec) and spec.ranks == 1 else {}),
        **({protocol.ENV_FAULT: json.dumps(asdict(spec.fault))} if spec.fault else {}),
    }
    return {**nccl_dump, **shared_environment(spec), **spec_environment, **harness_environment}


def shared_environment(spec: RunSpec) -> dict[str, str]:
    """Return the environment variables that every launch of the program in `spec` receives."""
    runs_subject = str(SUBJECT) in spec.program
    inherited_variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(protocol.ENV_PREFIX) and not (runs_subject and is_read_by_program(name))
    }
    return {
        **_torchrun_defaults(spec),
        **inherited_variables,
        "PYTHONPATH": _python_path(inherited_variables.get("PYTHONPATH", "")),
    }


def probe_environment(
    python_path: str, tag: str, probe_dir: Path, probe: str, *, reads_values: bool = True
) -> dict[str, str]:
    """Return the environment variables that start the instrumentation in each Python process.

    `python_path` is the user's PYTHONPATH, `tag` identifies the run, and `probe` is a mode of the probe. If
    `reads_values` is False, the instrumentation never reads values of the program's variables.
    """
    return {
        "PYTHONPATH": _python_path(python_path),
        protocol.ENV_RUN: tag,
        protocol.ENV_PROBE_DIRECTORY: str(probe_dir),
        protocol.ENV_PROBE: probe,
        **({} if reads_values else {protocol.ENV_NO_VALUES: "1"}),
        # To measure coverage, also where it is off by default.
        **{name: os.environ[name] for name in (protocol.ENV_COVERAGE,) if name in os.environ},
    }


def _python_path(python_path: str) -> str:
    return os.pathsep.join(filter(None, [str(BOOTSTRAP), python_path]))


def _torchrun_defaults(spec: RunSpec) -> dict[str, str]:
    """Return the environment variables that torchrun sets by default."""
    # Setting them in advance also avoids torchrun's five lines of warning.
    threads = {"OMP_NUM_THREADS": "1"} if spec.ranks > 1 else {}
    return {"PYTHONUNBUFFERED": "1", **threads}
