"""From what `doctor` measured to what it says: one line a thing, each with what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nsa_harness.core.doctor.facts import (
    CheckState,
    Facts,
    GpuFacts,
    Line,
    ModuleFacts,
    SpaceFacts,
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


def lines(facts: Facts) -> Iterator[Line]:
    yield _shared_memory(facts.shared_memory, facts.temporary)
    yield _reports(facts.reports)
    yield _memory(facts)
    yield _cores(facts)
    yield _processes(facts)
    yield _open_files(facts)
    yield _core_files(facts)
    yield _address_space(facts)
    yield _hostname(facts)
    yield _interface(facts)
    yield _ports(facts)
    yield _clock(facts)
    yield _left_over(facts)


def _shared_memory(memory: SpaceFacts, temporary: SpaceFacts) -> Line:
    name = "/dev/shm"
    if memory.trouble and temporary.trouble:
        fact = f"{memory.trouble}; nor can {temporary.path} be written: {temporary.trouble}"
        advice = f"make one of the two writable (chmod 1777 {memory.path}): boards have no other place"
        return Line(name=name, state=CheckState.BROKEN, fact=fact, advice=advice)
    if memory.trouble:
        fact = f"{memory.trouble}; boards go to {temporary.path}"
        advice = f"chmod 1777 {memory.path}, or mount a tmpfs there: marks on a disk cost more"
        return Line(name=name, state=CheckState.WARN, fact=fact, advice=advice)
    fact = f"{size_text(memory.free_bytes)} free of {size_text(memory.size_bytes)}"
    advice = f"remove what lies in {memory.path}, or enlarge it: docker run --shm-size=8g"
    if memory.free_bytes < BOARDS_BYTES:
        fact += f"; boards need {size_text(BOARDS_BYTES)}, and a rank without one is watched blind"
        return Line(name=name, state=CheckState.BROKEN, fact=fact, advice=advice)
    if memory.free_bytes < SHARED_BYTES:
        fact += f"; data loaders and NCCL want {size_text(SHARED_BYTES)} or more"
        return Line(name=name, state=CheckState.WARN, fact=fact, advice=advice)
    return Line(name=name, state=CheckState.OK, fact=f"writable, {fact}")


def _reports(reports: SpaceFacts) -> Line:
    if reports.trouble:
        advice = "change to a directory you may write to, or give one with --out DIR"
        fact = f"{reports.path} cannot be written: {reports.trouble}"
        return Line(name="reports", state=CheckState.BROKEN, fact=fact, advice=advice)
    fact = f"{reports.path} is writable, {size_text(reports.free_bytes)} free"
    advice = "free some space, or give another place with --out DIR"
    if reports.free_bytes < REPORTS_LEAST_BYTES:
        return Line(name="reports", state=CheckState.BROKEN, fact=f"{fact}: evidence will be lost", advice=advice)
    if reports.free_bytes < REPORTS_BYTES:
        return Line(name="reports", state=CheckState.WARN, fact=f"{fact}; a long run may fill it", advice=advice)
    return Line(name="reports", state=CheckState.OK, fact=fact)


def _memory(facts: Facts) -> Line:
    available = facts.memory.available_bytes
    fact = f"{size_text(available)} available of {size_text(facts.memory.total_bytes)}"
    advice = "end other programs, or raise the memory limit of the container or job"
    if available < MEMORY_LEAST_BYTES:
        fact += "; two ranks of the smallest shape would be killed"
        return Line(name="memory", state=CheckState.BROKEN, fact=fact, advice=advice)
    if available < MEMORY_BYTES:
        fact += "; enough for the smallest shapes only"
        return Line(name="memory", state=CheckState.WARN, fact=fact, advice=advice)
    return Line(name="memory", state=CheckState.OK, fact=fact)


def _cores(facts: Facts) -> Line:
    usable, quota = facts.cores.usable, facts.cores.quota
    fact = f"{usable} usable" if usable > 1 else "1 usable: all ranks share it"
    if quota is not None and quota < usable:
        fact += f", but the control group grants the time of {quota:g}"
        advice = "raise the CPU quota of the container or job, or run fewer ranks: throttled ranks look slow"
        return Line(name="cores", state=CheckState.WARN, fact=fact, advice=advice)
    if usable == 1:
        advice = "give this process more cores (taskset, cpuset, --cpus-per-task): stalls are found later on one"
        return Line(name="cores", state=CheckState.WARN, fact=fact, advice=advice)
    return Line(name="cores", state=CheckState.OK, fact=fact)


def _processes(facts: Facts) -> Line:
    limit, used = facts.limits.processes, facts.limits.processes_used
    if limit is None:
        return Line(name="processes", state=CheckState.OK, fact="no limit")
    left = max(0, limit - used)
    fact = f"{left} more may start (limit {limit}, {used} in use, threads included)"
    advice = "raise it: ulimit -u, or pids.max of the container (docker run --pids-limit=-1)"
    if left < PROCESSES_LEAST:
        return Line(name="processes", state=CheckState.BROKEN, fact=f"{fact}: ranks cannot start", advice=advice)
    if left < PROCESSES:
        return Line(name="processes", state=CheckState.WARN, fact=fact, advice=advice)
    return Line(name="processes", state=CheckState.OK, fact=fact)


def _open_files(facts: Facts) -> Line:
    limit = facts.limits.open_files
    if limit is None:
        return Line(name="open files", state=CheckState.OK, fact="no limit")
    fact, advice = f"{limit} a process", f"ulimit -n {64 * OPEN_FILES}"
    if limit < OPEN_FILES_LEAST:
        fact += ": launcher and ranks run out of them"
        return Line(name="open files", state=CheckState.BROKEN, fact=fact, advice=advice)
    if limit < OPEN_FILES:
        return Line(name="open files", state=CheckState.WARN, fact=f"{fact}: few for data loaders", advice=advice)
    return Line(name="open files", state=CheckState.OK, fact=fact)


def _core_files(facts: Facts) -> Line:
    limit, pattern = facts.limits.core_bytes, facts.limits.core_pattern
    if limit == 0 or pattern.startswith("|"):
        fact = "off" if limit == 0 else f"handed to {pattern[1:].split(' ')[0]}"
        return Line(name="core files", state=CheckState.OK, fact=f"{fact}; stacks of a crash come from the probe")
    size = "as large as its memory" if limit is None else f"of up to {size_text(limit)}"
    return Line(
        name="core files",
        state=CheckState.WARN,
        fact=f"a rank that crashes writes a file {size} ({pattern}) and is quiet meanwhile",
        advice="ulimit -c 0, unless you want them",
    )


def _address_space(facts: Facts) -> Line:
    limit = facts.limits.address_space_bytes
    if limit is None or limit >= ADDRESS_SPACE_BYTES:
        fact = "no limit" if limit is None else f"{size_text(limit)} a process"
        return Line(name="address space", state=CheckState.OK, fact=fact)
    fact = f"{size_text(limit)} a process: torch maps far more than it uses"
    return Line(name="address space", state=CheckState.WARN, fact=fact, advice="ulimit -v unlimited")


def _hostname(facts: Facts) -> Line:
    name = facts.name
    if name.bindable:
        fact = f"{name.hostname} resolves to {', '.join(name.bindable)}, which can be bound"
        if name.took_s > RESOLVE_S:
            fact += f", but that took {name.took_s:.1f} s, and each rank asks several times"
            advice = f'put it first: echo "{name.bindable[0]} {name.hostname}" >> /etc/hosts'
            return Line(name="hostname", state=CheckState.WARN, fact=fact, advice=advice)
        return Line(name="hostname", state=CheckState.OK, fact=fact)
    wrong = name.trouble or "resolves to nothing"
    if name.addresses:
        wrong = f"resolves to {', '.join(name.addresses)}, which is no address of this machine"
    return Line(
        name="hostname",
        state=CheckState.BROKEN,
        fact=f"{name.hostname}: {wrong}; torchrun gives this name to the ranks, which wait for it in vain",
        advice=f'echo "127.0.0.1 {name.hostname}" >> /etc/hosts (docker run --add-host {name.hostname}:127.0.0.1)',
    )


def _interface(facts: Facts) -> Line:
    wanted, present = facts.interface.wanted, facts.interface.present
    there = ", ".join(present) or "none"
    if wanted is None:
        return Line(name="interface", state=CheckState.OK, fact=f"chosen by gloo; there are {there}")
    absent = [name for name in wanted.split(",") if name not in present]
    if absent:
        fact = f"GLOO_SOCKET_IFNAME names {', '.join(absent)}; there are {there}"
        advice = "set GLOO_SOCKET_IFNAME to one of them, or unset it"
        return Line(name="interface", state=CheckState.BROKEN, fact=fact, advice=advice)
    return Line(name="interface", state=CheckState.OK, fact=f"{wanted}, by GLOO_SOCKET_IFNAME")


def _ports(facts: Facts) -> Line:
    ports = facts.ports
    count = max(0, ports.last - ports.first + 1)
    if ports.trouble:
        advice = "bring up the loopback interface (ip link set lo up), and look for a sandbox or firewall"
        fact = f"no port of 127.0.0.1 can be bound and reached: {ports.trouble}"
        return Line(name="ports", state=CheckState.BROKEN, fact=fact, advice=advice)
    fact = f"bound and reached one; {count} to choose from ({ports.first}-{ports.last})"
    if count < PORTS:
        advice = 'sysctl net.ipv4.ip_local_port_range="32768 60999"'
        return Line(name="ports", state=CheckState.WARN, fact=f"{fact}, few for many ranks", advice=advice)
    return Line(name="ports", state=CheckState.OK, fact=fact)


def _clock(facts: Facts) -> Line:
    clock = facts.clock
    if clock.backwards:
        fact = f"the monotonic clock went back {clock.backwards} times in {clock.over_s:.1f} s: no limit can be trusted"
        advice = "this is the kernel or the hypervisor: choose another clock source (clocksource=hpet), or machine"
        return Line(name="clock", state=CheckState.BROKEN, fact=fact, advice=advice)
    if clock.behind_s > BEHIND_S:
        fact = f"the wall clock lies {clock.behind_s:.0f} s behind the newest file of this installation"
        advice = "set it (timedatectl, ntp): run ids and CI logs carry its time; verdicts do not"
        return Line(name="clock", state=CheckState.WARN, fact=fact, advice=advice)
    if abs(clock.drift_s) > DRIFT_S:
        fact = f"the wall clock was set or stepped by {clock.drift_s:+.3f} s within {clock.over_s:.1f} s"
        advice = "let the time service settle; verdicts use the monotonic clock and hold"
        return Line(name="clock", state=CheckState.WARN, fact=fact, advice=advice)
    fact = f"monotonic; the wall clock kept within {abs(clock.drift_s) * 1000:.1f} ms over {clock.over_s:.1f} s"
    return Line(name="clock", state=CheckState.OK, fact=fact)


def _left_over(facts: Facts) -> Line:
    if not facts.left_over:
        return Line(name="left over", state=CheckState.OK, fact="no boards without a run")
    size = size_text(sum(item.size_bytes for item in facts.left_over))
    paths = [item.path for item in facts.left_over]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return Line(
        name="left over",
        state=CheckState.WARN,
        fact=f"boards of runs that no longer live: {', '.join(paths[:3])}{more}, {size}",
        advice=f"rm -r {' '.join(paths)}",
    )


OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)
_RELEASE = re.compile(r"(\d+)\.(\d+)")
_STATE_WIDTH = max(map(len, CheckState))
_WIDEST = 1000
_NEEDS_TORCH = "not asked: torch cannot be imported"


def judged(facts: Facts) -> tuple[Line, ...]:
    """Every line, in the order in which they are shown."""
    return (*_software(facts), *lines(facts), *_optional(facts))


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


def _software(facts: Facts) -> Iterator[Line]:
    torch = facts.torch
    yield _probe(facts)
    if isinstance(torch, Unknown):
        advice = (
            "install it in this environment: pip install 'torch>=2.11', or the build for your CUDA from pytorch.org"
        )
        yield Line(name="torch", state=CheckState.BROKEN, fact=torch.why, advice=advice)
        for name in ("torchrun", "gloo", "nccl"):
            yield Line(name=name, state=CheckState.BROKEN, fact=_NEEDS_TORCH, advice="mend the line torch first")
    else:
        yield _torch(torch)
        yield _torchrun(torch)
        yield _gloo(torch)
        yield _nccl(torch, facts.gpu)
    yield _gpu(facts.gpu, torch)
    yield _py_spy(facts)


def _optional(facts: Facts) -> Iterator[Line]:
    yield _module("triton", facts.triton, "kernels and torch.compile on a GPU", "pip install 'nsa-harness[gpu]'")
    yield _module("flash-attn", facts.flash_attn, "model.impl=flash", "pip install 'nsa-harness[flash]', needs a GPU")
    yield _module(
        "nvidia-ml-py",
        facts.nvml,
        "torch.cuda.utilization (the harness asks nvidia-smi)",
        "pip install 'nsa-harness[gpu]'",
    )
    yield _slurm(facts)


def _probe(facts: Facts) -> Line:
    python = facts.python
    if python.probe_trouble is None:
        return Line(name="probe", state=CheckState.OK, fact=f"rides in a child of Python {python.version}")
    return Line(
        name="probe",
        state=CheckState.BROKEN,
        fact=f"does not get into a child of Python {python.version}: {python.probe_trouble}",
        advice="look for a sitecustomize.py or a .pth file that ends the interpreter's start, or run with --probe=off "
        "(verdicts then rest on stacks and bytes alone)",
    )


def _torch(torch: TorchFacts) -> Line:
    built = f"{torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPU only'}"
    match = _RELEASE.match(torch.version)
    release = (int(match[1]), int(match[2])) if match else None
    known = f"{_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}"
    if release is not None and release < OLDEST_TORCH:
        advice = f"upgrade: pip install -U 'torch>={_dotted(OLDEST_TORCH)}'"
        return Line(name="torch", state=CheckState.BROKEN, fact=f"{built}; supported are {known}", advice=advice)
    if release is None or release > NEWEST_TORCH:
        advice = "run `nsa-harness selftest`: if every line is right, this version can be trusted"
        return Line(name="torch", state=CheckState.WARN, fact=f"{built}; tested are {known}", advice=advice)
    return Line(name="torch", state=CheckState.OK, fact=built)


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _torchrun(torch: TorchFacts) -> Line:
    if torch.torchrun_trouble is None:
        return Line(name="torchrun", state=CheckState.OK, fact="torch.distributed.run is importable")
    advice = "reinstall torch: pip install --force-reinstall torch"
    fact = f"torch.distributed.run: {torch.torchrun_trouble}"
    return Line(name="torchrun", state=CheckState.BROKEN, fact=fact, advice=advice)


def _gloo(torch: TorchFacts) -> Line:
    if torch.gloo:
        return Line(name="gloo", state=CheckState.OK, fact="in torch")
    advice = "install an official build of torch: every scenario on CPU uses gloo"
    return Line(name="gloo", state=CheckState.BROKEN, fact="torch was built without it", advice=advice)


def _nccl(torch: TorchFacts, gpu: GpuFacts) -> Line:
    if torch.nccl:
        return Line(name="nccl", state=CheckState.OK, fact=f"{torch.nccl}, in torch")
    if gpu.visible:
        advice = "install a CUDA build of torch (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
        fact = f"torch was built without it, and runs would choose it for {_counted(gpu.visible)}"
        return Line(name="nccl", state=CheckState.BROKEN, fact=fact, advice=advice)
    advice = "nothing: without a GPU, scenarios take gloo, and those that need nccl are SKIP"
    return Line(name="nccl", state=CheckState.MISSING, fact="torch was built without it", advice=advice)


def _gpu(gpu: GpuFacts, torch: TorchFacts | Unknown) -> Line:
    if gpu.trouble:
        advice = "reboot after a driver update, or reinstall the driver; until then runs take their CPU form"
        return Line(name="gpu", state=CheckState.WARN, fact=f"nvidia-smi fails: {gpu.trouble}", advice=advice)
    if not gpu.installed:
        fact = "none: no nvidia-smi" if gpu.installed is None else "nvidia-smi lists none"
        advice = "nothing: scenarios take their CPU form and say so; those that need a GPU are SKIP"
        return Line(name="gpu", state=CheckState.MISSING, fact=fact, advice=advice)
    fact = f"{_counted(gpu.installed)}, driver {gpu.driver or 'unknown'}"
    if not gpu.visible:
        fact += f", hidden by CUDA_VISIBLE_DEVICES={gpu.chosen or ''}"
        return Line(name="gpu", state=CheckState.WARN, fact=fact, advice="unset CUDA_VISIBLE_DEVICES to use them")
    if isinstance(torch, TorchFacts) and torch.devices < len(gpu.visible):
        fact += f", but torch can use {torch.devices} of {len(gpu.visible)}"
        advice = "install the torch build for this driver's CUDA (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return Line(name="gpu", state=CheckState.BROKEN, fact=fact, advice=advice)
    return Line(name="gpu", state=CheckState.OK, fact=fact)


def _counted(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)


def _py_spy(facts: Facts) -> Line:
    spy = facts.py_spy
    if spy.path is None:
        fact = "not found beside this Python nor on PATH"
        return Line(name="py-spy", state=CheckState.BROKEN, fact=fact, advice="pip install py-spy")
    if spy.threads:
        scope = "" if spy.ptrace_scope is None else f" (ptrace_scope {spy.ptrace_scope})"
        return Line(name="py-spy", state=CheckState.OK, fact=f"reads the stacks of a child process{scope}")
    scope = "" if spy.ptrace_scope is None else f", kernel.yama.ptrace_scope is {spy.ptrace_scope}"
    return Line(
        name="py-spy",
        state=CheckState.BROKEN,
        fact=f"cannot read the stacks of a child process: {spy.trouble}{scope}",
        advice="in a container: docker run --cap-add SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=1; without it a "
        "HANG has only the stacks that the ranks can still tell of themselves",
    )


def _module(name: str, module: ModuleFacts, serves: str, install: str) -> Line:
    if module.version is None:
        advice = f"only for {serves}: {install}"
        return Line(name=name, state=CheckState.MISSING, fact="not installed", advice=advice)
    if module.trouble is not None:
        fact = f"{module.version} is installed and cannot be imported: {module.trouble}"
        advice = f"reinstall it for this torch, or uninstall it ({serves} is off until then)"
        return Line(name=name, state=CheckState.WARN, fact=fact, advice=advice)
    return Line(name=name, state=CheckState.OK, fact=f"{module.version}, importable")


def _slurm(facts: Facts) -> Line:
    slurm = facts.slurm
    job = f", inside job {slurm.job}" if slurm.job else ", not inside a job"
    if slurm.job is None and len(slurm.absent) == 3:
        advice = "only for clusters: run on a login node, or inside a job"
        return Line(name="slurm", state=CheckState.MISSING, fact="no sinfo, scontrol or srun", advice=advice)
    if slurm.absent:
        advice = "load the Slurm module of this cluster, so that all three commands are on PATH"
        return Line(
            name="slurm", state=CheckState.WARN, fact=f"no {', '.join(slurm.absent)} on PATH{job}", advice=advice
        )
    if slurm.trouble:
        advice = "ask `sinfo` yourself; the controller may be down"
        return Line(name="slurm", state=CheckState.WARN, fact=f"sinfo fails: {slurm.trouble}{job}", advice=advice)
    return Line(name="slurm", state=CheckState.OK, fact=f"{slurm.version}{job}")
