"""Finds the ranks of a job that nsa-harness did not start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nsa_harness.core.evidence.evidence import StatusFile
from nsa_harness.core.scenario.observed_job import starts_ranks
from nsa_harness.core.verdict.limits import has_started
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.procfs import command_line, is_alive
from nsa_harness.supervisor.capture.syscalls import kernel_text
from nsa_harness.supervisor.watch.ranks import NO_STATUS_FILE_S, Ranks

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_SPAWNED = "multiprocessing.spawn import spawn_main"


def is_python_command(words: Sequence[str]) -> bool:
    return bool(words) and _PYTHON.fullmatch(os.path.basename(words[0])) is not None


def ranks_below(root: int) -> dict[int, int]:
    """Map each rank at or below the process `root` to its pid.

    The rank is RANK in a process's environment. If no process has RANK, it is LOCAL_RANK, which Lightning's rank 0 sets
    in the processes that it starts. If no process has either (mp.spawn), the processes that have loaded torch are the
    ranks, in the order of their start.
    """
    first = procfs.read_stat(root)
    stats = [*([first] if first else []), *procfs.descendants(root)]
    by_environment = _ranks_by_environment(stat for stat in stats if stat.state not in "ZX")
    return by_environment or _ranks_by_local_rank(stats) or dict(enumerate(_training_pids(stats)))


def rank_of(pid: int) -> int | None:
    """Return the value of RANK in the environment of a process, or None if the process is not a rank."""
    rank = procfs.environment(pid).get("RANK", "")
    words = command_line(pid)
    return int(rank) if rank.isdigit() and _is_python(pid, words) and not starts_ranks(words) else None


def _ranks_by_environment(below: Iterable[procfs.Stat]) -> dict[int, int]:
    """Map the RANK of each process in `below` to its pid, ignoring the children of ranks."""
    pids: dict[int, int] = {}
    inside_rank: set[int] = set()
    for stat in below:
        rank = None if stat.parent in inside_rank else rank_of(stat.pid)
        if rank is not None:
            pids.setdefault(rank, stat.pid)
        if rank is not None or stat.parent in inside_rank:
            inside_rank.add(stat.pid)
    return pids


def _ranks_by_local_rank(below: Sequence[procfs.Stat]) -> dict[int, int]:
    """Map the LOCAL_RANK of each process to its pid, or return {} if a number is missing."""
    stats: dict[int, procfs.Stat] = {}
    inside: set[int] = set()
    for stat in below:
        number = procfs.environment(stat.pid).get("LOCAL_RANK", "")
        if number.isdigit() and (stat.parent in inside or loads_torch(stat.pid)):
            inside.add(stat.pid)
            if stat.parent not in inside:
                stats.setdefault(int(number), stat)
    starters = {stat.parent for stat in stats.values()}
    starting_stats = [stat for stat in below if stat.pid in starters and loads_torch(stat.pid)]
    if 0 not in stats and len(starters) == len(starting_stats) == 1:
        stats[0] = starting_stats[0]
    is_complete = len(stats) > 1 and sorted(stats) == list(range(len(stats)))
    return {rank: stat.pid for rank, stat in sorted(stats.items())} if is_complete else {}


def _training_pids(below: Sequence[procfs.Stat]) -> list[int]:
    """Return the pids of the processes in `below` that have loaded torch, except launchers."""
    training = {stat.pid: stat for stat in below if loads_torch(stat.pid) and not starts_ranks(command_line(stat.pid))}
    top = [stat for stat in training.values() if stat.parent not in training]
    spawned_stats = [stat for stat in training.values() if _SPAWNED in " ".join(command_line(stat.pid))]
    ranks = [stat for stat in spawned_stats if stat.parent in {parent.pid for parent in top}] or top
    return [stat.pid for stat in sorted(ranks, key=lambda stat: (stat.start_ticks, stat.pid))]


def loads_torch(pid: int) -> bool:
    return "/libtorch_cpu" in kernel_text(f"/proc/{pid}/maps")


def _is_python(pid: int, words: Sequence[str]) -> bool:
    try:
        return _PYTHON.fullmatch(os.path.basename(os.readlink(f"/proc/{pid}/exe"))) is not None
    except OSError:
        return is_python_command(words)


def _parents(pids: Iterable[int]) -> set[int]:
    return {stat.parent for pid in pids if (stat := procfs.read_stat(pid)) is not None}


_SEARCH_EVERY_S = 1.0  # reading the memory maps of all processes takes a few milliseconds


@dataclass(kw_only=True)
class WatchedRanks(Ranks):
    """The ranks of an observed job, which can start at any time. If all of them are replaced, it has restarted."""

    world_size: int = 0
    has_restarted: bool = False
    restarted_by_agent: bool = False  # the same agent restarted the ranks, so their exit is not the job's result
    _solo_pids: set[int] = field(default_factory=set)  # processes that count as rank 0 unless others have ranks
    _parents: set[int] = field(default_factory=set)  # the ranks' parents
    _searched_ns: int = 0

    @property
    def rank_count(self) -> int:
        """The number of ranks of the job on all hosts or, if that is unknown, the number found so far."""
        return max([self.world_size, *(rank + 1 for rank in self.pids)])

    @property
    def has_other_hosts(self) -> bool:
        return not self.pids or self.rank_count > len(self.pids)

    @property
    def all_started(self) -> bool:
        local_ranks = [rank for rank in self.pids if rank not in self.exited_ranks]
        status_files = [self.status_files.get(rank) for rank in local_ranks]
        return (
            bool(local_ranks)
            and len(local_ranks) >= self._expected_local_ranks(local_ranks)
            and all(map(has_started, status_files))
        )

    def discover(self, launcher: int) -> list[tuple[int, int]]:
        status_files = dict(self._read_status_files())
        solo_pids = [pid for pid, status in status_files.items() if status.world_size == 1 and rank_of(pid) is None]
        pids = {
            status.rank: pid for pid, status in status_files.items() if status.rank is not None and pid not in solo_pids
        }
        # A process that started ranks does not become a rank after they have exited: its later work is no restart.
        if not pids and solo_pids and self._solo_pids.issuperset(self.pids.values()):
            pids = {0: min(solo_pids)}
            self._solo_pids |= set(solo_pids)
        if not pids and not self.pids:
            pids = self._find_from_outside(launcher)
        self.world_size = max([self.world_size, *(status.world_size or 0 for status in status_files.values())])
        self._forget_solo(pids)
        if self._replaces_all(pids):
            self.has_restarted, self.restarted_by_agent = True, self._has_same_agent(pids)
            return []
        return [(rank, pid) for rank, pid in sorted(pids.items()) if self._add_rank(rank, pid)]

    def _replaces_all(self, new_pids: Mapping[int, int]) -> bool:
        """Return whether the new ranks `new_pids` have replaced all earlier ranks."""
        replaces_any = any(self.pids.get(rank, pid) != pid for rank, pid in new_pids.items())
        return replaces_any and not any(map(is_alive, self.pids.values()))

    def _has_same_agent(self, new_pids: Mapping[int, int]) -> bool:
        parents = _parents(new_pids.values())
        return (
            len(parents) == 1
            and parents == self._parents
            and all(starts_ranks(command_line(parent)) for parent in parents)
        )

    def _read_status_files(self) -> Iterator[tuple[int, StatusFile]]:
        try:
            names = os.listdir(self.job.probe_dir)
        except FileNotFoundError:
            return
        for name in names:
            pid = name.removesuffix(".board")
            if (
                pid != name
                and pid.isdigit()
                and is_alive(int(pid))
                and (status := self.sampler.read_status_file(int(pid)))
            ):
                yield int(pid), status

    def _find_from_outside(self, launcher: int) -> dict[int, int]:
        """Map each rank below the launcher to its pid, without using the ranks' status files."""
        now_ns = self.now_ns()
        waited_s = (now_ns - self.job.origin_ns) / 1e9
        if (self.job.has_probe and waited_s < NO_STATUS_FILE_S) or now_ns - self._searched_ns < _SEARCH_EVERY_S * 1e9:
            return {}
        self._searched_ns = now_ns
        return ranks_below(launcher)

    def _forget_solo(self, new_pids: dict[int, int]) -> None:
        """Forget that a process is rank 0 if it turns out to be the parent of the ranks, or another rank."""
        former = [rank for rank, pid in self.pids.items() if pid in self._solo_pids and new_pids.get(rank) != pid]
        for rank in former if new_pids else ():
            del self.pids[rank]
            self.status_files.pop(rank, None)

    def _add_rank(self, rank: int, pid: int) -> bool:
        if rank in self.pids:
            return False
        self.pids[rank] = pid
        self._parents |= _parents([pid])
        self.exited_ranks.discard(rank)
        self.job.send_command(do="watch", pid=pid, rank=rank)
        return True

    def _expected_local_ranks(self, ranks: list[int]) -> int:
        local_world_size = procfs.environment(self.pids[ranks[0]]).get("LOCAL_WORLD_SIZE", "")
        return int(local_world_size) if local_world_size.isdigit() else self.world_size
