"""The lines of `doctor` on the machine itself: memory, limits, network, clock, directories."""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.health.checkup_facts import Facts, Line, SpaceFacts, State, size_text
from harness.protocol import BOARD_SIZE

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
        return Line(name=name, state=State.BROKEN, fact=fact, advice=advice)
    if memory.trouble:
        fact = f"{memory.trouble}; boards go to {temporary.path}"
        advice = f"chmod 1777 {memory.path}, or mount a tmpfs there: marks on a disk cost more"
        return Line(name=name, state=State.WARN, fact=fact, advice=advice)
    fact = f"{size_text(memory.free_bytes)} free of {size_text(memory.size_bytes)}"
    advice = f"remove what lies in {memory.path}, or enlarge it: docker run --shm-size=8g"
    if memory.free_bytes < BOARDS_BYTES:
        fact += f"; boards need {size_text(BOARDS_BYTES)}, and a rank without one is watched blind"
        return Line(name=name, state=State.BROKEN, fact=fact, advice=advice)
    if memory.free_bytes < SHARED_BYTES:
        fact += f"; data loaders and NCCL want {size_text(SHARED_BYTES)} or more"
        return Line(name=name, state=State.WARN, fact=fact, advice=advice)
    return Line(name=name, state=State.OK, fact=f"writable, {fact}")


def _reports(reports: SpaceFacts) -> Line:
    if reports.trouble:
        advice = "change to a directory you may write to, or give one with --out DIR"
        fact = f"{reports.path} cannot be written: {reports.trouble}"
        return Line(name="reports", state=State.BROKEN, fact=fact, advice=advice)
    fact = f"{reports.path} is writable, {size_text(reports.free_bytes)} free"
    advice = "free some space, or give another place with --out DIR"
    if reports.free_bytes < REPORTS_LEAST_BYTES:
        return Line(name="reports", state=State.BROKEN, fact=f"{fact}: evidence will be lost", advice=advice)
    if reports.free_bytes < REPORTS_BYTES:
        return Line(name="reports", state=State.WARN, fact=f"{fact}; a long run may fill it", advice=advice)
    return Line(name="reports", state=State.OK, fact=fact)


def _memory(facts: Facts) -> Line:
    available = facts.memory.available_bytes
    fact = f"{size_text(available)} available of {size_text(facts.memory.total_bytes)}"
    advice = "end other programs, or raise the memory limit of the container or job"
    if available < MEMORY_LEAST_BYTES:
        fact += "; two ranks of the smallest shape would be killed"
        return Line(name="memory", state=State.BROKEN, fact=fact, advice=advice)
    if available < MEMORY_BYTES:
        fact += "; enough for the smallest shapes only"
        return Line(name="memory", state=State.WARN, fact=fact, advice=advice)
    return Line(name="memory", state=State.OK, fact=fact)


def _cores(facts: Facts) -> Line:
    usable, quota = facts.cores.usable, facts.cores.quota
    fact = f"{usable} usable" if usable > 1 else "1 usable: all ranks share it"
    if quota is not None and quota < usable:
        fact += f", but the control group grants the time of {quota:g}"
        advice = "raise the CPU quota of the container or job, or run fewer ranks: throttled ranks look slow"
        return Line(name="cores", state=State.WARN, fact=fact, advice=advice)
    if usable == 1:
        advice = "give this process more cores (taskset, cpuset, --cpus-per-task): stalls are found later on one"
        return Line(name="cores", state=State.WARN, fact=fact, advice=advice)
    return Line(name="cores", state=State.OK, fact=fact)


def _processes(facts: Facts) -> Line:
    limit, used = facts.limits.processes, facts.limits.processes_used
    if limit is None:
        return Line(name="processes", state=State.OK, fact="no limit")
    left = max(0, limit - used)
    fact = f"{left} more may start (limit {limit}, {used} in use, threads included)"
    advice = "raise it: ulimit -u, or pids.max of the container (docker run --pids-limit=-1)"
    if left < PROCESSES_LEAST:
        return Line(name="processes", state=State.BROKEN, fact=f"{fact}: ranks cannot start", advice=advice)
    if left < PROCESSES:
        return Line(name="processes", state=State.WARN, fact=fact, advice=advice)
    return Line(name="processes", state=State.OK, fact=fact)


def _open_files(facts: Facts) -> Line:
    limit = facts.limits.open_files
    if limit is None:
        return Line(name="open files", state=State.OK, fact="no limit")
    fact, advice = f"{limit} a process", f"ulimit -n {64 * OPEN_FILES}"
    if limit < OPEN_FILES_LEAST:
        fact += ": launcher and ranks run out of them"
        return Line(name="open files", state=State.BROKEN, fact=fact, advice=advice)
    if limit < OPEN_FILES:
        return Line(name="open files", state=State.WARN, fact=f"{fact}: few for data loaders", advice=advice)
    return Line(name="open files", state=State.OK, fact=fact)


def _core_files(facts: Facts) -> Line:
    limit, pattern = facts.limits.core_bytes, facts.limits.core_pattern
    if limit == 0 or pattern.startswith("|"):
        fact = "off" if limit == 0 else f"handed to {pattern[1:].split(' ')[0]}"
        return Line(name="core files", state=State.OK, fact=f"{fact}; stacks of a crash come from the probe")
    size = "as large as its memory" if limit is None else f"of up to {size_text(limit)}"
    return Line(
        name="core files",
        state=State.WARN,
        fact=f"a rank that crashes writes a file {size} ({pattern}) and is quiet meanwhile",
        advice="ulimit -c 0, unless you want them",
    )


def _address_space(facts: Facts) -> Line:
    limit = facts.limits.address_space_bytes
    if limit is None or limit >= ADDRESS_SPACE_BYTES:
        fact = "no limit" if limit is None else f"{size_text(limit)} a process"
        return Line(name="address space", state=State.OK, fact=fact)
    fact = f"{size_text(limit)} a process: torch maps far more than it uses"
    return Line(name="address space", state=State.WARN, fact=fact, advice="ulimit -v unlimited")


def _hostname(facts: Facts) -> Line:
    name = facts.name
    if name.bindable:
        fact = f"{name.hostname} resolves to {', '.join(name.bindable)}, which can be bound"
        if name.took_s > RESOLVE_S:
            fact += f", but that took {name.took_s:.1f} s, and each rank asks several times"
            advice = f'put it first: echo "{name.bindable[0]} {name.hostname}" >> /etc/hosts'
            return Line(name="hostname", state=State.WARN, fact=fact, advice=advice)
        return Line(name="hostname", state=State.OK, fact=fact)
    wrong = name.trouble or "resolves to nothing"
    if name.addresses:
        wrong = f"resolves to {', '.join(name.addresses)}, which is no address of this machine"
    return Line(
        name="hostname",
        state=State.BROKEN,
        fact=f"{name.hostname}: {wrong}; torchrun gives this name to the ranks, which wait for it in vain",
        advice=f'echo "127.0.0.1 {name.hostname}" >> /etc/hosts (docker run --add-host {name.hostname}:127.0.0.1)',
    )


def _interface(facts: Facts) -> Line:
    wanted, present = facts.interface.wanted, facts.interface.present
    there = ", ".join(present) or "none"
    if wanted is None:
        return Line(name="interface", state=State.OK, fact=f"chosen by gloo; there are {there}")
    absent = [name for name in wanted.split(",") if name not in present]
    if absent:
        fact = f"GLOO_SOCKET_IFNAME names {', '.join(absent)}; there are {there}"
        advice = "set GLOO_SOCKET_IFNAME to one of them, or unset it"
        return Line(name="interface", state=State.BROKEN, fact=fact, advice=advice)
    return Line(name="interface", state=State.OK, fact=f"{wanted}, by GLOO_SOCKET_IFNAME")


def _ports(facts: Facts) -> Line:
    ports = facts.ports
    count = max(0, ports.last - ports.first + 1)
    if ports.trouble:
        advice = "bring up the loopback interface (ip link set lo up), and look for a sandbox or firewall"
        fact = f"no port of 127.0.0.1 can be bound and reached: {ports.trouble}"
        return Line(name="ports", state=State.BROKEN, fact=fact, advice=advice)
    fact = f"bound and reached one; {count} to choose from ({ports.first}-{ports.last})"
    if count < PORTS:
        advice = 'sysctl net.ipv4.ip_local_port_range="32768 60999"'
        return Line(name="ports", state=State.WARN, fact=f"{fact}, few for many ranks", advice=advice)
    return Line(name="ports", state=State.OK, fact=fact)


def _clock(facts: Facts) -> Line:
    clock = facts.clock
    if clock.backwards:
        fact = f"the monotonic clock went back {clock.backwards} times in {clock.over_s:.1f} s: no limit can be trusted"
        advice = "this is the kernel or the hypervisor: choose another clock source (clocksource=hpet), or machine"
        return Line(name="clock", state=State.BROKEN, fact=fact, advice=advice)
    if clock.behind_s > BEHIND_S:
        fact = f"the wall clock lies {clock.behind_s:.0f} s behind the newest file of this installation"
        advice = "set it (timedatectl, ntp): run ids and CI logs carry its time; verdicts do not"
        return Line(name="clock", state=State.WARN, fact=fact, advice=advice)
    if abs(clock.drift_s) > DRIFT_S:
        fact = f"the wall clock was set or stepped by {clock.drift_s:+.3f} s within {clock.over_s:.1f} s"
        advice = "let the time service settle; verdicts use the monotonic clock and hold"
        return Line(name="clock", state=State.WARN, fact=fact, advice=advice)
    fact = f"monotonic; the wall clock kept within {abs(clock.drift_s) * 1000:.1f} ms over {clock.over_s:.1f} s"
    return Line(name="clock", state=State.OK, fact=fact)


def _left_over(facts: Facts) -> Line:
    if not facts.left_over:
        return Line(name="left over", state=State.OK, fact="no boards without a run")
    size = size_text(sum(item.size_bytes for item in facts.left_over))
    paths = [item.path for item in facts.left_over]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return Line(
        name="left over",
        state=State.WARN,
        fact=f"boards of runs that no longer live: {', '.join(paths[:3])}{more}, {size}",
        advice=f"rm -r {' '.join(paths)}",
    )
