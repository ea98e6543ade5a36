"""Find out whether a rank waits for the answer of a remote call (torch.distributed.rpc), and whether it can come.

A thread of RPC on another rank serves the call: the handler. A stack does not show to which rank a call was sent, so
every rank with a handler may be the one that must answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nsa_harness.core.evidence.evidence import RankSnapshot, Stack
from nsa_harness.core.evidence.stacks import NativeWait, group_call, native_wait, rpc_call, serves_rpc
from nsa_harness.core.verdict.group_waits import JobState
from nsa_harness.core.verdict.host_waits import POLLING_WAKES, lock_is_closed
from nsa_harness.core.verdict.motion import SLEEPS, STARVED_SHARE, Motion, task_of
from nsa_harness.core.verdict.wait import WaitKind, WaitState


def rpc_wait(
    rank: RankSnapshot, stack: Stack | None, job: JobState, earlier: Mapping[int, RankSnapshot], elapsed_s: float
) -> WaitState | None:
    """Return the rank's wait for the answer of a remote call, or None if its thread with the stack `stack` is in none.

    The wait is closed if handlers are at work and all of them are blocked: in remote calls, or in locks that no thread
    of their process can release before its own remote call returns. It is MOVING if a handler uses CPU time. If a
    handler sleeps, the wait lasts at least until the end of its sleep. `earlier` are the ranks in the snapshot before,
    `elapsed_s` earlier.
    """
    if stack is None or not remote_call(rank, stack):
        return None
    at_work = list(handlers(job.living))
    is_closed = bool(at_work) and all(_is_blocked(peer, handler) for peer, handler in at_work)
    works = any(_computes(earlier.get(peer.rank), peer, handler, elapsed_s) for peer, handler in at_work)
    peers = tuple(sorted({peer.rank for peer, _ in at_work} - {rank.rank})) or job.others(rank.rank)
    motion = Motion.MOVING if works else Motion.WAITING
    tasks = (task_of(peer, handler) for peer, handler in at_work)
    ends_s = [task.wakes_at_s for task in tasks if task and task.syscall in SLEEPS and task.wake_count < POLLING_WAKES]
    until_s = max((end_s for end_s in ends_s if end_s is not None), default=None)
    return WaitState(kind=WaitKind.RPC, motion=motion, peers=peers, is_closed=is_closed, until_s=until_s)


_AGENT_THREADS = "TP_"  # TensorPipe, which transports remote calls
_REMOTE_REFERENCE = "torch::distributed::rpc::PyRRef::"


def remote_call(rank: RankSnapshot, stack: Stack) -> str:
    """Return the function in which a thread of the rank waits for the answer of a remote call, or "" if it is in none.

    A future of torch in a process that uses RPC counts as a remote call that was made with `rpc_async`, unless a
    collective of the rank is pending, which may complete the future.
    """
    if call := rpc_call(stack.frames):
        return call
    if any(_REMOTE_REFERENCE in function for function in stack.native):
        return "to_here"
    uses_rpc = rank.process is not None and any(task.comm.startswith(_AGENT_THREADS) for task in rank.process.tasks)
    is_pending = any(not collective.retired for collective in rank.collectives)
    return "Future.wait" if uses_rpc and not is_pending and native_wait(stack) is NativeWait.FUTURE else ""


def handlers(ranks: Mapping[int, RankSnapshot]) -> Iterator[tuple[RankSnapshot, Stack]]:
    """Yield each thread that serves a remote call, with its rank."""
    return ((rank, stack) for rank in ranks.values() for stack in rank.stacks if serves_rpc(stack.frames))


def _is_blocked(rank: RankSnapshot, handler: Stack) -> bool:
    if remote_call(rank, handler):
        return True
    idle = [stack for stack in rank.stacks if remote_call(rank, stack) or group_call(stack.frames)]
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
