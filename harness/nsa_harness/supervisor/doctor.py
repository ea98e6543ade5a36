"""`doctor`: measures this machine. Never raises: a fact that cannot be measured is returned with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from nsa_harness import protocol
from nsa_harness.core.doctor import (
    ClockFacts,
    CoreFacts,
    GpuFacts,
    InterfaceFacts,
    LeftOver,
    LimitFacts,
    MachineCheckFacts,
    MemoryFacts,
    ModuleFacts,
    NameFacts,
    PortFacts,
    PySpyFacts,
    PythonFacts,
    SlurmFacts,
    SpaceFacts,
    TorchFacts,
    UnknownFacts,
)
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.node import ROOT, control_groups, limit_bytes, number_in, used_bytes
from nsa_harness.supervisor.capture.stacks import py_spy, py_spy_path
from nsa_harness.supervisor.capture.syscalls import kernel_fields, kernel_text
from nsa_harness.supervisor.launch.launcher import BOOTSTRAP
from nsa_harness.supervisor.launch.machine import visible_gpus

_PROC = Path("/proc")
_PTRACE_SCOPE = _PROC / "sys/kernel/yama/ptrace_scope"
_PORT_RANGE = _PROC / "sys/net/ipv4/ip_local_port_range"
_MEMORY = Path("/dev/shm")
_PACKAGE = Path(__file__).resolve().parents[1]
_BOARDS = "nsa-harness-"  # prefix of a directory of status files
_LOOPBACK = "127.0.0.1"
_SLURM = ("sinfo", "scontrol", "srun")
_COMMAND_LIMIT_S = 5.0
_IMPORT_LIMIT_S = 90.0  # torch from a cold network file system
_YOUNG_S = 60.0  # a run that begins or ends has a directory and no process for a moment
_CLOCK_READINGS = 2000  # on each core

Resolver = Callable[[str], Sequence[str]]


def measure(working_dir: Path, environ: Mapping[str, str]) -> MachineCheckFacts:
    """Measure everything at once, in some seconds. The slow measurements are child processes."""
    clock = WallWatch()
    # The directory itself, or the one in which it would be made.
    reports = next(place for place in (working_dir / "reports", working_dir, *working_dir.parents) if place.is_dir())
    with ThreadPoolExecutor(max_workers=4) as pool:
        python = pool.submit(python_facts)
        torch = pool.submit(torch_facts)
        spy = pool.submit(py_spy_facts)
        packages = (("triton", "triton"), ("flash_attn", "flash-attn"), ("pynvml", "nvidia-ml-py"))
        modules = [pool.submit(module_facts, *names) for names in packages]
        name = pool.submit(name_facts)
        triton, flash_attn, nvml = (module.result() for module in modules)
        return MachineCheckFacts(
            python=python.result(),
            torch=torch.result(),
            gpu=gpu_facts(environ),
            nvml=nvml,
            triton=triton,
            flash_attn=flash_attn,
            py_spy=spy.result(),
            shared_memory=space_facts(_MEMORY),
            temporary=space_facts(Path(tempfile.gettempdir())),
            reports=space_facts(reports),
            limits=limit_facts(),
            memory=memory_facts(),
            cores=core_facts(),
            name=name.result(),
            interface=InterfaceFacts(wanted=environ.get("GLOO_SOCKET_IFNAME"), present=_interfaces()),
            ports=port_facts(),
            slurm=slurm_facts(environ),
            left_over=left_over((_MEMORY, Path(tempfile.gettempdir()))),
            clock=clock_facts(clock),
        )


def gpu_facts(environ: Mapping[str, str]) -> GpuFacts:
    """Return the GPUs that nvidia-smi lists, with the driver."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return GpuFacts(installed=None, visible=(), driver=None, chosen=chosen, trouble=None)
    answer, trouble = _output_of(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", environ=environ
    )
    rows = [line.rpartition(",") for line in answer.splitlines() if "," in line]
    names = tuple(name.strip() for name, _, _ in rows)
    return GpuFacts(
        installed=names,
        visible=visible_gpus(chosen, names),
        driver=rows[0][2].strip() if rows else None,
        chosen=chosen,
        trouble=trouble,
    )


def space_facts(path: Path) -> SpaceFacts:
    """Write a file to the directory and remove it."""
    trouble, size, free = None, 0, 0
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"nsa-harness")
            file.flush()
        status = os.statvfs(path)
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    except OSError as error:
        trouble = f"{error.strerror or error}"
    return SpaceFacts(path=str(path), trouble=trouble, size_bytes=size, free_bytes=free)


def name_facts(name: Callable[[], str] = socket.getfqdn, resolve: Resolver | None = None) -> NameFacts:
    """Return the name that torchrun uses for this machine, and which of its addresses can be bound here."""
    begun = time.monotonic()
    hostname = name()
    addresses: tuple[str, ...] = ()
    trouble = None
    try:
        addresses = tuple((resolve or _resolved)(hostname))
    except OSError as error:
        trouble = f"cannot be resolved ({error.strerror or error})"
    took_s = time.monotonic() - begun
    bindable = tuple(address for address in addresses if _bind_trouble(address) is None)
    return NameFacts(hostname=hostname, addresses=addresses, bindable=bindable, took_s=took_s, trouble=trouble)


def port_facts(address: str = _LOOPBACK, ranges: Path = _PORT_RANGE) -> PortFacts:
    """Bind a free port and connect to it, like rendezvous does."""
    first, last = 32768, 60999  # the kernel's default
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, ranges.read_text().split())
    return PortFacts(trouble=_bind_trouble(address, reach=True), first=first, last=last)


class WallWatch:
    """Compares the wall clock with the monotonic clock, starting now."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.wall_s, self.monotonic_ns = wall_s, monotonic_ns
        self._wall_s, self._monotonic_ns = wall_s(), monotonic_ns()

    def passed_s(self) -> tuple[float, float]:
        """Return the time since the start by the monotonic clock, and the surplus of the wall clock."""
        over_s = (self.monotonic_ns() - self._monotonic_ns) / 1e9
        return over_s, self.wall_s() - self._wall_s - over_s


def clock_facts(watched: WallWatch) -> ClockFacts:
    backwards = _readings_back(watched.monotonic_ns)
    over_s, drift_s = watched.passed_s()
    newest_s = max(path.stat().st_mtime for path in _PACKAGE.rglob("*.py"))
    behind_s = max(0.0, newest_s - watched.wall_s())
    return ClockFacts(over_s=over_s, backwards=backwards, drift_s=drift_s, behind_s=behind_s)


def slurm_facts(environ: Mapping[str, str]) -> SlurmFacts:
    path = environ.get("PATH")
    absent = tuple(name for name in _SLURM if shutil.which(name, path=path) is None)
    job = environ.get("SLURM_JOB_ID")
    if "sinfo" in absent:
        return SlurmFacts(version=None, absent=absent, job=job, trouble=None)
    version, _ = _output_of("sinfo", "--version", environ=environ)
    _, trouble = _output_of("sinfo", "--noheader", environ=environ)
    return SlurmFacts(version=version.strip() or None, absent=absent, job=job, trouble=trouble)


def left_over(homes: Iterable[Path], now_s: float | None = None) -> tuple[LeftOver, ...]:
    """Return the directories of status files of this user, not brand-new, whose run has no process any more."""
    now_s = time.time() if now_s is None else now_s
    homes = dict.fromkeys(homes)
    old = [path for home in homes for path in sorted(home.glob(f"{_BOARDS}*")) if _is_own_and_old(path, now_s)]
    if not old:
        return ()
    living = {procfs.environment(pid).get(protocol.ENV_RUN) for pid in psutil.pids()}
    dead = [path for path in old if path.name.removeprefix(_BOARDS) not in living]
    return tuple(LeftOver(path=str(path), size_bytes=_size_bytes(path)) for path in dead)


def _is_own_and_old(path: Path, now_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and status.st_uid == os.geteuid() and now_s - status.st_mtime > _YOUNG_S


def _size_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # removed meanwhile
            continue
    return total


def _resolved(name: str) -> list[str]:
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def _bind_trouble(address: str, *, reach: bool = False) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind((address, 0))
            server.listen()
            if reach:
                socket.create_connection(server.getsockname()[:2], timeout=_COMMAND_LIMIT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except OSError:
        return ()


def _readings_back(monotonic_ns: Callable[[], int]) -> int:
    """Count how often the clock goes back while this thread moves over the cores: cores may disagree."""
    cores = os.sched_getaffinity(0)
    back, last = 0, monotonic_ns()
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            for _ in range(_CLOCK_READINGS):
                now = monotonic_ns()
                back, last = back + (now < last), now
    except OSError:  # a sandbox that forbids pinning; one core was read at least
        pass
    finally:
        os.sched_setaffinity(0, cores)
    return back


# Limits, memory and cores.


def limit_facts(proc: Path = _PROC, groups: Path = ROOT) -> LimitFacts:
    of_groups = (
        (number_in(group / "pids.max"), number_in(group / "pids.current") or 0)
        for group in control_groups("self", "pids", groups, proc)
    )
    limit, used = tightest([_own_processes(proc), *of_groups])
    return LimitFacts(
        processes=limit,
        processes_used=used,
        open_files=_soft(resource.RLIMIT_NOFILE),
        core_bytes=_soft(resource.RLIMIT_CORE),
        core_pattern=kernel_text(proc / "sys/kernel/core_pattern") or "core",
        address_space_bytes=_soft(resource.RLIMIT_AS),
    )


def memory_facts(proc: Path = _PROC, groups: Path = ROOT) -> MemoryFacts:
    """Return the memory of the machine, or of the control group that grants least."""
    lines = kernel_fields(proc / "meminfo")
    total, available = (_kib(lines.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    for group in control_groups("self", "memory", groups, proc):
        limit, used = limit_bytes(group), used_bytes(group)
        if limit is not None and used is not None and limit < total:
            total = limit
            available = min(available, max(0, limit - max(0, used - _reclaimable(group))))
    return MemoryFacts(total_bytes=total, available_bytes=available)


def core_facts(proc: Path = _PROC, groups: Path = ROOT) -> CoreFacts:
    quotas = [quota for group in control_groups("self", "cpu", groups, proc) if (quota := _quota(group)) is not None]
    return CoreFacts(usable=len(os.sched_getaffinity(0)), quota=min(quotas, default=None))


def tightest(limits: list[tuple[int | None, int]]) -> tuple[int | None, int]:
    """Return the pair of (limit, in use) that leaves least."""
    real = [(limit, used) for limit, used in limits if limit is not None]
    return min(real, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _own_processes(proc: Path) -> tuple[int | None, int]:
    """Return RLIMIT_NPROC and the threads that count towards it, those of this user. The kernel exempts root."""
    limit = None if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)
    return limit, 0 if limit is None else sum(_threads(proc))


def _threads(proc: Path) -> Iterator[int]:
    """Yield the number of threads of each process of this user."""
    for status in proc.glob("[0-9]*/status"):
        fields = kernel_fields(status)
        if fields.get("Uid", "").partition("\t")[0] == str(os.getuid()):
            yield int(fields.get("Threads", "1"))


def _reclaimable(group: Path) -> int:
    """Return the bytes of file pages, which the kernel frees before it kills a process."""
    fields = dict(line.split(" ", 1) for line in kernel_text(group / "memory.stat").splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _quota(group: Path) -> float | None:
    words = kernel_text(group / "cpu.max").split() or [
        kernel_text(group / "cpu.cfs_quota_us"),
        kernel_text(group / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()):  # "max", and -1 in version 1
        return None
    return int(words[0]) / int(words[1])


def _soft(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _kib(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdigit() else 0


# What a child process shows.

_ANSWER = "nsa-harness answers: "  # a package may print on import
_TORCH = """
import json, torch
import torch.distributed as distributed
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gloo": False, "nccl": None}
facts["torchrun_trouble"] = None
facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
if distributed.is_available():
    facts["gloo"] = distributed.is_gloo_available()
    if distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    import torch.distributed.run
except Exception as error:
    facts["torchrun_trouble"] = f"{type(error).__name__}: {error}"
"""
_MODULE = """
import importlib, importlib.metadata, importlib.util, sys
name, package = sys.argv[1:3]
facts = {"found": importlib.util.find_spec(name) is not None, "version": None, "trouble": None}
try:
    facts["version"] = importlib.metadata.version(package)
except importlib.metadata.PackageNotFoundError:
    pass
if facts["found"]:
    try:
        module = importlib.import_module(name)
        facts["version"] = facts["version"] or str(getattr(module, "__version__", "of unknown version"))
    except BaseException as error:
        facts["trouble"] = f"{type(error).__name__}: {error}"
"""
_PRINT_FACTS = f"\nimport json; print({_ANSWER!r} + json.dumps(facts), flush=True)\n"
_WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


def torch_facts(environ: Mapping[str, str] | None = None) -> TorchFacts | UnknownFacts:
    answer = _facts_of(_TORCH, environ=environ)
    return answer if isinstance(answer, UnknownFacts) else TorchFacts(**answer)


def module_facts(module: str, package: str, environ: Mapping[str, str] | None = None) -> ModuleFacts:
    """Import the module: a build for another torch is found, but fails on import."""
    answer = _facts_of(_MODULE, module, package, environ=environ)
    if isinstance(answer, UnknownFacts):  # the import ended the process, or took too long: so something is there
        return ModuleFacts(version="a build", trouble=answer.why)
    if not answer["found"]:
        return ModuleFacts(version=None, trouble=None)
    trouble = answer["trouble"]
    return ModuleFacts(version=answer["version"] or "a build", trouble=trouble and _last_line(trouble))


def python_facts(environ: Mapping[str, str] | None = None) -> PythonFacts:
    """Start a child like a rank, and check whether the probe has written its status file."""
    environ = os.environ if environ is None else environ
    with tempfile.TemporaryDirectory(prefix="nsa-harness-doctor-") as boards:
        path = [str(BOOTSTRAP), *filter(None, [environ.get("PYTHONPATH", "")])]
        ours = {
            "PYTHONPATH": os.pathsep.join(path),
            "RANK": "0",
            "WORLD_SIZE": "1",
            protocol.ENV_PROBE_DIRECTORY: boards,
            protocol.ENV_PROBE: protocol.PROBE_STATUS,
        }
        answer = _facts_of("facts = {}", environ={**environ, **ours})
        written = any(Path(boards).glob(protocol.STATUS_FILE.format(pid="*")))
    silent = None if written else "its board is not there"
    trouble = answer.why if isinstance(answer, UnknownFacts) else silent
    return PythonFacts(version=".".join(map(str, sys.version_info[:3])), probe_trouble=trouble)


def py_spy_facts(ptrace_scope: Path = _PTRACE_SCOPE) -> PySpyFacts:
    """Dump the stacks of a child process, like a watcher dumps a rank."""
    path = shutil.which(py_spy_path())
    scope = number_in(ptrace_scope)
    if path is None:
        return PySpyFacts(path=None, threads=0, trouble=None, ptrace_scope=scope)
    child = subprocess.Popen([sys.executable, "-I", "-c", _WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    failures: list[str] = []
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        stacks, _ = py_spy(child.pid, [], failures)
        child.kill()
    return PySpyFacts(path=path, threads=len(stacks), trouble="; ".join(failures) or None, ptrace_scope=scope)


def _facts_of(code: str, *words: str, environ: Mapping[str, str] | None = None) -> dict[str, Any] | UnknownFacts:
    """Return what `code` leaves in `facts`, or why it could not."""
    # -P: the working directory may contain a module that shadows the inspected one.
    done = _run(sys.executable, "-P", "-c", code + _PRINT_FACTS, *words, environ=environ, limit_s=_IMPORT_LIMIT_S)
    if isinstance(done, str):
        return UnknownFacts(why=f"did not end within {_IMPORT_LIMIT_S:g} s" if done == _TIMEOUT else done)
    answers = [line.removeprefix(_ANSWER) for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers:
        facts: dict[str, Any] = json.loads(answers[-1])
        return facts
    return UnknownFacts(why=_last_line(done.stderr) or _ended(done.returncode))


def _output_of(*command: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return what the command prints, and why it failed."""
    done = _run(*command, environ=environ, limit_s=_COMMAND_LIMIT_S)
    if isinstance(done, str):
        return "", f"no answer within {_COMMAND_LIMIT_S:g} s" if done == _TIMEOUT else done
    lines = (done.stderr or done.stdout).strip().splitlines()
    return done.stdout, None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


_TIMEOUT = "timeout"


def _run(*command: str, environ: Mapping[str, str] | None, limit_s: float) -> subprocess.CompletedProcess[str] | str:
    """Return the ended process, _TIMEOUT, or why it cannot be started."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=None if environ is None else dict(environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _TIMEOUT
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror or error}"


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
