"""Checks this machine for `nsa-harness doctor`. For a value that cannot be measured, the reason is returned."""

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
_SHARED_MEMORY = Path("/dev/shm")
_PACKAGE = Path(__file__).resolve().parents[1]
_STATUS_DIR_PREFIX = "nsa-harness-"  # start of the names of directories with status files
_LOOPBACK = "127.0.0.1"
_SLURM = ("sinfo", "scontrol", "srun")
_COMMAND_LIMIT_S = 5.0
_IMPORT_LIMIT_S = 90.0  # importing torch from a cold network file system is slow
_MIN_AGE_S = 60.0  # at its start and end, a run has a directory but no process for a moment
_CLOCK_READINGS = 2000  # per core

Resolver = Callable[[str], Sequence[str]]


def measure(working_dir: Path, environ: Mapping[str, str]) -> MachineCheckFacts:
    """Check this machine in a few seconds: GPUs, disk, network, clocks, limits and Python."""
    clock = ClockComparison()
    # ./reports, or the nearest existing directory in which it would be created.
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
            shared_memory=space_facts(_SHARED_MEMORY),
            temporary=space_facts(Path(tempfile.gettempdir())),
            reports=space_facts(reports),
            limits=limit_facts(),
            memory=memory_facts(),
            cores=core_facts(),
            name=name.result(),
            interface=InterfaceFacts(requested=environ.get("GLOO_SOCKET_IFNAME"), available=_interfaces()),
            ports=port_facts(),
            slurm=slurm_facts(environ),
            left_over=left_over((_SHARED_MEMORY, Path(tempfile.gettempdir()))),
            clock=clock_facts(clock),
        )


def gpu_facts(environ: Mapping[str, str]) -> GpuFacts:
    """Return the GPUs of this machine, and those that a rank with this environment would see."""
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return GpuFacts(installed=None, visible=(), driver=None, visible_devices=visible_devices, trouble=None)
    answer, trouble = _output_of(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", environ=environ
    )
    rows = [line.rpartition(",") for line in answer.splitlines() if "," in line]
    names = tuple(name.strip() for name, _, _ in rows)
    return GpuFacts(
        installed=names,
        visible=visible_gpus(visible_devices, names),
        driver=rows[0][2].strip() if rows else None,
        visible_devices=visible_devices,
        trouble=trouble,
    )


def space_facts(path: Path) -> SpaceFacts:
    """Check whether files can be written to the directory, and how much space is free."""
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
    """Return the host name that torchrun uses, its addresses, and those addresses that work on this machine."""
    started_s = time.monotonic()
    hostname = name()
    addresses: tuple[str, ...] = ()
    trouble = None
    try:
        addresses = tuple((resolve or _resolve)(hostname))
    except OSError as error:
        trouble = f"cannot be resolved ({error.strerror or error})"
    resolve_s = time.monotonic() - started_s
    bindable = tuple(address for address in addresses if _bind_trouble(address) is None)
    return NameFacts(hostname=hostname, addresses=addresses, bindable=bindable, resolve_s=resolve_s, trouble=trouble)


def port_facts(address: str = _LOOPBACK, ranges: Path = _PORT_RANGE) -> PortFacts:
    """Check whether a process can listen on a free port of `address` and be reached there."""
    first, last = 32768, 60999  # the kernel's default
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, ranges.read_text().split())
    return PortFacts(trouble=_bind_trouble(address, reach=True), first=first, last=last)


class ClockComparison:
    """A comparison of the wall clock with the monotonic clock, which starts when it is created."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.wall_s, self.monotonic_ns = wall_s, monotonic_ns
        self._wall_s, self._monotonic_ns = wall_s(), monotonic_ns()

    def passed_s(self) -> tuple[float, float]:
        """Return the monotonic seconds since this object was created, and what the wall clock has gained since."""
        over_s = (self.monotonic_ns() - self._monotonic_ns) / 1e9
        return over_s, self.wall_s() - self._wall_s - over_s


def clock_facts(comparison: ClockComparison) -> ClockFacts:
    """Measure how the clocks have behaved since `comparison` was created."""
    backwards = _backward_steps(comparison.monotonic_ns)
    over_s, drift_s = comparison.passed_s()
    latest_s = max(path.stat().st_mtime for path in _PACKAGE.rglob("*.py"))
    behind_s = max(0.0, latest_s - comparison.wall_s())
    return ClockFacts(over_s=over_s, backwards=backwards, drift_s=drift_s, behind_s=behind_s)


def slurm_facts(environ: Mapping[str, str]) -> SlurmFacts:
    """Check which Slurm commands exist, and whether sinfo responds."""
    path = environ.get("PATH")
    missing = tuple(name for name in _SLURM if shutil.which(name, path=path) is None)
    job = environ.get("SLURM_JOB_ID")
    if "sinfo" in missing:
        return SlurmFacts(version=None, missing=missing, job=job, trouble=None)
    version, _ = _output_of("sinfo", "--version", environ=environ)
    _, trouble = _output_of("sinfo", "--noheader", environ=environ)
    return SlurmFacts(version=version.strip() or None, missing=missing, job=job, trouble=trouble)


def left_over(parents: Iterable[Path], now_s: float | None = None) -> tuple[LeftOver, ...]:
    """Return the directories with status files, older than a minute, that this user's ended runs left in `parents`."""
    now_s = time.time() if now_s is None else now_s
    parents = dict.fromkeys(parents)
    old = [
        path
        for parent in parents
        for path in sorted(parent.glob(f"{_STATUS_DIR_PREFIX}*"))
        if _is_own_and_old(path, now_s)
    ]
    if not old:
        return ()
    living = {procfs.environment(pid).get(protocol.ENV_RUN) for pid in psutil.pids()}
    dead = [path for path in old if path.name.removeprefix(_STATUS_DIR_PREFIX) not in living]
    return tuple(LeftOver(path=str(path), size_bytes=_size_bytes(path)) for path in dead)


def _is_own_and_old(path: Path, now_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and status.st_uid == os.geteuid() and now_s - status.st_mtime > _MIN_AGE_S


def _size_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # the file was removed meanwhile
            continue
    return total


def _resolve(name: str) -> list[str]:
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def _bind_trouble(address: str, *, reach: bool = False) -> str | None:
    """Return why no process can listen on a port (`reach`: and be reached there), or None if a process can."""
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


def _backward_steps(monotonic_ns: Callable[[], int]) -> int:
    """Return how many times `monotonic_ns` goes backward while this thread moves from core to core."""
    cores = os.sched_getaffinity(0)
    back, last = 0, monotonic_ns()
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            for _ in range(_CLOCK_READINGS):
                now = monotonic_ns()
                back, last = back + (now < last), now
    except OSError:  # a sandbox does not allow pinning to a core; the clock was read on one core
        pass
    finally:
        os.sched_setaffinity(0, cores)
    return back


# Limits, memory and cores.


def limit_facts(proc: Path = _PROC, groups: Path = ROOT) -> LimitFacts:
    """Return the limits on processes, threads and files that apply to this process."""
    group_limits = (
        (number_in(group / "pids.max"), number_in(group / "pids.current") or 0)
        for group in control_groups("self", "pids", groups, proc)
    )
    limit, used = tightest([_own_processes(proc), *group_limits])
    return LimitFacts(
        processes=limit,
        processes_used=used,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        core_bytes=_soft_limit(resource.RLIMIT_CORE),
        core_pattern=kernel_text(proc / "sys/kernel/core_pattern") or "core",
        address_space_bytes=_soft_limit(resource.RLIMIT_AS),
    )


def memory_facts(proc: Path = _PROC, groups: Path = ROOT) -> MemoryFacts:
    """Return the total and available memory of the machine, or of the control group with the lowest limit."""
    lines = kernel_fields(proc / "meminfo")
    total, available = (_kib(lines.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    for group in control_groups("self", "memory", groups, proc):
        limit, used = limit_bytes(group), used_bytes(group)
        if limit is not None and used is not None and limit < total:
            total = limit
            available = min(available, max(0, limit - max(0, used - _reclaimable(group))))
    return MemoryFacts(total_bytes=total, available_bytes=available)


def core_facts(proc: Path = _PROC, groups: Path = ROOT) -> CoreFacts:
    """Return the CPU cores that this process is allowed to use, and its lowest CPU quota."""
    quotas = [quota for group in control_groups("self", "cpu", groups, proc) if (quota := _quota(group)) is not None]
    return CoreFacts(usable=len(os.sched_getaffinity(0)), quota=min(quotas, default=None))


def tightest(limits: list[tuple[int | None, int]]) -> tuple[int | None, int]:
    """Return the pair (limit, amount in use) with the least headroom, ignoring pairs whose limit is None."""
    pairs = [(limit, used) for limit, used in limits if limit is not None]
    return min(pairs, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _own_processes(proc: Path) -> tuple[int | None, int]:
    """Return the limit on this user's processes and threads (None if unlimited), and their current number."""
    limit = None if os.geteuid() == 0 else _soft_limit(resource.RLIMIT_NPROC)
    return limit, 0 if limit is None else sum(_threads(proc))


def _threads(proc: Path) -> Iterator[int]:
    for status in proc.glob("[0-9]*/status"):
        fields = kernel_fields(status)
        if fields.get("Uid", "").partition("\t")[0] == str(os.getuid()):
            yield int(fields.get("Threads", "1"))


def _reclaimable(group: Path) -> int:
    """Return the number of bytes in a control group that the kernel can free, such as cached file pages."""
    fields = dict(line.split(" ", 1) for line in kernel_text(group / "memory.stat").splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _quota(group: Path) -> float | None:
    words = kernel_text(group / "cpu.max").split() or [
        kernel_text(group / "cpu.cfs_quota_us"),
        kernel_text(group / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()):  # without a quota: "max", or -1 in version 1
        return None
    return int(words[0]) / int(words[1])


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _kib(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdigit() else 0


# Facts that a child process finds out.

_ANSWER = "nsa-harness answers: "  # marks our line, because a package may print during its import
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
    """Check PyTorch in a child process that imports it."""
    answer = _facts_of(_TORCH, environ=environ)
    return answer if isinstance(answer, UnknownFacts) else TorchFacts(**answer)


def module_facts(module: str, package: str, environ: Mapping[str, str] | None = None) -> ModuleFacts:
    """Check in a child process whether a module can be imported, and find the version of its `package`."""
    answer = _facts_of(_MODULE, module, package, environ=environ)
    if isinstance(answer, UnknownFacts):  # the import ended the process or took too long, so the module exists
        return ModuleFacts(version="a build", trouble=answer.why)
    if not answer["found"]:
        return ModuleFacts(version=None, trouble=None)
    trouble = answer["trouble"]
    return ModuleFacts(version=answer["version"] or "a build", trouble=trouble and _last_line(trouble))


def python_facts(environ: Mapping[str, str] | None = None) -> PythonFacts:
    """Check whether a Python child process with a rank's environment writes a status file."""
    environ = os.environ if environ is None else environ
    with tempfile.TemporaryDirectory(prefix="nsa-harness-doctor-") as status_dir:
        path = [str(BOOTSTRAP), *filter(None, [environ.get("PYTHONPATH", "")])]
        own_variables = {
            "PYTHONPATH": os.pathsep.join(path),
            "RANK": "0",
            "WORLD_SIZE": "1",
            protocol.ENV_PROBE_DIRECTORY: status_dir,
            protocol.ENV_PROBE: protocol.PROBE_STATUS,
        }
        answer = _facts_of("facts = {}", environ={**environ, **own_variables})
        has_status_file = any(Path(status_dir).glob(protocol.STATUS_FILE.format(pid="*")))
    no_file = None if has_status_file else "it wrote no status file"
    trouble = answer.why if isinstance(answer, UnknownFacts) else no_file
    return PythonFacts(version=".".join(map(str, sys.version_info[:3])), probe_trouble=trouble)


def py_spy_facts(ptrace_scope: Path = _PTRACE_SCOPE) -> PySpyFacts:
    """Check whether py-spy can read the stacks of a child process."""
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
    """Run Python code in a child process with the arguments `words`, and return its variable `facts`."""
    # -P: a module in the working directory must not shadow the inspected one.
    completed = _run(sys.executable, "-P", "-c", code + _PRINT_FACTS, *words, environ=environ, limit_s=_IMPORT_LIMIT_S)
    if isinstance(completed, str):
        return UnknownFacts(why=f"did not end within {_IMPORT_LIMIT_S:g} s" if completed == _TIMEOUT else completed)
    answers = [line.removeprefix(_ANSWER) for line in completed.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers:
        facts: dict[str, Any] = json.loads(answers[-1])
        return facts
    return UnknownFacts(why=_last_line(completed.stderr) or _exit_text(completed.returncode))


def _output_of(*command: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the output of a command, and either the reason why it failed or None if it succeeded."""
    completed = _run(*command, environ=environ, limit_s=_COMMAND_LIMIT_S)
    if isinstance(completed, str):
        return "", f"no answer within {_COMMAND_LIMIT_S:g} s" if completed == _TIMEOUT else completed
    if completed.returncode == 0:
        return completed.stdout, None
    lines = (completed.stderr or completed.stdout).strip().splitlines()
    return completed.stdout, lines[-1] if lines else f"exit code {completed.returncode}"


_TIMEOUT = "timeout"


def _run(*command: str, environ: Mapping[str, str] | None, limit_s: float) -> subprocess.CompletedProcess[str] | str:
    """Run a command. Return the completed process, or the reason why it did not complete."""
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


def _exit_text(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
