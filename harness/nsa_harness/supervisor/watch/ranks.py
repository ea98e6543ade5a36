"""The ranks of a running job: their processes, exits and status files."""

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
from nsa_harness.supervisor.launch.launcher import Watchable

NO_BOARD_S = 5.0  # a Python program with the probe writes its status file within milliseconds

# Enough to see whether a rank trains. Read several times a second, while the ranks need every core.
_NEWEST_CALLS = 8


@dataclass(kw_only=True)
class Ranks:
    """The ranks as /proc and their status files show them, without a query to the launcher or a rank."""

    spec: RunSpec
    guarded: Watchable
    sampler: StackSampler
    pids: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    boards: dict[int, StatusFile | None] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)  # resident bytes
    # For ranks without a status file: bytes of I/O, and when they last grew.
    _bytes_moved: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def alive(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.gone and procfs.alive(pid)}

    @property
    def all_train(self) -> bool:
        return len(self.boards) == self.spec.ranks and all(map(has_started, self.boards.values()))

    @property
    def some_start(self) -> bool:
        """Whether a rank with a status file is still starting up."""
        return any(board is not None and not has_started(board) for board in self.boards.values())

    @staticmethod
    def now_ns() -> int:
        return time.monotonic_ns()

    def left(self, pid: int) -> None:
        self.gone |= {rank for rank, known in self.pids.items() if known == pid}

    def discover(self, launcher: int) -> list[tuple[int, int]]:
        """Find the process of each rank: the topmost below the launcher with that RANK. Return the new (rank, pid)."""
        if len(self.pids) == self.spec.ranks and all(map(procfs.alive, self.pids.values())):
            return []
        found = [new for stat in procfs.descendants(launcher) if (new := self._given(stat))]
        if not self.pids and self.spec.ranks == 1 and (alone := self._alone(launcher)):
            self.pids[0] = alone
            found.append((0, alone))
        for rank, pid in found:
            self.guarded.tell(do="watch", pid=pid, rank=rank)
        return found

    def _alone(self, launcher: int) -> int | None:
        """Return the process of a plain launch: the process with a status file, or the command if the probe is off."""
        below = [launcher, *(stat.pid for stat in procfs.descendants(launcher))]
        marking = [pid for pid in below if (self.guarded.boards / protocol.STATUS_FILE.format(pid=pid)).exists()]
        waited_s = (self.now_ns() - self.guarded.origin_ns) / 1e9
        if marking or not self.guarded.probed or waited_s > NO_BOARD_S:
            return next(iter(marking), launcher)
        return None

    def _given(self, stat: procfs.Stat) -> tuple[int, int] | None:
        environment = procfs.environment(stat.pid)
        rank = environment.get("RANK", "")
        if not rank.isdigit() or environment.get(protocol.ENV_RUN) != self.guarded.tag:
            return None
        known = self.pids.get(int(rank))
        if known == stat.pid or stat.parent in self.pids.values() or (known is not None and procfs.alive(known)):
            return None
        self.pids[int(rank)] = stat.pid
        self.gone.discard(int(rank))
        return int(rank), stat.pid

    def read_boards(self, now_s: float) -> None:
        for rank, pid in self.pids.items():
            if rank in self.gone:
                continue
            self.boards[rank] = self.sampler.board(pid, _NEWEST_CALLS)
            if self.boards[rank] is None:
                moved = procfs.task_io_bytes(pid, pid) or 0
                if rank not in self._bytes_moved:  # a job that was attached to may have been idle before
                    self._bytes_moved[rank] = (moved, max(0.0, now_s - procfs.all_idle_s(pid)))
                elif moved != self._bytes_moved[rank][0]:
                    self._bytes_moved[rank] = (moved, now_s)

    def read_memory(self) -> None:
        for rank, pid in self.pids.items():
            peak = procfs.peak_rss_bytes(pid)
            if peak is not None:
                self.peaks[rank] = max(peak, self.peaks.get(rank, 0))

    def last_progress_s(self) -> float:
        """Return the time of the last progress of any living rank."""
        living = [rank for rank in self.pids if rank not in self.gone]
        times = [last_progress_s(board) for rank in living if (board := self.boards.get(rank))]
        times += [self._bytes_moved[rank][1] for rank in living if rank in self._bytes_moved]
        return max(times, default=0.0)

    def progress(self, now_s: float, deadline_s: float | None) -> Progress:
        ranks = sorted({*self.boards, *range(self.spec.ranks)})  # a rank without a process yet is starting up
        rows = tuple(self._row(rank, self.boards.get(rank), now_s) for rank in ranks)
        return Progress(elapsed_s=now_s, deadline_s=deadline_s, ranks=rows)

    def _row(self, rank: int, board: StatusFile | None, now_s: float) -> RankProgress:
        newest = board.latest_event if board else None
        mark = (board.latest_training_event or newest) if board else None
        return RankProgress(
            rank=rank,
            phase=mark.kind if mark else "start",
            step=board.step if board else 1,
            no_progress_s=max(0.0, now_s - newest.at_s) if newest else None,
            rss_bytes=self.peaks.get(rank),
            module=mark.name if mark else None,
        )
