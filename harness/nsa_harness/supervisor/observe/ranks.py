"""The ranks of a job that nsa-harness did not start: found by their status files, or from outside without these."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nsa_harness.core.evidence.evidence import StatusFile
from nsa_harness.core.scenario.observed_job import starts_ranks
from nsa_harness.core.verdict.limits import has_started
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.procfs import alive, command_words
from nsa_harness.supervisor.capture.syscalls import kernel_text
from nsa_harness.supervisor.watch.ranks import NO_BOARD_S, Ranks

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_SPAWNED = "multiprocessing.spawn import spawn_main"


def is_python_command(words: Sequence[str]) -> bool:
    return bool(words) and _PYTHON.fullmatch(os.path.basename(words[0])) is not None


def ranks_below(root: int) -> dict[int, int]:
    """Return rank -> pid of the ranks at or below `root`: by RANK in their environment, else by who has loaded torch.

    Without RANK, the LOCAL_RANK counts that rank 0 gave to the processes it started (Lightning). Without either
    (mp.spawn), ranks are numbered in the order of their start.
    """
    first = procfs.read_stat(root)
    below = [*([first] if first else []), *procfs.descendants(root)]
    named = _named(stat for stat in below if stat.state not in "ZX")
    return named or _by_local_rank(below) or dict(enumerate(_with_torch(below)))


def rank_of(pid: int) -> int | None:
    """Return RANK of a Python program that starts no ranks itself, or None."""
    rank = procfs.environment(pid).get("RANK", "")
    words = command_words(pid)
    return int(rank) if rank.isdigit() and _is_python(pid, words) and not starts_ranks(words) else None


def _named(below: Iterable[procfs.Stat]) -> dict[int, int]:
    """Return the topmost process of each rank, since a rank's children inherit its environment."""
    found: dict[int, int] = {}
    inside: set[int] = set()
    for stat in below:
        rank = None if stat.parent in inside else rank_of(stat.pid)
        if rank is not None:
            found.setdefault(rank, stat.pid)
        if rank is not None or stat.parent in inside:
            inside.add(stat.pid)
    return found


def _by_local_rank(below: Sequence[procfs.Stat]) -> dict[int, int]:
    """Return training programs by LOCAL_RANK. A program that started the other programs is rank 0."""
    found: dict[int, procfs.Stat] = {}
    inside: set[int] = set()
    for stat in below:
        number = procfs.environment(stat.pid).get("LOCAL_RANK", "")
        if number.isdigit() and (stat.parent in inside or loads_torch(stat.pid)):
            inside.add(stat.pid)
            if stat.parent not in inside:
                found.setdefault(int(number), stat)
    starters = {stat.parent for stat in found.values()}
    trains = [stat for stat in below if stat.pid in starters and loads_torch(stat.pid)]
    if 0 not in found and len(starters) == len(trains) == 1:
        found[0] = trains[0]
    whole = len(found) > 1 and sorted(found) == list(range(len(found)))
    return {rank: stat.pid for rank, stat in sorted(found.items())} if whole else {}


def _with_torch(below: Sequence[procfs.Stat]) -> list[int]:
    """Return the topmost training programs, or the programs that those have spawned by multiprocessing."""
    training = {stat.pid: stat for stat in below if loads_torch(stat.pid) and not starts_ranks(command_words(stat.pid))}
    top = [stat for stat in training.values() if stat.parent not in training]
    spawned = [stat for stat in training.values() if _SPAWNED in " ".join(command_words(stat.pid))]
    ranks = [stat for stat in spawned if stat.parent in {parent.pid for parent in top}] or top
    return [stat.pid for stat in sorted(ranks, key=lambda stat: (stat.started_ticks, stat.pid))]


def loads_torch(pid: int) -> bool:
    return "/libtorch_cpu" in kernel_text(f"/proc/{pid}/maps")


def _is_python(pid: int, words: Sequence[str]) -> bool:
    """Whether the process is Python, by its executable, or by its command line if that cannot be read."""
    try:
        return _PYTHON.fullmatch(os.path.basename(os.readlink(f"/proc/{pid}/exe"))) is not None
    except OSError:
        return is_python_command(words)


def _parents(pids: Iterable[int]) -> set[int]:
    return {stat.parent for pid in pids if (stat := procfs.read_stat(pid)) is not None}


_SEARCH_EVERY_S = 1.0  # reading the memory maps of every process costs some milliseconds


@dataclass(kw_only=True)
class WatchedRanks(Ranks):
    """The ranks of an observed job. It may start them at any time, and if it replaces all, a new attempt begins."""

    world_size: int = 0
    restarted: bool = False
    set_aside: bool = False  # the same agent restarted the ranks, so their exit is not the job's result
    _solo: set[int] = field(default_factory=set)  # processes that are rank 0 unless other processes have ranks
    _parents: set[int] = field(default_factory=set)  # the ranks' parents
    _searched_ns: int = 0

    @property
    def count(self) -> int:
        """The number of ranks of the job, on all hosts."""
        return max([self.world_size, *(rank + 1 for rank in self.pids)])

    @property
    def all_train(self) -> bool:
        here = [rank for rank in self.pids if rank not in self.gone]
        boards = [self.boards.get(rank) for rank in here]
        return bool(here) and len(here) >= self._expected_here(here) and all(map(has_started, boards))

    def discover(self, launcher: int) -> list[tuple[int, int]]:
        boards = dict(self._boards())
        solo = [pid for pid, board in boards.items() if board.world_size == 1 and rank_of(pid) is None]
        found = {board.rank: pid for pid, board in boards.items() if board.rank is not None and pid not in solo}
        # A process that started ranks is no rank after they have exited: its later work is not a restart.
        if not found and solo and self._solo.issuperset(self.pids.values()):
            found = {0: min(solo)}
            self._solo |= set(solo)
        if not found and not self.pids:
            found = self._from_outside(launcher)
        self.world_size = max([self.world_size, *(board.world_size or 0 for board in boards.values())])
        self._drop_solo(found)
        if self._take_the_place(found):
            self.restarted, self.set_aside = True, self._same_agent(found)
            return []
        return [(rank, pid) for rank, pid in sorted(found.items()) if self._takes(rank, pid)]

    def _take_the_place(self, found: Mapping[int, int]) -> bool:
        """Whether new ranks replace all earlier ranks. A single replaced rank is no restart of the job."""
        replaced = any(self.pids.get(rank, pid) != pid for rank, pid in found.items())
        return replaced and not any(map(alive, self.pids.values()))

    def _same_agent(self, found: Mapping[int, int]) -> bool:
        parents = _parents(found.values())
        return (
            len(parents) == 1
            and parents == self._parents
            and all(starts_ranks(command_words(parent)) for parent in parents)
        )

    def _boards(self) -> Iterator[tuple[int, StatusFile]]:
        """Yield the status files of living processes."""
        try:
            names = os.listdir(self.guarded.boards)
        except FileNotFoundError:
            return
        for name in names:
            pid = name.removesuffix(".board")
            if pid != name and pid.isdigit() and alive(int(pid)) and (board := self.sampler.board(int(pid))):
                yield int(pid), board

    def _from_outside(self, launcher: int) -> dict[int, int]:
        """Find ranks without status files (no probe, or too early): by RANK, then by who has loaded torch."""
        now_ns = self.now_ns()
        waited_s = (now_ns - self.guarded.origin_ns) / 1e9
        if (self.guarded.probed and waited_s < NO_BOARD_S) or now_ns - self._searched_ns < _SEARCH_EVERY_S * 1e9:
            return {}
        self._searched_ns = now_ns
        return ranks_below(launcher)

    def _drop_solo(self, found: dict[int, int]) -> None:
        """Forget rank 0 if its process turns out to be the one that starts the ranks."""
        if found and not self._solo & set(found.values()):
            for rank in [rank for rank, pid in self.pids.items() if pid in self._solo]:
                del self.pids[rank]
                self.boards.pop(rank, None)

    def _takes(self, rank: int, pid: int) -> bool:
        if rank in self.pids:
            return False
        self.pids[rank] = pid
        self._parents |= _parents([pid])
        self.gone.discard(rank)
        self.guarded.tell(do="watch", pid=pid, rank=rank)
        return True

    def _expected_here(self, ranks: list[int]) -> int:
        local_world_size = procfs.environment(self.pids[ranks[0]]).get("LOCAL_WORLD_SIZE", "")
        return int(local_world_size) if local_world_size.isdigit() else self.world_size
