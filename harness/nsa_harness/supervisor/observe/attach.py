"""Attaches to a running job that nsa-harness did not start, and observes its ranks.

No signal is sent to the job, and no process is stopped for longer than py-spy needs to read a stack. Nothing is written
except to NCCL's pipe, if a rank has this pipe.
"""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from nsa_harness import protocol
from nsa_harness.core.diagnosis.stall_note import first_snapshot
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.scenario.observed_job import starts_ranks
from nsa_harness.core.verdict.limits import STALL_FLOOR_S
from nsa_harness.core.verdict.proof import SETTLE_S
from nsa_harness.core.verdict.verdict import moving_ranks
from nsa_harness.errors import NoSuchJob
from nsa_harness.supervisor.capture import descriptors, procfs
from nsa_harness.supervisor.capture.descriptors import SocketTable, socket_inodes
from nsa_harness.supervisor.capture.procfs import path_in_process, pid_in_namespace
from nsa_harness.supervisor.capture.recorder import find_own_server
from nsa_harness.supervisor.capture.stacks import py_spy
from nsa_harness.supervisor.observe.ranks import is_python_command, rank_of, ranks_below
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.watch.ranks import Ranks
from nsa_harness.supervisor.watch.watch import Watch, WatchListener, WatchPolicy
from nsa_harness.texts.words import duration, plural

_SNAPSHOT_S = SETTLE_S + 0.1
_COMMAND_LIMIT = 120  # limit in characters for a command
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# The probe files that the observer may use. If it could see faulthandler's file, it would send a signal to get stacks.
_VISIBLE_FILES = (protocol.STATUS_FILE, protocol.FLIGHT, protocol.VALUES, protocol.SOCKET)
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_NO_PTRACE = ("permission denied", "operation not permitted", "eperm")


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A running job that was found through the pid of one of its processes."""

    pid: int  # the process that the user named
    ranks: Mapping[int, int]
    probe_dir: Path | None  # the probe directory, if nsa-harness launched or observes the job
    origin_ns: int  # start time of the oldest rank, on the monotonic clock
    missing_ranks: Mapping[int, int | None] = field(default_factory=dict)  # rank without a process -> exit code


def find_job(pid: int) -> RunningJob:
    """Return the job of a process, its descendants and siblings. Raise NoSuchJob if there is none or no access."""
    stat = procfs.read_stat(pid)
    if stat is None or stat.state in "ZX":
        raise NoSuchJob(f"attach: no process {pid} is running here; `nsa-harness attach` without a PID finds your job")
    _check_readable(pid)
    jobs = find_jobs([stat, *procfs.descendants(pid)])
    if len(jobs) > 1:
        raise NoSuchJob(describe_jobs(jobs, f"below process {pid}"))
    ranks = _with_siblings(pid, stat.parent, ranks_below(pid))
    if not ranks:
        command = " ".join(procfs.command_line(pid))[:120] or stat.command
        raise NoSuchJob(
            f"attach: process {pid} ({command}) is not a rank, and no process below it has RANK or torch;"
            " name torchrun, a rank, or a process above them"
        )
    _check_stacks(*min(ranks.items()))
    return RunningJob(
        pid=pid,
        ranks=ranks,
        probe_dir=_probe_directory(ranks),
        origin_ns=_start_ns(ranks),
        missing_ranks=_exit_codes(ranks, missing_ranks(ranks, procfs.environment(min(ranks.values())))),
    )


def missing_ranks(ranks: Collection[int], environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the ranks without a process, according to a rank's environment, or () for several nodes."""
    size = environment.get("WORLD_SIZE", "")
    if not size.isdigit() or environment.get("LOCAL_WORLD_SIZE") != size:
        return ()
    return tuple(rank for rank in range(int(size)) if rank not in ranks)


def _exit_codes(ranks: Mapping[int, int], missing: Sequence[int]) -> dict[int, int | None]:
    """Map each missing rank to its exit code, which is negative for a signal, or to None if it is unknown."""
    parents = {stat.parent for pid in ranks.values() if (stat := procfs.read_stat(pid))}
    ended_pids = sorted(stat.pid for parent in parents for stat in procfs.children(parent) if stat.state == "Z")
    if missing and len(ended_pids) == len(missing):  # the ranks were started in order
        return {rank: procfs.exit_status(pid) for rank, pid in zip(missing, ended_pids, strict=True)}
    # torchrun reaps ranks at once and ends the job if one fails, so a rank missing below torchrun exited with 0.
    have_agents = bool(parents) and all(starts_ranks(procfs.command_line(parent)) for parent in parents)
    return dict.fromkeys(missing, 0 if have_agents else None)


@dataclass(frozen=True, kw_only=True)
class FoundJob:
    """A job that was found because its processes have RANK in their environment."""

    pid: int  # pid of the launcher, or of the lowest rank if there is no launcher
    command: str
    ranks: int
    age_s: float

    @property
    def text(self) -> str:
        """A line about the job, such as "41872 2 ranks running for 3 min torchrun --nproc-per-node 2 train.py"."""
        return f"{self.pid}   {plural(self.ranks, 'rank')}   running for {duration(self.age_s)}   {self.command}"


def jobs_of_this_user() -> list[FoundJob]:
    """Return this user's jobs on this machine, with the latest job last."""
    return find_jobs(stat for pid in _own_processes() if (stat := procfs.read_stat(pid)))


def find_jobs(stats: Iterable[procfs.Stat]) -> list[FoundJob]:
    """Return the jobs to which the processes `stats` belong, with the latest job last."""
    ranks: dict[tuple[object, ...], list[procfs.Stat]] = {}
    living = {stat.pid: stat for stat in stats if stat.state not in "ZX"}
    rank_pids = {pid for pid in living if rank_of(pid) is not None}
    for pid in rank_pids:
        if living[pid].parent not in rank_pids:  # a rank's children inherit its environment
            ranks.setdefault((living[pid].parent, *_job_of(pid)), []).append(living[pid])
    return sorted(map(_describe_job, ranks.values()), key=lambda job: -job.age_s)


def describe_jobs(jobs: Sequence[FoundJob], where: str) -> str:
    lines = "".join(f"\n  {job.text}" for job in jobs)
    return f"attach: {len(jobs)} jobs run {where}; name one of them, such as `nsa-harness attach {jobs[0].pid}`:{lines}"


def only_job(jobs: Sequence[FoundJob]) -> int:
    """Return the pid of the only job. Raise NoSuchJob if there is no job or more than one."""
    if not jobs:
        raise NoSuchJob(
            "attach: no job of this user is running on this machine (no Python process has RANK in its environment);"
            " name a process: `nsa-harness attach PID`"
        )
    if len(jobs) > 1:
        raise NoSuchJob(describe_jobs(jobs, "on this machine"))
    return jobs[0].pid


def _own_processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and Path("/proc", name).stat().st_uid == os.getuid():
                yield int(name)


def _describe_job(ranks: Sequence[procfs.Stat]) -> FoundJob:
    first = min(ranks, key=lambda stat: (stat.start_ticks, stat.pid))
    has_launcher = starts_ranks(procfs.command_line(first.parent))
    pid = first.parent if has_launcher else min(ranks, key=lambda stat: rank_of(stat.pid) or 0).pid
    age_s = (time.monotonic_ns() - _start_ns(dict(enumerate(stat.pid for stat in ranks)))) / 1e9
    return FoundJob(pid=pid, command=_command_text(procfs.command_line(pid)), ranks=len(ranks), age_s=age_s)


def _command_text(words: Sequence[str]) -> str:
    """Return the command `words` as text, without the interpreter in front of torchrun."""
    arguments = words[1:] if len(words) > 1 and is_python_command(words) and words[1].endswith("/torchrun") else words
    return " ".join([PurePath(arguments[0]).name, *arguments[1:]])[:_COMMAND_LIMIT] if arguments else ""


def _check_readable(pid: int) -> None:
    try:
        Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        owner = _owner(pid)
        remedy = "not even by root" if os.geteuid() == 0 else f"`sudo nsa-harness attach {pid}`"
        container_pid = pid_in_namespace(pid)
        process = f"{pid} ({container_pid} in its container)" if container_pid != pid else f"{pid}"
        raise NoSuchJob(f"attach: process {process} belongs to {owner} and may not be inspected; {remedy}") from None
    except OSError:
        raise NoSuchJob(f"attach: process {pid} has just ended") from None


def _owner(pid: int) -> str:
    """Return the owner of a process as text for a message, such as "user ada"."""
    try:
        return f"user {psutil.Process(pid).username()}"
    except psutil.Error:
        return "another user"


def _check_stacks(rank: int, pid: int) -> None:
    """Raise NoSuchJob if nsa-harness cannot read the stack of a rank."""
    failures: list[str] = []
    py_spy(pid, ["--nonblocking"], failures)
    reasons = [failure for failure in failures if any(word in failure.lower() for word in _NO_PTRACE)]
    if not reasons or _has_worker_server(pid):
        return
    advice = "use sudo"
    with suppress(OSError):
        if _PTRACE_SCOPE.read_text().strip() != "0":
            advice += ", or allow it with `sysctl kernel.yama.ptrace_scope=0`"
    raise NoSuchJob(f"attach: the stack of rank {rank}, process {pid}, cannot be read: {reasons[0]}; {advice}")


def _has_worker_server(pid: int) -> bool:
    """Return whether the process has its own worker server, from which its stacks can be read."""
    sockets = SocketTable(owners={}).sockets_of(pid, socket_inodes(descriptors.open_descriptors(pid)))
    return find_own_server(pid, procfs.environment(pid), sockets) is not None


def _with_siblings(pid: int, parent: int, ranks: dict[int, int]) -> dict[int, int]:
    """Return all ranks of a job. If `pid` is its only known rank, find the others below `parent`."""
    if list(ranks.values()) != [pid] or rank_of(pid) is None:
        return ranks
    job = _job_of(pid)
    siblings = ranks_below(parent).items()
    return {rank: sibling for rank, sibling in siblings if _job_of(sibling) == job} or ranks


def _job_of(pid: int) -> tuple[str, ...]:
    environment = procfs.environment(pid)
    return tuple(environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))


def _probe_directory(ranks: Mapping[int, int]) -> Path | None:
    directories = ((pid, procfs.environment(pid).get(protocol.ENV_PROBE_DIRECTORY)) for pid in ranks.values())
    return next(
        (path for pid, directory in directories if directory and (path := path_in_process(pid, directory)).is_dir()),
        None,
    )


def _start_ns(ranks: Mapping[int, int]) -> int:
    """Return the time at which the oldest rank started, as a value of the monotonic clock in nanoseconds."""
    ticks = [stat.start_ticks for pid in ranks.values() if (stat := procfs.read_stat(pid))]
    since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.monotonic_ns() - max(0, since_boot_ns - min(ticks, default=0) * 10**9 // _CLOCK_TICKS)


@contextmanager
def passive_observer(job: RunningJob) -> Iterator[PassiveObserver]:
    """Yield an observer that watches the job without sending signals or starting a reaper."""
    with TemporaryDirectory(prefix="nsa-harness-attach-") as view:
        for pid in job.ranks.values() if job.probe_dir else ():
            for pattern in _VISIBLE_FILES:  # a rank names its files by its pid in its own namespace
                file = Path(job.probe_dir or "") / pattern.format(pid=pid_in_namespace(pid))
                (Path(view) / pattern.format(pid=pid)).symlink_to(file)
        yield PassiveObserver(job=job, origin_ns=job.origin_ns, probe_dir=Path(view))


@dataclass(kw_only=True)
class PassiveObserver:
    """A substitute for a reaper that reports the exits of ranks, but ignores all commands."""

    job: RunningJob
    origin_ns: int
    probe_dir: Path
    tag: str = ""
    has_probe: bool = False
    is_lost: bool = False
    _events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events.append({"event": "started", "pid": self.job.pid})
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        for pid in {self.job.pid, *self.job.ranks.values()}:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                self._watched[descriptor] = pid
                self._poll.register(descriptor, select.POLLIN)

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        if self._events:
            return [self._events.pop()]
        ready = [descriptor for descriptor, _ in self._poll.poll(wait_s * 1000)]
        for descriptor in ready:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        pids = [self._watched.pop(descriptor) for descriptor in ready]
        return [{"event": "exit", "pid": pid, "status": procfs.exit_status(pid)} for pid in pids]

    def send_command(self, **_: object) -> None:
        return


@dataclass(kw_only=True)
class KnownRanks(Ranks):
    """The ranks of a job that were found when nsa-harness attached to it."""

    known_pids: Mapping[int, int]

    def discover(self, launcher: int) -> list[tuple[int, int]]:  # noqa: ARG002
        new_ranks = sorted(self.known_pids.items()) if not self.pids else []
        self.pids.update(new_ranks)
        return new_ranks


def observe_until_decided(
    observer: PassiveObserver,
    spec: RunSpec,
    attempt: AttemptDir,
    listener: WatchListener,
    *,
    is_interrupted: Callable[[], bool],
    for_s: float,
) -> Ending:
    """Observe a job for at most `for_s` seconds, until it is proven to be stuck or makes progress."""

    def decide(now_s: float, limits: Limits) -> Ending | None:
        if not watch.is_due("look", now_s, _SNAPSHOT_S):
            return None
        watch.snapshots.take()
        if watch.snapshots.count == 1:
            listener.report_first_snapshot(
                first_snapshot(watch.snapshots.episode[-1], spec.backend, watch.ranks.exited_ranks)
            )
        if now_s - watch.ranks.last_progress_s() >= watch.stall_limit_s(limits) and watch.snapshots.proof(limits):
            watch.read_values()
            return Ending.STALL
        if now_s - watch.ranks.last_progress_s() >= STALL_FLOOR_S:
            watch.report_stall(now_s, limits)
        if moving_ranks(watch.snapshots.samples):
            return Ending.DETACHED
        if now_s - started_s < for_s:
            return None
        watch.read_values()
        return Ending.DETACHED

    ranks = functools.partial(KnownRanks, known_pids=observer.job.ranks)
    watch = Watch(
        job=observer,
        spec=spec,
        attempt=attempt,
        listener=listener,
        is_interrupted=is_interrupted,
        policy=WatchPolicy(find_ranks=ranks, decide=decide, is_observed=True, has_reaper=False),
    )
    watch.write("attached")
    for rank, status in observer.job.missing_ranks.items():
        watch.record_exit(rank, None, status)
    started_s = watch.now_s()
    ending = watch.run()
    _store_recorders(observer, attempt)
    return ending


def _store_recorders(observer: PassiveObserver, attempt: AttemptDir) -> None:
    """Store the flight recorder dumps from the job's own worker servers, if every server returned one."""
    files = [observer.probe_dir / protocol.FLIGHT.format(pid=pid) for pid in observer.job.ranks.values()]
    if not observer.job.probe_dir and all(file.exists() for file in files):
        attempt.directory.make_directory(attempt.probe_files)
        for file in files:
            attempt.directory.write(attempt.probe_files / file.name, file.read_text(errors="replace"))
