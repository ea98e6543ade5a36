"""The checks that `nsa-harness doctor` performs on a machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.protocol import STATUS_FILE_SIZE

_MIB, _GIB = 1 << 20, 1 << 30
STATUS_FILES_BYTES = 16 * STATUS_FILE_SIZE  # a rank without space for its status file runs without one
SHARED_BYTES = 64 * _MIB  # data loaders and NCCL need tens of MiB
REPORTS_LEAST_BYTES = 64 * _MIB
REPORTS_BYTES = _GIB
MEMORY_LEAST_BYTES = _GIB  # two ranks of the smallest model need 0.4 GiB each
MEMORY_BYTES = 4 * _GIB
ADDRESS_SPACE_BYTES = 16 * _GIB  # torch maps much more memory than it uses
PROCESSES_LEAST, PROCESSES = 32, 512  # including threads; a run of two ranks on CPU used 22
OPEN_FILES_LEAST, OPEN_FILES = 64, 1024  # a run of two ranks passed with 64, and failed with 32
PORTS = 1024
DRIFT_S = 0.05
BEHIND_S = 60.0
RESOLVE_S = 2.0
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)


class CheckState(StrEnum):
    """The result of one check of the machine."""

    OK = "ok"
    WARN = "warn"  # runs work, but something will be slower, less precise or surprising
    MISSING = "missing"  # an optional component is not installed
    BROKEN = "broken"  # runs cannot work, or evidence will be lost


@dataclass(frozen=True, kw_only=True)
class CheckLine:
    """One check of the machine, with its result, the measured facts and advice."""

    name: str
    state: CheckState
    fact: str
    advice: str | None = None


CheckResult = tuple[CheckState, str, str | None]  # state, fact as text, and what to do (None if the state is ok)
_OK, _WARN, _MISSING, _BROKEN = CheckState
_STATE_WIDTH = max(map(len, CheckState))
_MAX_LINE = 1000  # characters
_RELEASE = re.compile(r"(\d+)\.(\d+)")
_FOR_GPU, _FOR_FLASH = "pip install 'nsa-harness[gpu]'", "pip install 'nsa-harness[flash]' (needs a GPU)"


def check_lines(facts: MachineCheckFacts) -> tuple[CheckLine, ...]:
    """Return the results of all checks, in the order in which `doctor` prints them."""
    torch, gpu, limits = facts.torch, facts.gpu, facts.limits
    if isinstance(torch, UnknownFacts):
        install = (
            "install it in this environment: pip install 'torch>=2.11', or the build for your CUDA from pytorch.org"
        )
        unknown: CheckResult = (_BROKEN, "not checked, because torch cannot be imported", "fix `torch` first")
        torch_checks = {"torch": (_BROKEN, torch.why, install), **dict.fromkeys(("torchrun", "gloo", "nccl"), unknown)}
    else:
        torch_checks = {
            "torch": torch.check(),
            "torchrun": torch.check_torchrun(),
            "gloo": torch.check_gloo(),
            "nccl": torch.check_nccl(gpu),
        }
    checks: dict[str, CheckResult] = {
        "probe": facts.python.check(),
        **torch_checks,
        "gpu": gpu.check(torch),
        "py-spy": facts.py_spy.check(),
        "/dev/shm": facts.shared_memory.check_shared_memory(facts.temporary),
        "reports": facts.reports.check_reports(),
        "memory": facts.memory.check(),
        "cores": facts.cores.check(),
        "processes": limits.check_processes(),
        "open files": limits.check_open_files(),
        "core files": limits.check_core_files(),
        "address space": limits.check_address_space(),
        "hostname": facts.name.check(),
        "interface": facts.interface.check(),
        "ports": facts.ports.check(),
        "clock": facts.clock.check(),
        "left over": _check_left_over(facts.left_over),
        "triton": facts.triton.check("kernels and torch.compile on a GPU", _FOR_GPU),
        "flash-attn": facts.flash_attn.check("model.impl=flash", _FOR_FLASH),
        "nvidia-ml-py": facts.nvml.check("torch.cuda.utilization (nsa-harness itself uses nvidia-smi)", _FOR_GPU),
        "slurm": facts.slurm.check(),
    }
    return tuple(
        CheckLine(name=name, state=state, fact=fact, advice=advice) for name, (state, fact, advice) in checks.items()
    )


def is_healthy(lines: Sequence[CheckLine]) -> bool:
    """Return whether programs can run on this machine without loss of evidence about failures."""
    return all(line.state is not CheckState.BROKEN for line in lines)


def lines_text(lines: Sequence[CheckLine]) -> Iterator[str]:
    """Yield the lines that `doctor` prints, with advice below each failed check."""
    width = max(map(len, (line.name for line in lines)), default=0)
    for line in lines:
        yield visible(f"{line.state:<{_STATE_WIDTH}} {line.name:<{width}}  {line.fact}", _MAX_LINE)
        if line.advice is not None:
            yield visible(f"{'':<{_STATE_WIDTH}} {'':<{width}}  do: {line.advice}", _MAX_LINE)
    broken_names = [line.name for line in lines if line.state is CheckState.BROKEN]
    yield ""
    if broken_names:
        yield f"broken: {', '.join(broken_names)}; fix this first, or runs will fail or lose evidence"
    else:
        yield "runs work on this machine, and they lose no evidence"


def lines_for_json(lines: Sequence[CheckLine]) -> dict[str, object]:
    """Return the output of `doctor --json` as a dict."""
    return {"schema": 1, "healthy": is_healthy(lines), "lines": [vars(line) for line in lines]}


def size_text(size_bytes: int) -> str:
    """Return a size as a string, such as "23.9 GiB", "64 MiB" or "512 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            amount = size_bytes / unit
            return f"{amount:.0f} {name}" if amount >= 100 or amount == int(amount) else f"{amount:.1f} {name}"
    return f"{size_bytes} B"


def _check_amount(amount: int, fact: str, advice: str, *levels: tuple[CheckState, int, str]) -> CheckResult:
    """Return the state and consequence of the first of `levels`, worst first, whose minimal amount is not reached."""
    for state, least, consequence in levels:
        if amount < least:
            return state, fact + consequence, advice
    return _OK, fact, None


def _count_names(names: Sequence[str]) -> str:
    """Return a string that says how often each name occurs, such as "2 x A100, 1 x T4"."""
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))


# The facts. Each class has the check of its fact.


@dataclass(frozen=True, kw_only=True)
class UnknownFacts:
    """The reason why a property of the machine could not be measured."""

    why: str


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """The Python version, and whether nsa-harness's instrumentation is loaded into child processes."""

    version: str
    probe_trouble: str | None  # why the probe does not load into a child process; None: it loads

    def check(self) -> CheckResult:
        if self.probe_trouble is None:
            return _OK, f"loads into a child process of Python {self.version}", None
        return (
            _BROKEN,
            f"does not load into a child process of Python {self.version}: {self.probe_trouble}",
            "look for a sitecustomize.py or .pth file that breaks the start of Python, or run with --probe=off "
            "(verdicts then rely only on stacks, CPU time and I/O)",
        )


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs of this machine, and which of them a rank would see."""

    installed: tuple[str, ...] | None  # names of all GPUs; None without nvidia-smi
    visible: tuple[str, ...]  # names of the GPUs that a rank would see
    driver: str | None
    visible_devices: str | None  # the value of CUDA_VISIBLE_DEVICES
    trouble: str | None  # why nvidia-smi failed

    def check(self, torch: TorchFacts | UnknownFacts) -> CheckResult:
        if self.trouble:
            advice = "reboot after a driver update, or reinstall the driver; until then, scenarios run on the CPU"
            return _WARN, f"nvidia-smi fails: {self.trouble}", advice
        if not self.installed:
            fact = "none: nvidia-smi is not installed" if self.installed is None else "none: nvidia-smi lists no GPU"
            return _MISSING, fact, "nothing needed: scenarios run on the CPU, and those that need a GPU are skipped"
        fact = f"{_count_names(self.installed)}, driver {self.driver or 'unknown'}"
        if not self.visible:
            hidden = f"{fact}, hidden by CUDA_VISIBLE_DEVICES={self.visible_devices or ''}"
            return _WARN, hidden, "unset CUDA_VISIBLE_DEVICES to use them"
        if isinstance(torch, TorchFacts) and torch.devices < len(self.visible):
            fact = f"{fact}, but torch can use {torch.devices} of {len(self.visible)}"
            build = "install the torch build for this driver's CUDA (pytorch.org)"
            return _BROKEN, fact, f"{build}, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return _OK, fact, None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The installed PyTorch, and whether it contains gloo and NCCL."""

    version: str
    cuda: str | None  # the CUDA version it was built for; None: CPU only
    devices: int  # GPUs that torch can use
    gloo: bool  # whether this build contains gloo
    nccl: str | None  # version of NCCL; None if this build does not contain it
    torchrun_trouble: str | None  # why torch.distributed.run cannot be imported

    def check(self) -> CheckResult:
        build = f"{self.version}, built for {f'CUDA {self.cuda}' if self.cuda else 'CPU only'}"
        match = _RELEASE.match(self.version)
        release = (int(match[1]), int(match[2])) if match else None
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST_TORCH, NEWEST_TORCH))
        if release is not None and release < OLDEST_TORCH:
            return _BROKEN, f"{build}; supported: {oldest} to {newest}", f"upgrade: pip install -U 'torch>={oldest}'"
        if release is None or release > NEWEST_TORCH:
            advice = "run `nsa-harness selftest`: if every line is right, nsa-harness works with this version"
            return _WARN, f"{build}; tested: {oldest} to {newest}", advice
        return _OK, build, None

    def check_torchrun(self) -> CheckResult:
        if self.torchrun_trouble is None:
            return _OK, "torch.distributed.run is importable", None
        advice = "reinstall torch: pip install --force-reinstall torch"
        return _BROKEN, f"torch.distributed.run: {self.torchrun_trouble}", advice

    def check_gloo(self) -> CheckResult:
        if self.gloo:
            return _OK, "in torch", None
        advice = "install an official build of torch: every scenario on CPU uses gloo"
        return _BROKEN, "this build of torch does not contain it", advice

    def check_nccl(self, gpu: GpuFacts) -> CheckResult:
        if self.nccl:
            return _OK, f"{self.nccl} (in torch)", None
        if gpu.visible:
            advice = "install a CUDA build of torch (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
            return (
                _BROKEN,
                f"this build of torch does not contain it, but runs on {_count_names(gpu.visible)} need it",
                advice,
            )
        advice = "nothing needed: without a GPU, scenarios use gloo, and those that need NCCL are skipped"
        return _MISSING, "this build of torch does not contain it", advice


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """The version of an optional package, and whether the package can be imported."""

    version: str | None  # None: it is not installed
    trouble: str | None  # why it cannot be imported

    def check(self, purpose: str, install: str) -> CheckResult:
        if self.version is None:
            return _MISSING, "not installed", f"needed only for {purpose}: {install}"
        if self.trouble is not None:
            advice = f"reinstall it for this torch, or uninstall it; it is needed only for {purpose}"
            return _WARN, f"{self.version} is installed, but cannot be imported: {self.trouble}", advice
        return _OK, f"{self.version}, importable", None


@dataclass(frozen=True, kw_only=True)
class PySpyFacts:
    """The installation of py-spy, and whether py-spy can read the stacks of a child process."""

    path: str | None  # None: it was not found
    threads: int  # how many threads of a child process it could read; 0: it failed
    trouble: str | None  # why it failed
    ptrace_scope: int | None  # None if the kernel has no Yama

    def check(self) -> CheckResult:
        if self.path is None:
            return _BROKEN, "not found, neither next to this Python nor on PATH", "pip install py-spy"
        if self.threads:
            scope = "" if self.ptrace_scope is None else f" (ptrace_scope {self.ptrace_scope})"
            return _OK, f"can read the stacks of a child process{scope}", None
        scope = "" if self.ptrace_scope is None else f", kernel.yama.ptrace_scope is {self.ptrace_scope}"
        return (
            _BROKEN,
            f"cannot read the stacks of a child process: {self.trouble}{scope}",
            "in a container: docker run --cap-add SYS_PTRACE; otherwise: sysctl kernel.yama.ptrace_scope=1. Without "
            "py-spy, a HANG has only the stacks that the ranks can report themselves",
        )


@dataclass(frozen=True, kw_only=True)
class SpaceFacts:
    """A directory in which nsa-harness stores files, with its free space."""

    path: str
    trouble: str | None  # why a file could not be written
    size_bytes: int  # of the file system
    free_bytes: int

    def check_shared_memory(self, temporary: SpaceFacts) -> CheckResult:
        if self.trouble and temporary.trouble:
            fact = f"not writable ({self.trouble}), and neither is {temporary.path} ({temporary.trouble})"
            advice = f"make one of the two directories writable (chmod 1777 {self.path}): status files need one of them"
            return _BROKEN, fact, advice
        if self.trouble:
            advice = f"chmod 1777 {self.path}, or mount a tmpfs there: on a disk, progress events take longer"
            return _WARN, f"not writable ({self.trouble}); status files are written to {temporary.path}", advice
        too_little = (
            f"; status files need {size_text(STATUS_FILES_BYTES)}; without them, no progress of the ranks is seen"
        )
        state, fact, advice_or_none = _check_amount(
            self.free_bytes,
            f"{size_text(self.free_bytes)} free of {size_text(self.size_bytes)}",
            f"remove files from {self.path}, or enlarge it: docker run --shm-size=8g",
            (_BROKEN, STATUS_FILES_BYTES, too_little),
            (_WARN, SHARED_BYTES, f"; data loaders and NCCL need {size_text(SHARED_BYTES)} or more"),
        )
        return state, f"writable, {fact}" if state is _OK else fact, advice_or_none

    def check_reports(self) -> CheckResult:
        if self.trouble:
            advice = "change to a writable directory, or choose one with --out DIR"
            return _BROKEN, f"{self.path} is not writable: {self.trouble}", advice
        return _check_amount(
            self.free_bytes,
            f"{self.path} is writable, {size_text(self.free_bytes)} free",
            "free some space, or choose another directory with --out DIR",
            (_BROKEN, REPORTS_LEAST_BYTES, ": evidence will be lost"),
            (_WARN, REPORTS_BYTES, "; a long run may fill it"),
        )


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """The resource limits of this process, in which a limit that is unknown or not set is None."""

    processes: int | None  # including threads
    processes_used: int
    open_files: int | None
    core_bytes: int | None
    core_pattern: str
    address_space_bytes: int | None

    def check_processes(self) -> CheckResult:
        limit, used = self.processes, self.processes_used
        if limit is None:
            return _OK, "no limit", None
        available = max(0, limit - used)
        return _check_amount(
            available,
            f"{available} more can start (limit {limit}, {used} in use, including threads)",
            "raise it: ulimit -u, or pids.max of the container (docker run --pids-limit=-1)",
            (_BROKEN, PROCESSES_LEAST, ": ranks cannot start"),
            (_WARN, PROCESSES, ""),
        )

    def check_open_files(self) -> CheckResult:
        limit = self.open_files
        if limit is None:
            return _OK, "no limit", None
        return _check_amount(
            limit,
            f"{limit} per process",
            f"ulimit -n {64 * OPEN_FILES}",
            (_BROKEN, OPEN_FILES_LEAST, ": too few for the launcher and the ranks"),
            (_WARN, OPEN_FILES, ": may be too few for data loaders"),
        )

    def check_core_files(self) -> CheckResult:
        limit, pattern = self.core_bytes, self.core_pattern
        if limit == 0 or pattern.startswith("|"):
            fact = "off" if limit == 0 else f"passed to {pattern[1:].split(' ')[0]}"
            return _OK, f"{fact}; nsa-harness records the stacks of a crash itself", None
        size = "as large as its memory" if limit is None else f"of up to {size_text(limit)}"
        fact = f"a crashing rank writes a core file {size} ({pattern}), and makes no progress meanwhile"
        return _WARN, fact, "ulimit -c 0, unless you need core files"

    def check_address_space(self) -> CheckResult:
        limit = self.address_space_bytes
        if limit is None:
            return _OK, "no limit", None
        consequence = ": torch maps much more memory than it uses"
        level = (_WARN, ADDRESS_SPACE_BYTES, consequence)
        return _check_amount(limit, f"{size_text(limit)} per process", "ulimit -v unlimited", level)


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """The memory of the machine, or of the control group if that is less."""

    total_bytes: int
    available_bytes: int

    def check(self) -> CheckResult:
        return _check_amount(
            self.available_bytes,
            f"{size_text(self.available_bytes)} available of {size_text(self.total_bytes)}",
            "end other programs, or raise the memory limit of the container or job",
            (_BROKEN, MEMORY_LEAST_BYTES, "; too little for two ranks of the smallest model"),
            (_WARN, MEMORY_BYTES, "; enough only for the smallest models"),
        )


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    """The CPU cores and the CPU quota available to this process."""

    usable: int
    quota: float | None  # CPU quota of the control group, in cores; None: no quota

    def check(self) -> CheckResult:
        usable, quota = self.usable, self.quota
        fact = f"{usable} usable" if usable > 1 else "1 usable, shared by all ranks"
        if quota is not None and quota < usable:
            advice = (
                "raise the CPU quota of the container or job, or run fewer ranks, because throttled ranks look slow"
            )
            return _WARN, f"{fact}, but the control group has a CPU quota of {quota:g} cores", advice
        if usable == 1:
            advice = (
                "give this process more cores (taskset, cpuset, --cpus-per-task); with one core, stalls are found later"
            )
            return _WARN, fact, advice
        return _OK, fact, None


@dataclass(frozen=True, kw_only=True)
class NameFacts:
    """The host name that torchrun passes to the ranks, and whether the ranks can use it."""

    hostname: str
    addresses: tuple[str, ...]  # the addresses that it resolves to
    bindable: tuple[str, ...]  # those that a process on this machine can bind
    resolve_s: float  # how long it took to resolve the name
    trouble: str | None  # why the name could not be resolved

    def check(self) -> CheckResult:
        if self.bindable:
            fact = f"{self.hostname} resolves to {', '.join(self.bindable)}, which can be bound"
            if self.resolve_s > RESOLVE_S:
                fact += f"; resolving took {self.resolve_s:.1f} s, and each rank does it several times"
                return _WARN, fact, f'echo "{self.bindable[0]} {self.hostname}" >> /etc/hosts'
            return _OK, fact, None
        problem = self.trouble or "has no address"
        if self.addresses:
            problem = f"resolves to {', '.join(self.addresses)}, which is not an address of this machine"
        return (
            _BROKEN,
            f"{self.hostname} {problem}; torchrun passes this name to the ranks, which cannot connect to it",
            f'echo "127.0.0.1 {self.hostname}" >> /etc/hosts (docker run --add-host {self.hostname}:127.0.0.1)',
        )


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    """The network interfaces of this machine, and the one requested for gloo."""

    requested: str | None  # the value of GLOO_SOCKET_IFNAME
    available: tuple[str, ...]

    def check(self) -> CheckResult:
        requested, available = self.requested, ", ".join(self.available) or "none"
        if requested is None:
            return _OK, f"gloo chooses from {available}", None
        missing = [name for name in requested.split(",") if name not in self.available]
        if missing:
            fact = f"GLOO_SOCKET_IFNAME is {', '.join(missing)}, which does not exist; available: {available}"
            return _BROKEN, fact, "set GLOO_SOCKET_IFNAME to an available interface, or unset it"
        return _OK, f"{requested} (from GLOO_SOCKET_IFNAME)", None


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    """The machine's range of free ports, and whether a process can connect to one of them."""

    trouble: str | None  # why a port of this machine could not be bound and reached
    first: int
    last: int

    def check(self) -> CheckResult:
        if self.trouble:
            advice = "bring up the loopback interface (ip link set lo up), and look for a sandbox or firewall"
            return _BROKEN, f"no port of 127.0.0.1 can be bound and reached: {self.trouble}", advice
        count = max(0, self.last - self.first + 1)
        return _check_amount(
            count,
            f"a port can be bound and reached; {count} available ({self.first}-{self.last})",
            'sysctl net.ipv4.ip_local_port_range="32768 60999"',
            (_WARN, PORTS, ": may be too few for many ranks"),
        )


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """The behaviour of the monotonic clock and the wall clock while they were compared."""

    over_s: float  # how long the clocks were compared
    backwards: int  # how often a reading of the monotonic clock was before the previous reading
    drift_s: float  # how much more the wall clock advanced than the monotonic clock
    behind_s: float  # how far the wall clock is behind the latest file of nsa-harness

    def check(self) -> CheckResult:
        if self.backwards:
            fact = (
                f"the monotonic clock went back {self.backwards} times in {self.over_s:.1f} s: time limits do not work"
            )
            advice = "this is the kernel or the hypervisor: choose another clock source (clocksource=hpet), or machine"
            return _BROKEN, fact, advice
        if self.behind_s > BEHIND_S:
            fact = f"the wall clock is {self.behind_s:.0f} s behind the latest file of this installation"
            return _WARN, fact, "set it (timedatectl, ntp): run ids and CI logs use it; verdicts do not"
        if abs(self.drift_s) > DRIFT_S:
            fact = f"the wall clock was set or stepped by {self.drift_s:+.3f} s within {self.over_s:.1f} s"
            return (
                _WARN,
                fact,
                "wait until the time service has settled; verdicts are not affected: they use the monotonic clock",
            )
        drift = f"{abs(self.drift_s) * 1000:.1f} ms in {self.over_s:.1f} s"
        return _OK, f"monotonic; the wall clock deviated by {drift}", None


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """The Slurm installation on this machine, and whether Slurm responds."""

    version: str | None  # None if sinfo is not installed or does not answer
    missing: tuple[str, ...]  # those of sinfo, scontrol and srun that are not on PATH
    job: str | None  # id of the Slurm job that this process is in
    trouble: str | None  # why sinfo failed

    def check(self) -> CheckResult:
        job = f", inside job {self.job}" if self.job else ", not inside a job"
        if self.job is None and len(self.missing) == 3:
            return _MISSING, "no sinfo, scontrol or srun", "needed only on a cluster: use a login node, or a job"
        if self.missing:
            advice = "load the Slurm module of this cluster, so that all three commands are on PATH"
            return _WARN, f"no {', '.join(self.missing)} on PATH{job}", advice
        if self.trouble:
            return _WARN, f"sinfo fails: {self.trouble}{job}", "run `sinfo` yourself; the controller may be down"
        return _OK, f"{self.version}{job}", None


@dataclass(frozen=True, kw_only=True)
class LeftOver:
    """A directory with status files, left behind by a run."""

    path: str
    size_bytes: int


def _check_left_over(left_over: Sequence[LeftOver]) -> CheckResult:
    if not left_over:
        return _OK, "none", None
    size = size_text(sum(item.size_bytes for item in left_over))
    paths = [item.path for item in left_over]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    fact = f"status files of ended runs: {', '.join(paths[:3])}{more}, {size}"
    return _WARN, fact, f"rm -r {' '.join(paths)}"


@dataclass(frozen=True, kw_only=True)
class MachineCheckFacts:
    """Everything that `doctor` measures on a machine."""

    python: PythonFacts
    torch: TorchFacts | UnknownFacts
    gpu: GpuFacts
    nvml: ModuleFacts
    triton: ModuleFacts
    flash_attn: ModuleFacts
    py_spy: PySpyFacts
    shared_memory: SpaceFacts
    temporary: SpaceFacts
    reports: SpaceFacts
    limits: LimitFacts
    memory: MemoryFacts
    cores: CoreFacts
    name: NameFacts
    interface: InterfaceFacts
    ports: PortFacts
    clock: ClockFacts
    slurm: SlurmFacts
    left_over: tuple[LeftOver, ...]
