"""From what `doctor` measured to what it says: one line a thing, each with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from nsa_harness.core.doctor.facts import (
    CheckState,
    Facts,
    GpuFacts,
    Line,
    ModuleFacts,
    TorchFacts,
    Unknown,
    size_text,
)
from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.protocol import BOARD_SIZE

_MIB, _GIB = 1 << 20, 1 << 30
BOARDS_BYTES = 16 * BOARD_SIZE  # a rank that finds no room for its board runs without one
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

_RELEASE = re.compile(r"(\d+)\.(\d+)")
_STATE_WIDTH = max(map(len, CheckState))
_WIDEST = 1000
_OK, _WARN, _MISSING, _BROKEN = CheckState

_Said = tuple[CheckState, str, str | None]  # of one thing: the state, the fact, and what to do unless all is well


def judged(facts: Facts) -> tuple[Line, ...]:
    """Every line, in the order in which they are shown."""
    said = ((name, check(facts)) for name, check in _CHECKS.items())
    return tuple(Line(name=name, state=state, fact=fact, advice=advice) for name, (state, fact, advice) in said)


def healthy(lines: Sequence[Line]) -> bool:
    """Runs work here and their evidence is kept."""
    return all(line.state is not CheckState.BROKEN for line in lines)


def lines_text(lines: Sequence[Line]) -> Iterator[str]:
    """For people: what to do stands below each line that is not ok; the verdict comes last."""
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


def values(lines: Sequence[Line]) -> dict[str, object]:
    """For JSON."""
    shown = [{"name": line.name, "state": line.state.value, "fact": line.fact, "advice": line.advice} for line in lines]
    return {"schema": 1, "healthy": healthy(lines), "lines": shown}


def _enough(have: int, fact: str, advice: str, *levels: tuple[CheckState, int, str]) -> _Said:
    """The first level that there is less than, with what that means behind the fact."""
    for state, least, means in levels:
        if have < least:
            return state, fact + means, advice
    return _OK, fact, None


def _probe(facts: Facts) -> _Said:
    python = facts.python
    if python.probe_trouble is None:
        return _OK, f"rides in a child of Python {python.version}", None
    return (
        _BROKEN,
        f"does not get into a child of Python {python.version}: {python.probe_trouble}",
        "look for a sitecustomize.py or a .pth file that ends the interpreter's start, or run with --probe=off "
        "(verdicts then rest on stacks and bytes alone)",
    )


def _torch(facts: Facts) -> _Said:
    torch = facts.torch
    if isinstance(torch, Unknown):
        advice = (
            "install it in this environment: pip install 'torch>=2.11', or the build for your CUDA from pytorch.org"
        )
        return _BROKEN, torch.why, advice
    built = f"{torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPU only'}"
    match = _RELEASE.match(torch.version)
    release = (int(match[1]), int(match[2])) if match else None
    oldest, newest = (".".join(map(str, known)) for known in (OLDEST_TORCH, NEWEST_TORCH))
    if release is not None and release < OLDEST_TORCH:
        return _BROKEN, f"{built}; supported are {oldest} to {newest}", f"upgrade: pip install -U 'torch>={oldest}'"
    if release is None or release > NEWEST_TORCH:
        advice = "run `nsa-harness selftest`: if every line is right, this version can be trusted"
        return _WARN, f"{built}; tested are {oldest} to {newest}", advice
    return _OK, built, None


def _given_torch(check: Callable[[TorchFacts, GpuFacts], _Said]) -> Callable[[Facts], _Said]:
    def check_of(facts: Facts) -> _Said:
        if isinstance(facts.torch, Unknown):
            return _BROKEN, "not asked: torch cannot be imported", "mend the line torch first"
        return check(facts.torch, facts.gpu)

    return check_of


def _torchrun(torch: TorchFacts, _: GpuFacts) -> _Said:
    if torch.torchrun_trouble is None:
        return _OK, "torch.distributed.run is importable", None
    advice = "reinstall torch: pip install --force-reinstall torch"
    return _BROKEN, f"torch.distributed.run: {torch.torchrun_trouble}", advice


def _gloo(torch: TorchFacts, _: GpuFacts) -> _Said:
    if torch.gloo:
        return _OK, "in torch", None
    advice = "install an official build of torch: every scenario on CPU uses gloo"
    return _BROKEN, "torch was built without it", advice


def _nccl(torch: TorchFacts, gpu: GpuFacts) -> _Said:
    if torch.nccl:
        return _OK, f"{torch.nccl}, in torch", None
    if gpu.visible:
        advice = "install a CUDA build of torch (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return _BROKEN, f"torch was built without it, and runs would choose it for {_counted(gpu.visible)}", advice
    advice = "nothing: without a GPU, scenarios take gloo, and those that need nccl are SKIP"
    return _MISSING, "torch was built without it", advice


def _gpu(facts: Facts) -> _Said:
    gpu, torch = facts.gpu, facts.torch
    if gpu.trouble:
        advice = "reboot after a driver update, or reinstall the driver; until then runs take their CPU form"
        return _WARN, f"nvidia-smi fails: {gpu.trouble}", advice
    if not gpu.installed:
        fact = "none: no nvidia-smi" if gpu.installed is None else "nvidia-smi lists none"
        return _MISSING, fact, "nothing: scenarios take their CPU form and say so; those that need a GPU are SKIP"
    fact = f"{_counted(gpu.installed)}, driver {gpu.driver or 'unknown'}"
    if not gpu.visible:
        hidden = f"{fact}, hidden by CUDA_VISIBLE_DEVICES={gpu.chosen or ''}"
        return _WARN, hidden, "unset CUDA_VISIBLE_DEVICES to use them"
    if isinstance(torch, TorchFacts) and torch.devices < len(gpu.visible):
        advice = "install the torch build for this driver's CUDA (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return _BROKEN, f"{fact}, but torch can use {torch.devices} of {len(gpu.visible)}", advice
    return _OK, fact, None


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))


def _py_spy(facts: Facts) -> _Said:
    spy = facts.py_spy
    if spy.path is None:
        return _BROKEN, "not found beside this Python nor on PATH", "pip install py-spy"
    if spy.threads:
        scope = "" if spy.ptrace_scope is None else f" (ptrace_scope {spy.ptrace_scope})"
        return _OK, f"reads the stacks of a child process{scope}", None
    scope = "" if spy.ptrace_scope is None else f", kernel.yama.ptrace_scope is {spy.ptrace_scope}"
    return (
        _BROKEN,
        f"cannot read the stacks of a child process: {spy.trouble}{scope}",
        "in a container: docker run --cap-add SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=1; without it a "
        "HANG has only the stacks that the ranks can still tell of themselves",
    )


def _shared_memory(facts: Facts) -> _Said:
    memory, temporary = facts.shared_memory, facts.temporary
    if memory.trouble and temporary.trouble:
        fact = f"{memory.trouble}; nor can {temporary.path} be written: {temporary.trouble}"
        return _BROKEN, fact, f"make one of the two writable (chmod 1777 {memory.path}): boards have no other place"
    if memory.trouble:
        advice = f"chmod 1777 {memory.path}, or mount a tmpfs there: marks on a disk cost more"
        return _WARN, f"{memory.trouble}; boards go to {temporary.path}", advice
    needed = f"; boards need {size_text(BOARDS_BYTES)}, and a rank without one is watched blind"
    state, fact, remedy = _enough(
        memory.free_bytes,
        f"{size_text(memory.free_bytes)} free of {size_text(memory.size_bytes)}",
        f"remove what lies in {memory.path}, or enlarge it: docker run --shm-size=8g",
        (_BROKEN, BOARDS_BYTES, needed),
        (_WARN, SHARED_BYTES, f"; data loaders and NCCL want {size_text(SHARED_BYTES)} or more"),
    )
    return state, f"writable, {fact}" if state is _OK else fact, remedy


def _reports(facts: Facts) -> _Said:
    reports = facts.reports
    if reports.trouble:
        advice = "change to a directory you may write to, or give one with --out DIR"
        return _BROKEN, f"{reports.path} cannot be written: {reports.trouble}", advice
    return _enough(
        reports.free_bytes,
        f"{reports.path} is writable, {size_text(reports.free_bytes)} free",
        "free some space, or give another place with --out DIR",
        (_BROKEN, REPORTS_LEAST_BYTES, ": evidence will be lost"),
        (_WARN, REPORTS_BYTES, "; a long run may fill it"),
    )


def _memory(facts: Facts) -> _Said:
    memory = facts.memory
    return _enough(
        memory.available_bytes,
        f"{size_text(memory.available_bytes)} available of {size_text(memory.total_bytes)}",
        "end other programs, or raise the memory limit of the container or job",
        (_BROKEN, MEMORY_LEAST_BYTES, "; two ranks of the smallest shape would be killed"),
        (_WARN, MEMORY_BYTES, "; enough for the smallest shapes only"),
    )


def _cores(facts: Facts) -> _Said:
    usable, quota = facts.cores.usable, facts.cores.quota
    fact = f"{usable} usable" if usable > 1 else "1 usable: all ranks share it"
    if quota is not None and quota < usable:
        advice = "raise the CPU quota of the container or job, or run fewer ranks: throttled ranks look slow"
        return _WARN, f"{fact}, but the control group grants the time of {quota:g}", advice
    if usable == 1:
        advice = "give this process more cores (taskset, cpuset, --cpus-per-task): stalls are found later on one"
        return _WARN, fact, advice
    return _OK, fact, None


def _processes(facts: Facts) -> _Said:
    limit, used = facts.limits.processes, facts.limits.processes_used
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


def _open_files(facts: Facts) -> _Said:
    limit = facts.limits.open_files
    if limit is None:
        return _OK, "no limit", None
    return _enough(
        limit,
        f"{limit} a process",
        f"ulimit -n {64 * OPEN_FILES}",
        (_BROKEN, OPEN_FILES_LEAST, ": launcher and ranks run out of them"),
        (_WARN, OPEN_FILES, ": few for data loaders"),
    )


def _core_files(facts: Facts) -> _Said:
    limit, pattern = facts.limits.core_bytes, facts.limits.core_pattern
    if limit == 0 or pattern.startswith("|"):
        fact = "off" if limit == 0 else f"handed to {pattern[1:].split(' ')[0]}"
        return _OK, f"{fact}; stacks of a crash come from the probe", None
    size = "as large as its memory" if limit is None else f"of up to {size_text(limit)}"
    fact = f"a rank that crashes writes a file {size} ({pattern}) and is quiet meanwhile"
    return _WARN, fact, "ulimit -c 0, unless you want them"


def _address_space(facts: Facts) -> _Said:
    limit = facts.limits.address_space_bytes
    if limit is None:
        return _OK, "no limit", None
    means = ": torch maps far more than it uses"
    return _enough(limit, f"{size_text(limit)} a process", "ulimit -v unlimited", (_WARN, ADDRESS_SPACE_BYTES, means))


def _hostname(facts: Facts) -> _Said:
    name = facts.name
    if name.bindable:
        fact = f"{name.hostname} resolves to {', '.join(name.bindable)}, which can be bound"
        if name.took_s > RESOLVE_S:
            fact += f", but that took {name.took_s:.1f} s, and each rank asks several times"
            return _WARN, fact, f'put it first: echo "{name.bindable[0]} {name.hostname}" >> /etc/hosts'
        return _OK, fact, None
    wrong = name.trouble or "resolves to nothing"
    if name.addresses:
        wrong = f"resolves to {', '.join(name.addresses)}, which is no address of this machine"
    return (
        _BROKEN,
        f"{name.hostname}: {wrong}; torchrun gives this name to the ranks, which wait for it in vain",
        f'echo "127.0.0.1 {name.hostname}" >> /etc/hosts (docker run --add-host {name.hostname}:127.0.0.1)',
    )


def _interface(facts: Facts) -> _Said:
    wanted, present = facts.interface.wanted, facts.interface.present
    there = ", ".join(present) or "none"
    if wanted is None:
        return _OK, f"chosen by gloo; there are {there}", None
    absent = [name for name in wanted.split(",") if name not in present]
    if absent:
        fact = f"GLOO_SOCKET_IFNAME names {', '.join(absent)}; there are {there}"
        return _BROKEN, fact, "set GLOO_SOCKET_IFNAME to one of them, or unset it"
    return _OK, f"{wanted}, by GLOO_SOCKET_IFNAME", None


def _ports(facts: Facts) -> _Said:
    ports = facts.ports
    if ports.trouble:
        advice = "bring up the loopback interface (ip link set lo up), and look for a sandbox or firewall"
        return _BROKEN, f"no port of 127.0.0.1 can be bound and reached: {ports.trouble}", advice
    count = max(0, ports.last - ports.first + 1)
    return _enough(
        count,
        f"bound and reached one; {count} to choose from ({ports.first}-{ports.last})",
        'sysctl net.ipv4.ip_local_port_range="32768 60999"',
        (_WARN, PORTS, ", few for many ranks"),
    )


def _clock(facts: Facts) -> _Said:
    clock = facts.clock
    if clock.backwards:
        fact = f"the monotonic clock went back {clock.backwards} times in {clock.over_s:.1f} s: no limit can be trusted"
        advice = "this is the kernel or the hypervisor: choose another clock source (clocksource=hpet), or machine"
        return _BROKEN, fact, advice
    if clock.behind_s > BEHIND_S:
        fact = f"the wall clock lies {clock.behind_s:.0f} s behind the newest file of this installation"
        return _WARN, fact, "set it (timedatectl, ntp): run ids and CI logs carry its time; verdicts do not"
    if abs(clock.drift_s) > DRIFT_S:
        fact = f"the wall clock was set or stepped by {clock.drift_s:+.3f} s within {clock.over_s:.1f} s"
        return _WARN, fact, "let the time service settle; verdicts use the monotonic clock and hold"
    drift = f"{abs(clock.drift_s) * 1000:.1f} ms over {clock.over_s:.1f} s"
    return _OK, f"monotonic; the wall clock kept within {drift}", None


def _left_over(facts: Facts) -> _Said:
    if not facts.left_over:
        return _OK, "no boards without a run", None
    size = size_text(sum(item.size_bytes for item in facts.left_over))
    paths = [item.path for item in facts.left_over]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    fact = f"boards of runs that no longer live: {', '.join(paths[:3])}{more}, {size}"
    return _WARN, fact, f"rm -r {' '.join(paths)}"


def _module(module: ModuleFacts, serves: str, install: str) -> _Said:
    if module.version is None:
        return _MISSING, "not installed", f"only for {serves}: {install}"
    if module.trouble is not None:
        advice = f"reinstall it for this torch, or uninstall it ({serves} is off until then)"
        return _WARN, f"{module.version} is installed and cannot be imported: {module.trouble}", advice
    return _OK, f"{module.version}, importable", None


def _slurm(facts: Facts) -> _Said:
    slurm = facts.slurm
    job = f", inside job {slurm.job}" if slurm.job else ", not inside a job"
    if slurm.job is None and len(slurm.absent) == 3:
        return _MISSING, "no sinfo, scontrol or srun", "only for clusters: run on a login node, or inside a job"
    if slurm.absent:
        advice = "load the Slurm module of this cluster, so that all three commands are on PATH"
        return _WARN, f"no {', '.join(slurm.absent)} on PATH{job}", advice
    if slurm.trouble:
        return _WARN, f"sinfo fails: {slurm.trouble}{job}", "ask `sinfo` yourself; the controller may be down"
    return _OK, f"{slurm.version}{job}", None


_FOR_GPU, _FOR_FLASH = "pip install 'nsa-harness[gpu]'", "pip install 'nsa-harness[flash]', needs a GPU"
_NVML_SERVES = "torch.cuda.utilization (the harness asks nvidia-smi)"
_CHECKS: dict[str, Callable[[Facts], _Said]] = {
    "probe": _probe,
    "torch": _torch,
    "torchrun": _given_torch(_torchrun),
    "gloo": _given_torch(_gloo),
    "nccl": _given_torch(_nccl),
    "gpu": _gpu,
    "py-spy": _py_spy,
    "/dev/shm": _shared_memory,
    "reports": _reports,
    "memory": _memory,
    "cores": _cores,
    "processes": _processes,
    "open files": _open_files,
    "core files": _core_files,
    "address space": _address_space,
    "hostname": _hostname,
    "interface": _interface,
    "ports": _ports,
    "clock": _clock,
    "left over": _left_over,
    "triton": lambda facts: _module(facts.triton, "kernels and torch.compile on a GPU", _FOR_GPU),
    "flash-attn": lambda facts: _module(facts.flash_attn, "model.impl=flash", _FOR_FLASH),
    "nvidia-ml-py": lambda facts: _module(facts.nvml, _NVML_SERVES, _FOR_GPU),
    "slurm": _slurm,
}
