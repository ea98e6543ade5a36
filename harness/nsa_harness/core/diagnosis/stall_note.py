"""The early word: where a run stands before anything is proven, what may end it, and when it would be a HANG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsa_harness.core.diagnosis.context import shorten
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.evidence.evidence import RankSnapshot, Sample, Snapshot
from nsa_harness.core.evidence.live import FirstSnapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.motion import Motion, rank_stack, task_of
from nsa_harness.core.verdict.proof import StallEpisode, closed, snapshot_pair
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import wait_for


@dataclass(frozen=True, kw_only=True)
class StallNote:
    """Where the ranks of a run stand that is suspected, and not proven to hang."""

    blocked: tuple[str, ...]  # one sentence for the ranks that stand alike
    could_end: str  # what may still end it; empty: nothing, and the next look may prove it
    left_s: float | None  # until it would be a HANG; None: it would not as it stands

    @property
    def text(self) -> str:
        """ "rank 1 is blocked in a read of data.fifo at loader.py:13; ... HANG in 4 min 52 s"."""
        when = "" if self.left_s is None else f"; HANG in {duration(self.left_s)} unless it moves"
        return f"{'; '.join((*self.blocked, *filter(None, [self.could_end])))}{when}"


def early_word(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    gone: Iterable[int] = (),
) -> StallNote | None:
    """What can be said before anything is proven, with the arguments of `prove`; None before the second look."""
    looks = snapshot_pair(snapshots)
    if looks is None:
        return None
    graph = wait_for(*looks, gone, backend)
    alike: dict[tuple[str, str], list[int]] = {}
    for wait in graph.waits:
        alike.setdefault((_does(wait), _where(wait)), []).append(wait.rank)
    blocked = tuple(f"{ranks_text(ranks)} {_verb(does, ranks)}{where}" for (does, where), ranks in alike.items())
    moving = [wait.rank for wait in graph.waits if wait.motion is Motion.MOVING]
    if moving:
        end = f"{ranks_text(moving)} still {_verb('moves', moving)}"
        return StallNote(blocked=blocked, could_end=end, left_s=None)
    episode = StallEpisode(snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s)
    still_open = [root for root in graph.roots if not closed(root, limits)]
    ends = [_end(root) for root in still_open]
    left = [episode.left_s(root) for root in still_open]
    whole = None if not left or None in left else max(one for one in left if one is not None)
    return StallNote(blocked=blocked, could_end="; ".join(dict.fromkeys(ends)), left_s=whole)


def first_look(look: Snapshot, backend: str, gone: Iterable[int] = ()) -> tuple[FirstSnapshot, ...]:
    """Where each rank stands at one moment, taken as if nothing moved; ranks that stand alike in one row."""
    waits = {wait.rank: wait for wait in wait_for(look, look, gone, backend).waits}
    alike: dict[tuple[str, str, str], list[RankSnapshot]] = {}
    for rank in look.ranks:
        line = waits[rank.rank].user if rank.rank in waits else None
        place = f"{line.file.rpartition('/')[2]}:{line.line}" if line else ""
        stands = "running" if _runs(rank) or rank.rank not in waits else waits[rank.rank].blocked_in
        alike.setdefault((stands, place, line.function if line else ""), []).append(rank)
    return tuple(
        FirstSnapshot(
            ranks=tuple(one.rank for one in ranks),
            blocked_in=stands,
            place=place,
            function=function,
            idle_s=min((idle for one in ranks if (idle := _idle_s(one)) is not None), default=None),
            cpu_s=max((one.process.cpu_s for one in ranks if one.process), default=None),
            age_s=look.at_s,
        )
        for (stands, place, function), ranks in alike.items()
    )


def _runs(rank: RankSnapshot) -> bool:
    task = task_of(rank, rank_stack(rank))
    return task is not None and (task.state == "R" or task.syscall == "running")


def _idle_s(rank: RankSnapshot) -> float | None:
    task = task_of(rank, rank_stack(rank))
    return task.idle_s if task else None


def _does(wait: Wait) -> str:
    if wait.motion is Motion.MOVING:
        return "moves"
    return "computes" if wait.kind is WaitKind.COMPUTE else "is blocked"


def _verb(does: str, ranks: Sequence[int]) -> str:
    return does if len(ranks) == 1 else does.replace("is ", "are ").removesuffix("s")


def _where(wait: Wait) -> str:
    """ " in all_reduce #3 at train.py:18, waiting for rank 1"."""
    inside = wait.child.deepest if wait.child else wait
    line = inside.user or wait.user
    what = f" in {wait.blocked_in}" if _does(wait) == "is blocked" else ""
    place = f" at {line.file.rpartition('/')[2]}:{line.line}" if line else ""
    named = f" ({shorten(inside.target, 80)})" if inside.target else ""
    process = f", of its child process {wait.child.deepest.pid}" if wait.child else ""
    return f"{what}{place}{named}{process}{f', waiting for {ranks_text(wait.peers)}' if wait.peers else ''}"


_ENDED_BY = {
    WaitKind.SLEEP: "the sleep may end",
    WaitKind.CHILD: "the child process may still answer or end",
    WaitKind.LOADER: "the worker of the data loader may still give a batch",
    WaitKind.IO: "what it reads or writes may still move",
    WaitKind.PIPE: "somebody may still read the pipe",
    WaitKind.FILE_LOCK: "a process outside the job may still give the lock back",
    WaitKind.LOCK: "a thread or process that is alive may still give the lock back",
    WaitKind.STORE: "somebody may still set the key",
    WaitKind.COMPUTE: "the computation may still end",
    WaitKind.COMPILE: "the compiler may still end",
}


def _end(root: Wait) -> str:
    return _ENDED_BY.get(root.kind, "something outside of the job may still end it")


def duration(seconds: float) -> str:
    """ "4 min 52 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
