"""The wait-for graph: what each rank waits for, and which waits started the hang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.evidence import ChildSample, Evidence, RankSnapshot, Sample, Snapshot, Stack, StatusFile
from nsa_harness.core.evidence.stacks import (
    NativeWait,
    debugger,
    group_call,
    in_function,
    native_wait,
    thread_wait,
    user_frame,
)
from nsa_harness.core.evidence.steps import python_calls
from nsa_harness.core.outcome.wording import of_group
from nsa_harness.core.verdict.components import final_nodes
from nsa_harness.core.verdict.group_waits import TRANSFERS, JobState, group_wait, job_state, operation
from nsa_harness.core.verdict.host_waits import compiles, host_wait, is_library
from nsa_harness.core.verdict.motion import (
    BUSY_SHARE,
    STARVED_SHARE,
    Motion,
    is_stopped_by_job,
    latest_end_s,
    leaf,
    motion,
    only_another_line,
    rank_stack,
    task_of,
    thread_cpu_s,
)
from nsa_harness.core.verdict.rpc_waits import remote_call, rpc_wait
from nsa_harness.core.verdict.wait import KIND_OF_MOTION, Wait, WaitKind, WaitState


@dataclass(frozen=True, kw_only=True)
class WaitGraph:
    """The wait-for graph of a run at one moment, which shows what each rank waits for.

    All waits depend on the root waits: those for no other rank, and those that form a cycle.
    """

    waits: tuple[Wait, ...]  # one for each rank
    roots: tuple[Wait, ...]  # waits of ranks that wait for no other rank, or that are members of a cycle

    @property
    def has_progress(self) -> bool:
        """Whether any rank makes progress."""
        return any(wait.motion is Motion.MOVING for wait in self.waits)


def wait_graph_between(before: Snapshot, after: Snapshot, exited_ranks: Iterable[int], backend: str) -> WaitGraph:
    """Return the wait-for graph at snapshot `after`. Progress is seen by comparing with `before`."""
    return _graph(before, after, job_state(after.ranks, exited_ranks, backend))


def post_mortem_graph(evidence: Evidence) -> WaitGraph:
    """Return the wait-for graph of a job that was not watched, based on the dumps that its ranks left."""
    snapshot = evidence.snapshots[-1] if evidence.snapshots else Snapshot(number=0, at_s=0.0, ranks=())
    job = job_state(snapshot.ranks, (), evidence.backend, world_size=evidence.world_size, groups=evidence.groups)
    return _graph(snapshot, snapshot, job)


def _graph(before: Snapshot, after: Snapshot, job: JobState) -> WaitGraph:
    earlier = {rank.rank: rank for rank in before.ranks}
    elapsed_s = max(after.at_s - before.at_s, 1e-3)
    owners = {pid: rank.rank for rank in after.ranks for pid in (rank.pid, *(child.pid for child in rank.children))}
    waits = [_wait(earlier, rank, job, owners, elapsed_s) for rank in job.living.values()]
    waits += [
        Wait(rank=rank, motion=Motion.GONE, kind=WaitKind.GONE, blocked_in=_TEXTS[WaitKind.GONE], is_closed=True)
        for rank in sorted(job.exited_ranks)
    ]
    return WaitGraph(waits=tuple(waits), roots=_roots(waits))


def _wait(
    earlier: Mapping[int, RankSnapshot], rank: RankSnapshot, job: JobState, owners: Mapping[int, int], elapsed_s: float
) -> Wait:
    before = earlier.get(rank.rank)
    rank_motion = motion(before, rank, elapsed_s)
    stack = rank_stack(rank)
    frames = stack.frames if stack else ()
    thread_s = thread_cpu_s(before, rank)
    computes = rank_motion is Motion.BURNING and (thread_s is None or thread_s >= STARVED_SHARE * elapsed_s)
    kind = KIND_OF_MOTION.get(rank_motion, WaitKind.UNKNOWN)
    status_files = (other.status_file for other in job.living.values())
    never_resumes = rank.process is not None and is_stopped_by_job(rank.process, status_files)
    state = WaitState(kind=kind, motion=rank_motion, is_closed=rank_motion is Motion.GONE or never_resumes)
    if rank_motion in (Motion.BURNING, Motion.WAITING):
        group = rpc_wait(rank, stack, job, earlier, elapsed_s) or group_wait(
            rank, stack, job, computes=computes, still=_is_still(before, stack)
        )
        if group is not None:
            state = group  # even if the rank uses CPU time, because NCCL spins while it waits
        elif computes:
            state = replace(state, kind=WaitKind.COMPILE if compiles(frames) else WaitKind.COMPUTE)
        else:
            host = host_wait(before, rank, stack, owners, elapsed_s)
            state = replace(host, motion=_motion_in_wait(host, works=_works(before, rank, elapsed_s)))
    return Wait(
        **vars(state),
        rank=rank.rank,
        blocked_in=_blocked_in(rank, stack, state),
        leaf=leaf(rank),
        user_frame=user_frame(frames),
        in_backward=in_function(frames, "torch/autograd/graph.py") is not None,
        debugger=debugger(frames) if state.kind in _AT_A_PROMPT else "",
    )


# The kinds of wait of a thread that is at the prompt of a debugger, or waits for a debugger's client to connect.
_AT_A_PROMPT = (WaitKind.IO, WaitKind.LOCK, WaitKind.SLEEP)


def _motion_in_wait(host: WaitState, *, works: bool) -> Motion:
    """Return the motion of a waiting rank, which is MOVING if a busy thread of the rank could end the wait."""
    if host.motion in (Motion.MOVING, Motion.BURNING):
        return host.motion
    may_end = host.kind in (WaitKind.LOCK, WaitKind.UNKNOWN) or (
        host.kind in (WaitKind.SLEEP, WaitKind.IO) and not host.is_closed
    )
    return Motion.MOVING if works and may_end else Motion.WAITING


def _works(before: RankSnapshot | None, rank: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether a process keeps a core busy, other than with library threads that only spin."""
    if before is None or before.process is None or rank.process is None:
        return False
    earlier_s = {task.tid: task.cpu_s for task in before.process.tasks}
    library_s = sum(task.cpu_s - earlier_s.get(task.tid, 0.0) for task in rank.process.tasks if is_library(task))
    return rank.process.cpu_s - before.process.cpu_s - library_s >= BUSY_SHARE * elapsed_s


def _is_still(before: RankSnapshot | None, stack: Stack | None) -> bool:
    earlier = rank_stack(before) if before else None
    return bool(earlier and stack and earlier.frames[:1] == stack.frames[:1])


def _roots(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """Return the root waits, on at least one of which every other wait depends.

    These are the waits of ranks that wait for no other rank, which come first, and of ranks in a cycle that waits for
    no rank outside it.
    """
    by_rank = {wait.rank: wait for wait in waits}
    # Many ranks wait for the same ranks, which are one tuple. This tuple becomes a node of its own between them, so the
    # number of edges is that of the ranks, and not that of all pairs of ranks.
    shared = {id(wait.peers): wait.peers for wait in waits}
    edges: dict[_Node, list[_Node]] = {
        ("peers", key): [("rank", peer) for peer in peers if peer in by_rank] for key, peers in shared.items()
    }
    for wait in waits:
        node: _Node = ("peers", id(wait.peers))
        edges["rank", wait.rank] = [node] if edges[node] else []
    final = final_nodes(edges)
    roots = (wait for wait in waits if ("rank", wait.rank) in final)
    return tuple(sorted(roots, key=lambda wait: bool(wait.peers)))


_Node = tuple[str, int]


def reachable_ranks(rank: int, waits: Iterable[Wait]) -> set[int]:
    """Return `rank` and all ranks that it waits for, directly or indirectly."""
    peers = {wait.rank: wait.peers for wait in waits}
    reachable: set[int] = set()
    queue = [rank]
    while queue:
        current = queue.pop()
        queue += [] if current in reachable else peers.get(current, ())
        reachable.add(current)
    return reachable


_TEXTS = {
    WaitKind.FILE_LOCK: "a lock on a file",
    WaitKind.PIPE: "a write to a full pipe",
    WaitKind.SLEEP: "a sleep",
    WaitKind.CHILD: "a wait for a child process",
    WaitKind.LOADER: "a wait for a worker of the data loader",
    WaitKind.COMPUTE: "a computation",
    WaitKind.COMPILE: "a compilation",
    WaitKind.STOPPED: "stopped by a signal",
    WaitKind.GONE: "has left",
    WaitKind.NOTHING: "moving",
    WaitKind.UNKNOWN: "a wait of unknown kind",
}
RANK_WAITS = (
    WaitKind.COLLECTIVE, WaitKind.POINT_TO_POINT, WaitKind.STORE, WaitKind.GROUP_CREATION, WaitKind.RPC,
    WaitKind.TRANSPORT,
)  # fmt: skip


def _blocked_in(rank: RankSnapshot, stack: Stack | None, state: WaitState) -> str:
    """Return a phrase for the operation in which a rank is blocked, such as "all_reduce #14" or "a sleep in load"."""
    frames = stack.frames if stack else ()
    if state.kind is WaitKind.RPC and stack is not None:
        return remote_call(rank, stack)
    if state.kind in RANK_WAITS:
        return _group_wait_text(state, stack, rank.status_file)
    task, user = task_of(rank, stack), user_frame(frames)
    text = _lock_text(stack) if state.kind is WaitKind.LOCK else _TEXTS.get(state.kind)
    if state.kind in _AT_A_PROMPT and (debugger_name := debugger(frames)):
        text = f"the debugger {debugger_name}"
    text = text or (task.syscall if task else "io")
    return text + (f" in {user.function}" if user else "")


def _lock_text(stack: Stack | None) -> str:
    """Return a phrase for what a thread is blocked in if the kernel only shows that another thread must wake it."""
    wait = native_wait(stack) if stack else None
    return thread_wait(stack.frames if stack else ()).call if wait in (None, NativeWait.PYTHON_LOCK) else str(wait)


def _group_wait_text(state: WaitState, stack: Stack | None, status_file: StatusFile | None) -> str:
    """Return a phrase for the call in which a rank is waiting for other ranks."""
    call, frames = state.call, stack.frames if stack else ()
    if state.collective is not None:
        # gloo records some operations under another name: the call from Python has the name that the program uses.
        calls = python_calls(status_file, [state.collective]) if status_file else {}
        name = next((operation(entered) for entered in calls.values()), state.collective.op)
        return f"{name} #{state.collective.seq}{of_group(state.collective.group)}"
    if call is None:
        stack_call = group_call(frames)
        wait = native_wait(stack) if stack and not stack_call else None
        return stack_call.text if stack_call else str(wait or (frames[0].function if frames else "a collective"))
    if call.key:
        return f"{call.op} of the store key {call.key}"
    return f"{call.op} with rank {call.peer}" if operation(call) in TRANSFERS and call.peer is not None else call.op


def rank_samples(
    before: Snapshot | None, after: Snapshot, exited_ranks: Iterable[int], backend: str
) -> Iterator[Sample]:
    """Yield a sample of each rank in `after`, with its motion since `before`, if given."""
    waits = (
        {wait.rank: wait for wait in wait_graph_between(before, after, exited_ranks, backend).waits} if before else {}
    )
    earlier = {rank.rank: rank for rank in before.ranks} if before else {}
    elapsed_s = max(after.at_s - before.at_s, 1e-3) if before else 0.0
    for rank in after.ranks:
        yield _sample(waits.get(rank.rank), earlier.get(rank.rank), rank, after.at_s, elapsed_s)


def _sample(
    wait: Wait | None, earlier: RankSnapshot | None, rank: RankSnapshot, at_s: float, elapsed_s: float
) -> Sample:
    stack = rank_stack(rank)
    frames = stack.frames if stack else ()
    moves = wait is not None and wait.kind is WaitKind.NOTHING
    return Sample(
        rank=rank.rank,
        at_s=at_s,
        motion=str(wait.motion) if wait else "unseen",
        leaf=leaf(rank),
        user_frame=user_frame(frames),
        cpu_s=rank.process.cpu_s if rank.process else None,
        only_line_changed=moves and earlier is not None and only_another_line(earlier, rank, elapsed_s),
        wakes_at_s=latest_end_s(rank, at_s),
        child_samples=tuple(
            ChildSample(pid=child.pid, leaf=child.leaf, user_frame=child.user_frame) for child in wait.computing
        )
        if wait
        else (),
    )
