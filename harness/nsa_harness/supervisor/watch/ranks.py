"""Keeps track of the ranks of a running job: their processes, exits and status files."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import StatusFile
from nsa_harness.core.evidence.live import Progress, RankProgress
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.verdict.limits import has_started, last_progress_s
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.snapshot import StackSampler
from nsa_harness.supervisor.launch.launcher import JobProcesses, is_plain_command

# If a process has no status file after this time, it has no probe: a Python program with the probe writes its status
# file within milliseconds.
NO_STATUS_FILE_S = 5.0

# The calls that are read from each status file several times per second. They are enough to see whether a rank trains.
# Reading more would take CPU time from the ranks.
_LATEST_CALLS = 8


@dataclass(kw_only=True)
class Ranks:
    """The ranks of a running job and their state, read from /proc and status files without the ranks' help."""

    spec: RunSpec
    job: JobProcesses
    sampler: StackSampler
    pids: dict[int, int] = field(default_factory=dict)
    exited_ranks: set[int] = field(default_factory=set)
    status_files: dict[int, StatusFile | None] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)  # rank -> peak of its resident memory in bytes
    # For ranks without a status file: (bytes of I/O, time when they last increased).
    _bytes_moved: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def living_pids(self) -> dict[int, int]:
        """A map from each living rank to its pid."""
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.exited_ranks and procfs.is_alive(pid)}

    @property
    def all_started(self) -> bool:
        return len(self.status_files) == self.spec.ranks and all(map(has_started, self.status_files.values()))

    @property
    def has_other_hosts(self) -> bool:
        """Whether the job may have ranks on other hosts."""
        return False

    @property
    def is_starting(self) -> bool:
        return any(status is not None and not has_started(status) for status in self.status_files.values())

    @staticmethod
    def now_ns() -> int:
        return time.monotonic_ns()

    def mark_exited(self, pid: int) -> None:
        """Record that the process `pid` of a rank has exited."""
        self.exited_ranks |= {rank for rank, known_pid in self.pids.items() if known_pid == pid}

    def discover(self, launcher: int) -> list[tuple[int, int]]:
        """Find the processes of the ranks below the launcher. Return the rank and pid of each new process."""
        if len(self.pids) == self.spec.ranks and all(map(procfs.is_alive, self.pids.values())):
            return []
        new_ranks = [new for stat in procfs.descendants(launcher) if (new := self._new_rank(stat))]
        if not self.pids and self.spec.ranks == 1 and (pid := self._single_process(launcher)):
            self.pids[0] = pid
            new_ranks.append((0, pid))
        for rank, pid in new_ranks:
            self.job.send_command(do="watch", pid=pid, rank=rank)
        return new_ranks

    def _single_process(self, launcher: int) -> int | None:
        """Return the pid of the only rank of a launch, or None if it is not known yet.

        Without torchrun, the launched process itself is the rank, even if it has no status file.
        """
        candidates = [launcher, *(stat.pid for stat in procfs.descendants(launcher))]
        with_status_file = [
            pid for pid in candidates if (self.job.probe_dir / protocol.STATUS_FILE.format(pid=pid)).exists()
        ]
        waited_s = (self.now_ns() - self.job.origin_ns) / 1e9
        if with_status_file:
            return with_status_file[0]
        is_rank = is_plain_command(self.spec) and (not self.job.has_probe or waited_s > NO_STATUS_FILE_S)
        return launcher if is_rank else None

    def _new_rank(self, stat: procfs.Stat) -> tuple[int, int] | None:
        environment = procfs.environment(stat.pid)
        rank = environment.get("RANK", "")
        if not rank.isdigit() or environment.get(protocol.ENV_RUN) != self.job.tag:
            return None
        known_pid = self.pids.get(int(rank))
        if (
            known_pid == stat.pid
            or stat.parent in self.pids.values()
            or (known_pid is not None and procfs.is_alive(known_pid))
        ):
            return None
        self.pids[int(rank)] = stat.pid
        self.exited_ranks.discard(int(rank))
        return int(rank), stat.pid

    def read_status_files(self, now_s: float) -> None:
        """Update the progress of each living rank from its status file, or from its I/O if it has none."""
        for rank, pid in self.pids.items():
            if rank in self.exited_ranks:
                continue
            previous = self.status_files.get(rank)
            self.status_files[rank] = self.sampler.read_status_file(pid, _LATEST_CALLS)
            if self.status_files[rank] is None:
                io_bytes = procfs.task_io_bytes(pid, pid) or 0
                if previous is not None:  # a status file that is gone is no progress
                    self._bytes_moved[rank] = (io_bytes, last_progress_s(previous))
                elif rank not in self._bytes_moved:  # before nsa-harness attached, the job may have been idle for long
                    self._bytes_moved[rank] = (io_bytes, max(0.0, now_s - procfs.program_idle_s(pid)))
                elif io_bytes != self._bytes_moved[rank][0]:
                    self._bytes_moved[rank] = (io_bytes, now_s)

    def read_memory(self) -> None:
        """Update the recorded peak memory of each rank's process."""
        for rank, pid in self.pids.items():
            peak = procfs.peak_rss_bytes(pid)
            if peak is not None:
                self.peaks[rank] = max(peak, self.peaks.get(rank, 0))

    def last_progress_s(self) -> float:
        """Return the time at which any living rank last made progress, or 0 if it is unknown."""
        living_ranks = [rank for rank in self.pids if rank not in self.exited_ranks]
        times = [last_progress_s(status) for rank in living_ranks if (status := self.status_files.get(rank))]
        times += [self._bytes_moved[rank][1] for rank in living_ranks if rank in self._bytes_moved]
        return max(times, default=0.0)

    def progress(self, now_s: float, deadline_s: float | None) -> Progress:
        """Return the current state of all ranks for display."""
        ranks = sorted({*self.status_files, *range(self.spec.ranks)})  # a rank without a process yet is starting up
        rows = tuple(rank_progress(rank, self.status_files.get(rank), now_s, self.peaks.get(rank)) for rank in ranks)
        return Progress(elapsed_s=now_s, deadline_s=deadline_s, ranks=rows)


def rank_progress(rank: int, status: StatusFile | None, now_s: float, rss_bytes: int | None) -> RankProgress:
    """Return the progress of a rank for display. `status`: its status file, or None if there is none yet."""
    latest = status.latest_event if status else None
    event = (status.latest_training_event or latest) if status else None
    return RankProgress(
        rank=rank,
        phase=event.kind if event else "start",
        step=status.step if status else 1,
        no_progress_s=max(0.0, now_s - latest.at_s) if latest else None,
        rss_bytes=rss_bytes,
        module=event.name if event else None,
    )
