"""Find out whether a rank waits for the answer of a remote call (torch.distributed.rpc), and whether it can come.

A thread of RPC on another rank serves the call: the handler. A stack does not show to which rank a call was sent, so
every rank with a handler may be the one that must answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nsa_harness.core.evidence.evidence import RankSnapshot, Stack
from nsa_harness.core.evidence.stacks import group_call, rpc_call, serves_rpc
from nsa_harness.core.verdict.group_waits import JobState
from nsa_harness.core.verdict.host_waits import lock_is_closed
from nsa_harness.core.verdict.motion import STARVED_SHARE, Motion
from nsa_harness.core.verdict.wait import WaitKind, WaitState


def rpc_wait(
    rank: RankSnapshot, stack: Stack | None, job: JobState, earlier: Mapping[int, RankSnapshot], elapsed_s: float
) -> WaitState | None:
    """Return the rank's wait for the answer of a remote call, or None if its thread with the stack `stack` is in none.

    The wait is closed if handlers are at work and all of them are blocked: in remote calls, or in locks that no thread
    of their process can release before its own remote call returns. It is MOVING if a handler uses CPU time. `earlier`
    are the ranks in the snapshot before, `elapsed_s` earlier.
    """
    if stack is None or not rpc_call(stack.frames):
        return None
    at_work = list(handlers(job.living))
    is_closed = bool(at_work) and all(_is_blocked(peer, handler) for peer, handler in at_work)
    works = any(_computes(earlier.get(peer.rank), peer, handler, elapsed_s) for peer, handler in at_work)
    peers = tuple(sorted({peer.rank for peer, _ in at_work} - {rank.rank})) or job.others(rank.rank)
    motion = Motion.MOVING if works else Motion.WAITING
    return WaitState(kind=WaitKind.RPC, motion=motion, peers=peers, is_closed=is_closed)


def handlers(ranks: Mapping[int, RankSnapshot]) -> Iterator[tuple[RankSnapshot, Stack]]:
    """Yield each thread that serves a remote call, with its rank."""
    return ((rank, stack) for rank in ranks.values() for stack in rank.stacks if serves_rpc(stack.frames))


def _is_blocked(rank: RankSnapshot, handler: Stack) -> bool:
    if rpc_call(handler.frames):
        return True
    idle = [stack for stack in rank.stacks if rpc_call(stack.frames) or group_call(stack.frames)]
    return rank.process is not None and lock_is_closed(rank.process, rank.stacks, handler, idle)


def _computes(before: RankSnapshot | None, rank: RankSnapshot, handler: Stack, elapsed_s: float) -> bool:
    cpu_s = [
        task.cpu_s
        for snapshot in (before, rank)
        if snapshot is not None and snapshot.process is not None
        for task in snapshot.process.tasks
        if task.tid == handler.tid
    ]
    return len(cpu_s) == 2 and cpu_s[1] - cpu_s[0] >= STARVED_SHARE * elapsed_s
