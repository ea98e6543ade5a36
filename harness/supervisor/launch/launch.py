"""Starts one run under the guardian, and speaks with the guardian until it is over."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from nsa_harness import protocol
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.subject.environment import is_read_by_it
from nsa_harness.subject.files import FOLDER
from nsa_harness.supervisor.launch.machine import device_words
from nsa_harness.supervisor.store.rundir import AttemptDir

_PACKAGE = Path(__file__).resolve().parents[2]
BOOTSTRAP = _PACKAGE / "probe" / "bootstrap"
_GUARDIAN = Path(__file__).resolve().parent / "guardian.py"
# The directory of the program that ships with this harness. Launched by path, so nothing can shadow it.
SUBJECT = (_PACKAGE / FOLDER).resolve()
_MEMORY = Path("/dev/shm")


_given: list[int] = []  # the umask of this process before ours, of one that has set it


def keep_private() -> None:
    """From here on nobody else may read what this process writes, nor what it starts without saying otherwise."""
    before = os.umask(0o077)
    if not _given:
        _given.append(before)


def program_umask() -> int:
    """What a program is launched with, as Popen takes it: the umask that it would have anyway; -1 leaves ours."""
    return _given[0] if _given else -1


def command_line(spec: RunSpec, python: str, attempt_dir: Path | None) -> list[str]:
    """The command that is launched. Without an attempt directory: as one would type it."""
    if is_command(spec):
        return list(spec.program)
    logs = [] if attempt_dir is None else ["--tee=3", f"--log-dir={attempt_dir / 'logs'}"]
    as_module = spec.program[0] == "-m"
    return [
        python,
        "-P",  # the working directory may hold a module that shadows one of torchrun's
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={spec.ranks}",
        *logs,
        *(["-m"] if as_module else []),
        "--",  # torchrun takes the beginning of one of its options for it also behind the program: --n=16
        *spec.program[as_module:],
    ]


def is_command(spec: RunSpec) -> bool:
    """The program is the whole command. torchrun is never given an interpreter, so neither is a fork in its place."""
    forked_alone = spec.launcher is Launcher.FORK and spec.ranks == 1 and spec.program[0] == sys.executable
    return spec.launcher is Launcher.PLAIN or forked_alone


class GuardianProcess(Protocol):
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


@dataclass(kw_only=True)
class Guarded:
    """A launched run: the guardian's process, and what it has said so far."""

    guardian: GuardianProcess
    origin_ns: int
    boards: Path
    tag: str
    order: dict[str, Any]
    probed: bool  # a board is to be expected
    pending: bytes = b""
    lost: bool = False  # the guardian itself is gone

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        """What the guardian has said since, waiting at most `wait_s` for the first word."""
        out = self.guardian.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], wait_s)
        if not ready:
            return []
        chunk = os.read(out.fileno(), 1 << 16)
        if not chunk:
            self.lost = True
            return []
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def tell(self, **command: object) -> None:
        assert self.guardian.stdin is not None
        try:
            self.guardian.stdin.write(json.dumps(command).encode() + b"\n")
            self.guardian.stdin.flush()
        except BrokenPipeError:
            self.lost = True

    def end(self, grace_s: float, limit_s: float = 15.0) -> list[dict[str, Any]]:
        """End every process of the run; returns what was said until then, the "ended" event last."""
        if self.lost:  # somebody killed the guardian: another one, which starts nothing, sweeps by the tag
            self.guardian = start_guardian([str(_GUARDIAN)], {**self.order, "argv": None})
            self.pending, self.lost = b"", False
        self.tell(do="end", grace_s=grace_s)
        said: list[dict[str, Any]] = []
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.lost:
            said += self.events(0.1)
            if said and any(event["event"] == "ended" for event in said):
                break
        self.tell(do="quit")
        self.guardian.wait(timeout=limit_s)
        return said


def launch(
    spec: RunSpec,
    attempt: AttemptDir,
    probe: str,
    devices: Sequence[int] | None = None,
    start: Callable[[dict[str, Any]], GuardianProcess] | None = None,
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
    }
    origin_ns = time.monotonic_ns()
    return Guarded(
        guardian=start(order) if start else start_guardian([str(_GUARDIAN)], order),
        origin_ns=origin_ns,
        boards=boards,
        tag=tag,
        order=order,
        probed=probe != protocol.PROBE_OFF,
    )


def start_guardian(program: Sequence[str], order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A guardian's program in an interpreter of its own, in a session of its own, with its order given."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    give_order(guardian, order)
    return guardian


def give_order(guardian: GuardianProcess, order: dict[str, Any]) -> None:
    assert guardian.stdin is not None
    guardian.stdin.write(json.dumps(order).encode() + b"\n")
    guardian.stdin.flush()


def boards_dir(tag: str) -> Path:
    """A name in memory, or in the temporary directory where there is no /dev/shm to write to. The guardian makes it."""
    home = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return home / f"nsa-harness-{tag}"


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
