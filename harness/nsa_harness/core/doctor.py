"""`doctor`: the facts that are measured on a machine, and the check that each of them must pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.protocol import STATUS_FILE_SIZE

_MIB, _GIB = 1 << 20, 1 << 30
BOARDS_BYTES = 16 * STATUS_FILE_SIZE  # a rank without room for its status file runs without it
SHARED_BYTES = 64 * _MIB  # data loaders and NCCL take tens of MiB
REPORTS_LEAST_BYTES = 64 * _MIB
REPORTS_BYTES = _GIB
MEMORY_LEAST_BYTES = _GIB  # two ranks of the smallest shape: 0.4 GiB each
MEMORY_BYTES = 4 * _GIB
ADDRESS_SPACE_BYTES = 16 * _GIB  # torch maps far more than it uses
PROCESSES_LEAST, PROCESSES = 32, 512  # threads count; a run of two ranks on CPU was seen with 22
OPEN_FILES_LEAST, OPEN_FILES = 64, 1024  # a run of two ranks ended well with 64, and not with 32
PORTS = 1024
DRIFT_S = 0.05
BEHIND_S = 60.0
RESOLVE_S = 2.0
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)


class CheckState(StrEnum):
    OK = "ok"
    WARN = "warn"  # runs work; something will be slower, coarser or surprising
    MISSING = "missing"  # an optional thing is not installed
    BROKEN = "broken"  # a run cannot work, or evidence will be lost


@dataclass(frozen=True, kw_only=True)
class CheckLine:
    """One check: its fact, and what to do if its state is not ok."""

    name: str
    state: CheckState
    fact: str
    advice: str | None = None


Checked = tuple[CheckState, str, str | None]  # the state, the fact, and what to do unless all is well
_OK, _WARN, _MISSING, _BROKEN = CheckState
_STATE_WIDTH = max(map(len, CheckState))
_WIDEST = 1000
_RELEASE = re.compile(r"(\d+)\.(\d+)")
_FOR_GPU, _FOR_FLASH = "pip install 'nsa-harness[gpu]'", "pip install 'nsa-harness[flash]', needs a GPU"


def check_lines(facts: MachineCheckFacts) -> tuple[CheckLine, ...]:
    """Return every line, in the order in which they are shown."""
    torch, gpu, limits = facts.torch, facts.gpu, facts.limits
    if isinstance(torch, UnknownFacts):
        cuda = "install it in this environment: pip install 'torch>=2.11', or the build for your CUDA from pytorch.org"
        unknown: Checked = (_BROKEN, "not asked: torch cannot be imported", "mend the line torch first")
        of_torch = {"torch": (_BROKEN, torch.why, cuda), **dict.fromkeys(("torchrun", "gloo", "nccl"), unknown)}
    else:
        of_torch = {
            "torch": torch.check(),
            "torchrun": torch.check_torchrun(),
            "gloo": torch.check_gloo(),
            "nccl": torch.check_nccl(gpu),
        }
    checks: dict[str, Checked] = {
        "probe": facts.python.check(),
        **of_torch,
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
        "nvidia-ml-py": facts.nvml.check("torch.cuda.utilization (the harness asks nvidia-smi)", _FOR_GPU),
        "slurm": facts.slurm.check(),
    }
    return tuple(
        CheckLine(name=name, state=state, fact=fact, advice=advice) for name, (state, fact, advice) in checks.items()
    )


def is_healthy(lines: Sequence[CheckLine]) -> bool:
    """Whether runs work here and their evidence is kept."""
    return all(line.state is not CheckState.BROKEN for line in lines)


def lines_text(lines: Sequence[CheckLine]) -> Iterator[str]:
    """Yield each line as text, what to do below each line that is not ok, and the verdict last."""
    width = max(map(len, (line.name for line in lines)), default=0)
    for line in lines:
        yield visible(f"{line.state:<{_STATE_WIDTH}} {line.name:<{width}}  {line.fact}", _WIDEST)
        if line.advice is not None:
            yield visible(f"{'':<{_STATE_WIDTH}} {'':<{width}}  do: {line.advice}", _WIDEST)
    broken = [line.name for line in lines if line.state is CheckState.BROKEN]
    yield ""
    if broken:
        yield f"broken: {', '.join(broken)}; runs cannot work here, or evidence will be lost, until that is mended"
    else:
        yield "runs work here, and their evidence is kept"


def lines_for_json(lines: Sequence[CheckLine]) -> dict[str, object]:
    """Return the lines for JSON."""
    return {"schema": 1, "healthy": is_healthy(lines), "lines": [vars(line) for line in lines]}


def size_text(size_bytes: int) -> str:
    """Return "23.9 GiB", "64 MiB" or "512 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            share = size_bytes / unit
            return f"{share:.0f} {name}" if share >= 100 or share == int(share) else f"{share:.1f} {name}"
    return f"{size_bytes} B"


def _enough(amount: int, fact: str, advice: str, *levels: tuple[CheckState, int, str]) -> Checked:
    """Return the first level that `amount` stays below, with the consequence after the fact."""
    for state, least, consequence in levels:
        if amount < least:
            return state, fact + consequence, advice
    return _OK, fact, None


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))


# Facts, each with its check.


@dataclass(frozen=True, kw_only=True)
class UnknownFacts:
    """A fact that could not be measured, and why."""

    why: str


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    version: str
    probe_trouble: str | None  # why the probe does not get into a child process

    def check(self) -> Checked:
        if self.probe_trouble is None:
            return _OK, f"rides in a child of Python {self.version}", None
        return (
            _BROKEN,
            f"does not get into a child of Python {self.version}: {self.probe_trouble}",
            "look for a sitecustomize.py or a .pth file that ends the interpreter's start, or run with --probe=off "
            "(verdicts then rest on stacks and bytes alone)",
        )


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs that nvidia-smi lists, and those that a rank would see."""

    installed: tuple[str, ...] | None  # None without nvidia-smi
    visible: tuple[str, ...]
    driver: str | None
    chosen: str | None  # CUDA_VISIBLE_DEVICES
    trouble: str | None

    def check(self, torch: TorchFacts | UnknownFacts) -> Checked:
        if self.trouble:
            advice = "reboot after a driver update, or reinstall the driver; until then runs take their CPU form"
            return _WARN, f"nvidia-smi fails: {self.trouble}", advice
        if not self.installed:
            fact = "none: no nvidia-smi" if self.installed is None else "nvidia-smi lists none"
            return _MISSING, fact, "nothing: scenarios take their CPU form and say so; those that need a GPU are SKIP"
        fact = f"{_counted(self.installed)}, driver {self.driver or 'unknown'}"
        if not self.visible:
            hidden = f"{fact}, hidden by CUDA_VISIBLE_DEVICES={self.chosen or ''}"
            return _WARN, hidden, "unset CUDA_VISIBLE_DEVICES to use them"
        if isinstance(torch, TorchFacts) and torch.devices < len(self.visible):
            fact = f"{fact}, but torch can use {torch.devices} of {len(self.visible)}"
            build = "install the torch build for this driver's CUDA (pytorch.org)"
            return _BROKEN, fact, f"{build}, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return _OK, fact, None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    version: str
    cuda: str | None  # the CUDA version torch was built with
    devices: int  # GPUs that torch can use
    gloo: bool
    nccl: str | None  # its version; None if torch was built without it
    torchrun_trouble: str | None

    def check(self) -> Checked:
        built = f"{self.version}, built for {f'CUDA {self.cuda}' if self.cuda else 'CPU only'}"
        match = _RELEASE.match(self.version)
        release = (int(match[1]), int(match[2])) if match else None
        oldest, newest = (".".join(map(str, known)) for known in (OLDEST_TORCH, NEWEST_TORCH))
        if release is not None and release < OLDEST_TORCH:
            return _BROKEN, f"{built}; supported are {oldest} to {newest}", f"upgrade: pip install -U 'torch>={oldest}'"
        if release is None or release > NEWEST_TORCH:
            advice = "run `nsa-harness selftest`: if every line is right, this version can be trusted"
            return _WARN, f"{built}; tested are {oldest} to {newest}", advice
        return _OK, built, None

    def check_torchrun(self) -> Checked:
        if self.torchrun_trouble is None:
            return _OK, "torch.distributed.run is importable", None
        advice = "reinstall torch: pip install --force-reinstall torch"
        return _BROKEN, f"torch.distributed.run: {self.torchrun_trouble}", advice

    def check_gloo(self) -> Checked:
        if self.gloo:
            return _OK, "in torch", None
        advice = "install an official build of torch: every scenario on CPU uses gloo"
        return _BROKEN, "torch was built without it", advice

    def check_nccl(self, gpu: GpuFacts) -> Checked:
        if self.nccl:
            return _OK, f"{self.nccl}, in torch", None
        if gpu.visible:
            advice = "install a CUDA build of torch (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
            return _BROKEN, f"torch was built without it, and runs would choose it for {_counted(gpu.visible)}", advice
        advice = "nothing: without a GPU, scenarios take gloo, and those that need nccl are SKIP"
        return _MISSING, "torch was built without it", advice


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """An optional package: without `version` it was not found; with `trouble` it cannot be imported."""

    version: str | None
    trouble: str | None

    def check(self, serves: str, install: str) -> Checked:
        if self.version is None:
            return _MISSING, "not installed", f"only for {serves}: {install}"
        if self.trouble is not None:
            advice = f"reinstall it for this torch, or uninstall it ({serves} is off until then)"
            return _WARN, f"{self.version} is installed and cannot be imported: {self.trouble}", advice
        return _OK, f"{self.version}, importable", None


@dataclass(frozen=True, kw_only=True)
class PySpyFacts:
    path: str | None
    threads: int  # whose stacks it read in a child process
    trouble: str | None
    ptrace_scope: int | None  # None if the kernel has no Yama

    def check(self) -> Checked:
        if self.path is None:
            return _BROKEN, "not found beside this Python nor on PATH", "pip install py-spy"
        if self.threads:
            scope = "" if self.ptrace_scope is None else f" (ptrace_scope {self.ptrace_scope})"
            return _OK, f"reads the stacks of a child process{scope}", None
        scope = "" if self.ptrace_scope is None else f", kernel.yama.ptrace_scope is {self.ptrace_scope}"
        return (
            _BROKEN,
            f"cannot read the stacks of a child process: {self.trouble}{scope}",
            "in a container: docker run --cap-add SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=1; without it a "
            "HANG has only the stacks that the ranks can still tell of themselves",
        )


@dataclass(frozen=True, kw_only=True)
class SpaceFacts:
    """A directory that nsa-harness writes to."""

    path: str
    trouble: str | None  # why a file could not be written
    size_bytes: int
    free_bytes: int

    def check_shared_memory(self, temporary: SpaceFacts) -> Checked:
        if self.trouble and temporary.trouble:
            fact = f"{self.trouble}; nor can {temporary.path} be written: {temporary.trouble}"
            return _BROKEN, fact, f"make one of the two writable (chmod 1777 {self.path}): boards have no other place"
        if self.trouble:
            advice = f"chmod 1777 {self.path}, or mount a tmpfs there: marks on a disk cost more"
            return _WARN, f"{self.trouble}; boards go to {temporary.path}", advice
        needed = f"; boards need {size_text(BOARDS_BYTES)}, and a rank without one is watched blind"
        state, fact, remedy = _enough(
            self.free_bytes,
            f"{size_text(self.free_bytes)} free of {size_text(self.size_bytes)}",
            f"remove what lies in {self.path}, or enlarge it: docker run --shm-size=8g",
            (_BROKEN, BOARDS_BYTES, needed),
            (_WARN, SHARED_BYTES, f"; data loaders and NCCL want {size_text(SHARED_BYTES)} or more"),
        )
        return state, f"writable, {fact}" if state is _OK else fact, remedy

    def check_reports(self) -> Checked:
        if self.trouble:
            advice = "change to a directory you may write to, or give one with --out DIR"
            return _BROKEN, f"{self.path} cannot be written: {self.trouble}", advice
        return _enough(
            self.free_bytes,
            f"{self.path} is writable, {size_text(self.free_bytes)} free",
            "free some space, or give another place with --out DIR",
            (_BROKEN, REPORTS_LEAST_BYTES, ": evidence will be lost"),
            (_WARN, REPORTS_BYTES, "; a long run may fill it"),
        )


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """Limits of this process. None: no limit, or an unreadable one."""

    processes: int | None
    processes_used: int
    open_files: int | None
    core_bytes: int | None
    core_pattern: str
    address_space_bytes: int | None

    def check_processes(self) -> Checked:
        limit, used = self.processes, self.processes_used
        if limit is None:
            return _OK, "no limit", None
        left = max(0, limit - used)
        return _enough(
            left,
            f"{left} more may start (limit {limit}, {used} in use, threads included)",
            "raise it: ulimit -u, or pids.max of the container (docker run --pids-limit=-1)",
            (_BROKEN, PROCESSES_LEAST, ": ranks cannot start"),
            (_WARN, PROCESSES, ""),
        )

    def check_open_files(self) -> Checked:
        limit = self.open_files
        if limit is None:
            return _OK, "no limit", None
        return _enough(
            limit,
            f"{limit} a process",
            f"ulimit -n {64 * OPEN_FILES}",
            (_BROKEN, OPEN_FILES_LEAST, ": launcher and ranks run out of them"),
            (_WARN, OPEN_FILES, ": few for data loaders"),
        )

    def check_core_files(self) -> Checked:
        limit, pattern = self.core_bytes, self.core_pattern
        if limit == 0 or pattern.startswith("|"):
            fact = "off" if limit == 0 else f"handed to {pattern[1:].split(' ')[0]}"
            return _OK, f"{fact}; stacks of a crash come from the probe", None
        size = "as large as its memory" if limit is None else f"of up to {size_text(limit)}"
        fact = f"a rank that crashes writes a file {size} ({pattern}) and is quiet meanwhile"
        return _WARN, fact, "ulimit -c 0, unless you want them"

    def check_address_space(self) -> Checked:
        limit = self.address_space_bytes
        if limit is None:
            return _OK, "no limit", None
        means = ": torch maps far more than it uses"
        return _enough(
            limit, f"{size_text(limit)} a process", "ulimit -v unlimited", (_WARN, ADDRESS_SPACE_BYTES, means)
        )


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    total_bytes: int  # of the machine, or of the control group if that is less
    available_bytes: int

    def check(self) -> Checked:
        return _enough(
            self.available_bytes,
            f"{size_text(self.available_bytes)} available of {size_text(self.total_bytes)}",
            "end other programs, or raise the memory limit of the container or job",
            (_BROKEN, MEMORY_LEAST_BYTES, "; two ranks of the smallest shape would be killed"),
            (_WARN, MEMORY_BYTES, "; enough for the smallest shapes only"),
        )


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    usable: int
    quota: float | None  # cores' worth of time that the control group grants; None = no quota

    def check(self) -> Checked:
        usable, quota = self.usable, self.quota
        fact = f"{usable} usable" if usable > 1 else "1 usable: all ranks share it"
        if quota is not None and quota < usable:
            advice = "raise the CPU quota of the container or job, or run fewer ranks: throttled ranks look slow"
            return _WARN, f"{fact}, but the control group grants the time of {quota:g}", advice
        if usable == 1:
            advice = "give this process more cores (taskset, cpuset, --cpus-per-task): stalls are found later on one"
            return _WARN, fact, advice
        return _OK, fact, None


@dataclass(frozen=True, kw_only=True)
class NameFacts:
    """The name that torchrun passes to the ranks as MASTER_ADDR."""

    hostname: str
    addresses: tuple[str, ...]
    bindable: tuple[str, ...]
    took_s: float  # to resolve it
    trouble: str | None

    def check(self) -> Checked:
        if self.bindable:
            fact = f"{self.hostname} resolves to {', '.join(self.bindable)}, which can be bound"
            if self.took_s > RESOLVE_S:
                fact += f", but that took {self.took_s:.1f} s, and each rank asks several times"
                return _WARN, fact, f'put it first: echo "{self.bindable[0]} {self.hostname}" >> /etc/hosts'
            return _OK, fact, None
        wrong = self.trouble or "resolves to nothing"
        if self.addresses:
            wrong = f"resolves to {', '.join(self.addresses)}, which is no address of this machine"
        return (
            _BROKEN,
            f"{self.hostname}: {wrong}; torchrun gives this name to the ranks, which wait for it in vain",
            f'echo "127.0.0.1 {self.hostname}" >> /etc/hosts (docker run --add-host {self.hostname}:127.0.0.1)',
        )


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    wanted: str | None  # GLOO_SOCKET_IFNAME
    present: tuple[str, ...]

    def check(self) -> Checked:
        wanted, present = self.wanted, self.present
        there = ", ".join(present) or "none"
        if wanted is None:
            return _OK, f"chosen by gloo; there are {there}", None
        absent = [name for name in wanted.split(",") if name not in present]
        if absent:
            fact = f"GLOO_SOCKET_IFNAME names {', '.join(absent)}; there are {there}"
            return _BROKEN, fact, "set GLOO_SOCKET_IFNAME to one of them, or unset it"
        return _OK, f"{wanted}, by GLOO_SOCKET_IFNAME", None


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    trouble: str | None  # why a port of this machine could not be bound and reached
    first: int
    last: int

    def check(self) -> Checked:
        if self.trouble:
            advice = "bring up the loopback interface (ip link set lo up), and look for a sandbox or firewall"
            return _BROKEN, f"no port of 127.0.0.1 can be bound and reached: {self.trouble}", advice
        count = max(0, self.last - self.first + 1)
        return _enough(
            count,
            f"bound and reached one; {count} to choose from ({self.first}-{self.last})",
            'sysctl net.ipv4.ip_local_port_range="32768 60999"',
            (_WARN, PORTS, ", few for many ranks"),
        )


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    over_s: float  # how long the clocks were compared
    backwards: int  # readings of the monotonic clock that went back
    drift_s: float  # difference between wall clock and monotonic clock
    behind_s: float  # how far the wall clock is behind the latest file of nsa-harness

    def check(self) -> Checked:
        if self.backwards:
            fact = (
                f"the monotonic clock went back {self.backwards} times in {self.over_s:.1f} s: no limit can be trusted"
            )
            advice = "this is the kernel or the hypervisor: choose another clock source (clocksource=hpet), or machine"
            return _BROKEN, fact, advice
        if self.behind_s > BEHIND_S:
            fact = f"the wall clock lies {self.behind_s:.0f} s behind the newest file of this installation"
            return _WARN, fact, "set it (timedatectl, ntp): run ids and CI logs carry its time; verdicts do not"
        if abs(self.drift_s) > DRIFT_S:
            fact = f"the wall clock was set or stepped by {self.drift_s:+.3f} s within {self.over_s:.1f} s"
            return _WARN, fact, "let the time service settle; verdicts use the monotonic clock and hold"
        drift = f"{abs(self.drift_s) * 1000:.1f} ms over {self.over_s:.1f} s"
        return _OK, f"monotonic; the wall clock kept within {drift}", None


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    version: str | None  # None if sinfo is not installed or does not answer
    absent: tuple[str, ...]  # of sinfo, scontrol and srun
    job: str | None
    trouble: str | None

    def check(self) -> Checked:
        job = f", inside job {self.job}" if self.job else ", not inside a job"
        if self.job is None and len(self.absent) == 3:
            return _MISSING, "no sinfo, scontrol or srun", "only for clusters: run on a login node, or inside a job"
        if self.absent:
            advice = "load the Slurm module of this cluster, so that all three commands are on PATH"
            return _WARN, f"no {', '.join(self.absent)} on PATH{job}", advice
        if self.trouble:
            return _WARN, f"sinfo fails: {self.trouble}{job}", "ask `sinfo` yourself; the controller may be down"
        return _OK, f"{self.version}{job}", None


@dataclass(frozen=True, kw_only=True)
class LeftOver:
    """A directory of status files whose run has no living process."""

    path: str
    size_bytes: int


def _check_left_over(left_over: Sequence[LeftOver]) -> Checked:
    if not left_over:
        return _OK, "no boards without a run", None
    size = size_text(sum(item.size_bytes for item in left_over))
    paths = [item.path for item in left_over]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    fact = f"boards of runs that no longer live: {', '.join(paths[:3])}{more}, {size}"
    return _WARN, fact, f"rm -r {' '.join(paths)}"


@dataclass(frozen=True, kw_only=True)
class MachineCheckFacts:
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
