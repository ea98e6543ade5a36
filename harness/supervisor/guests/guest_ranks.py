"""The ranks of a job that somebody else started: found by their boards, or from outside where they have none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.core.judged.limits import started
from harness.core.observed.evidence import Board
from harness.supervisor.guests.rank_finder import rank_of, ranks_below
from harness.supervisor.ranks import NO_BOARD_S, Ranks, alive
from harness.supervisor.sources import procfs

_SEARCH_EVERY_S = 1.0  # reading the memory maps of every process costs some milliseconds


@dataclass(kw_only=True)
class GuestRanks(Ranks):
    """Nobody says how many there will be, nor when. Ranks that take the place of dead ones are another attempt."""

    world_size: int = 0
    restarted: bool = False
    _solo: set[int] = field(default_factory=set)  # processes that would be rank 0 if nobody else had a rank
    _searched_ns: int = 0

    @property
    def count(self) -> int:
        """Ranks of the whole job, those on other hosts included."""
        return max([self.world_size, *(rank + 1 for rank in self.pids)])

    @property
    def all_train(self) -> bool:
        here = [rank for rank in self.pids if rank not in self.gone]
        boards = [self.boards.get(rank) for rank in here]
        return bool(here) and len(here) >= self._expected_here(here) and all(map(started, boards))

    def discover(self, launcher: int) -> list[tuple[int, int]]:
        boards = dict(self._boards())
        solo = [pid for pid, board in boards.items() if self._only_one(board)]
        found = {board.rank: pid for pid, board in boards.items() if board.rank is not None and pid not in solo}
        if not found and solo:
            found = {0: min(solo)}
            self._solo |= set(solo)
        if not found and not self.pids:
            found = self._from_outside(launcher)
        self.world_size = max([self.world_size, *(board.world_size or 0 for board in boards.values())])
        self._drop_solo(found)
        return [(rank, pid) for rank, pid in sorted(found.items()) if self._takes(rank, pid)]

    def _boards(self) -> Iterator[tuple[int, Board]]:
        """Boards of living processes."""
        try:
            names = os.listdir(self.guarded.boards)
        except FileNotFoundError:
            return
        for name in names:
            pid = name.removesuffix(".board")
            if pid != name and pid.isdigit() and alive(int(pid)) and (board := self.camera.board(int(pid))):
                yield int(pid), board

    def _only_one(self, board: Board) -> bool:
        return board.world_size == 1 and rank_of(board.pid) is None

    def _from_outside(self, launcher: int) -> dict[int, int]:
        """Without boards (no probe, or no time yet to write one): RANK in environments, then whoever has torch."""
        now_ns = self.now_ns()
        waited_s = (now_ns - self.guarded.origin_ns) / 1e9
        if (self.guarded.probed and waited_s < NO_BOARD_S) or now_ns - self._searched_ns < _SEARCH_EVERY_S * 1e9:
            return {}
        self._searched_ns = now_ns
        return ranks_below(launcher)

    def _drop_solo(self, found: dict[int, int]) -> None:
        """The process that started everything looked like rank 0 until ranks of its own came."""
        if found and not self._solo & set(found.values()):
            for rank in [rank for rank, pid in self.pids.items() if pid in self._solo]:
                del self.pids[rank]
                self.boards.pop(rank, None)

    def _takes(self, rank: int, pid: int) -> bool:
        known = self.pids.get(rank)
        if known == pid or (known is not None and alive(known)):
            return False
        if known is not None:
            self.restarted = True
            return False
        self.pids[rank] = pid
        self.gone.discard(rank)
        self.guarded.tell(do="watch", pid=pid, rank=rank)
        return True

    def _expected_here(self, ranks: list[int]) -> int:
        told = procfs.environment(self.pids[ranks[0]]).get("LOCAL_WORLD_SIZE", "")
        return int(told) if told.isdigit() else self.world_size
