"""Why a run hangs on its host: rules over roots of the wait-for graph that wait for no other rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsa_harness.core.diagnosis.case import (
    Case,
    Explanation,
    at,
    counted,
    dump_proof,
    explained,
    hung_roots,
    in_function,
    loop_place,
    place_of,
    shorten,
    wait_place,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.grades import Seen
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.diagnosis.rules.threads import line_behind
from nsa_harness.core.evidence.sources import taken_at
from nsa_harness.core.report import Place, Status
from nsa_harness.core.verdict.proof import loop_lines
from nsa_harness.core.verdict.wait import ChildWait, Wait, WaitKind

_LOCKS = frozenset({WaitKind.LOCK, WaitKind.FILE_LOCK})
_OUTSIDE = frozenset({WaitKind.IO, WaitKind.FILE_LOCK, WaitKind.CHILD})
_NEW_PROCESSES = ("multiprocessing.spawn", "multiprocessing.forkserver", "multiprocessing-fork")
_COMPUTING = frozenset({WaitKind.COMPUTE, WaitKind.COMPILE})


@rule(RulePhase.WAITS_BY_ITSELF, Cause.STOPPED_PROCESS, outranks=("gil_held_native",))
def stopped_process(case: Case) -> Explanation | None:
    if case.judgement.status is not Status.HANG:
        return None
    stopped = [root for root in case.roots if root.kind is WaitKind.STOPPED]
    if not stopped:
        return _stopped_child(case)
    ranks = tuple(root.rank for root in stopped)
    return explained(
        Cause.STOPPED_PROCESS,
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped by a signal (state T): a debugger, Ctrl-Z or"
        " a foreign SIGSTOP",
        ranks=ranks,
        place=wait_place(case, stopped[0]),
        seen=Seen.FACT,
        proof=dump_proof(case, stopped[0]),
        advice="Find who sent the signal (a scheduler that suspends, a debugger, a shell); `kill -CONT PID` resumes.",
    )


def _stopped_child(case: Case) -> Explanation | None:
    found = _below(case, lambda child: child.kind is WaitKind.STOPPED)
    if found is None:
        return None
    root, child = found
    place = wait_place(case, root)
    return explained(
        Cause.STOPPED_PROCESS,
        f"rank {root.rank} waits{at(place)} for its child process {_named(child)}, which is stopped by a signal",
        ranks=(root.rank,),
        place=place,
        seen=Seen.FACT,
        proof=dump_proof(case, root),
        advice=f"Find who sent the signal; `kill -CONT {child.pid}` resumes the child.",
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.DATALOADER_WORKER_BLOCKED, outranks=("fork_lock",))
def dataloader_worker_blocked(case: Case) -> Explanation | None:
    loading = (root for root in hung_roots(case) if root.kind is WaitKind.LOADER and not root.computing)
    roots = [root for root in loading if root.child is not None]
    if not roots or roots[0].child is None:
        return None
    root, worker = roots[0], roots[0].child
    place = _child_place(case, root, worker)
    forked = "; it was forked with a lock held by a thread that it does not have" if _is_forked_lock(worker) else ""
    return explained(
        Cause.DATALOADER_WORKER_BLOCKED,
        f"rank {root.rank} waits for a batch{at(wait_place(case, root))}, and its data loader worker {worker.pid}"
        f" stands in {_stands_in(worker)}{at(place)}{forked}",
        ranks=(root.rank,),
        place=place,
        seen=Seen.KERNEL if worker.closed else Seen.PART,
        proof=dump_proof(case, root),
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.FORK_LOCK, outranks=("pipe_full",))
def fork_lock(case: Case) -> Explanation | None:
    found = _below(case, _is_forked_lock)
    if found is None:
        return None
    root, child = found
    place = _child_place(case, root, child)
    return explained(
        Cause.FORK_LOCK,
        f"rank {root.rank} waits{at(wait_place(case, root))} for its child process {child.pid}, which waits for a"
        f" lock{at(place)} that no thread of the child holds: it was held when the child was forked",
        ranks=(root.rank,),
        place=place,
        seen=Seen.CLOSED,
        proof=dump_proof(case, root),
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.PIPE_FULL, outranks=("backward_function_blocked",))
def pipe_full(case: Case) -> Explanation | None:
    writers = [root for root in hung_roots(case) if root.kind is WaitKind.PIPE]
    found = (writers[0], None) if writers else _below(case, lambda child: child.kind is WaitKind.PIPE)
    if found is None:
        return None
    root, child = found
    place = _child_place(case, root, child) if child else wait_place(case, root)
    who = f"the child process {child.pid} of rank {root.rank} writes" if child else f"rank {root.rank} writes"
    return explained(
        Cause.PIPE_FULL,
        f"{who} to a pipe that is full{at(place)}; whoever holds the reading end waits too, so nobody empties it",
        ranks=(root.rank,),
        place=place,
        seen=Seen.KERNEL,
        proof=dump_proof(case, root),
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.BACKWARD_FUNCTION_BLOCKED, outranks=("lock_cycle",))
def backward_function_blocked(case: Case) -> Explanation | None:
    blocked = [root for root in hung_roots(case) if root.kind is WaitKind.LOCK and root.in_backward]
    if not blocked:
        return None
    root, ranks = blocked[0], _alike(blocked)
    place = wait_place(case, root)
    return explained(
        Cause.BACKWARD_FUNCTION_BLOCKED,
        f"{_do(ranks, 'waits')} for a lock inside the backward pass{in_function(root)}{at(place)};"
        f" no thread of the process is left that could release it",
        ranks=ranks,
        place=place,
        seen=Seen.KERNEL,
        proof=dump_proof(case, root),
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.LOCK_CYCLE, outranks=("infinite_loop",))
def lock_cycle(case: Case) -> Explanation | None:
    locked = [root for root in hung_roots(case) if root.kind in _LOCKS and root.closed]
    if not locked:
        return None
    root, ranks = locked[0], _alike(locked)
    behind, own = line_behind(case, root), wait_place(case, root)
    place = behind or own
    joined = f", for a thread of its own that waits for a lock{at(behind)}" if behind else ""
    what, why = "a lock", f"{_holder(case, root, place)}no thread of the process is left that could release it"
    if root.kind is WaitKind.FILE_LOCK:
        ranks = tuple(one.rank for one in locked)
        what = f"a lock on {root.target or 'a file'}"
        why = f"{ranks_text(root.peers)} holds it and waits too" if root.peers else "whoever holds it waits too"
    return explained(
        Cause.LOCK_CYCLE,
        f"{_do(ranks, 'waits')} for {what}{in_function(root)}{at(own)}{joined}; {why}",
        ranks=ranks,
        place=place,
        seen=Seen.CLOSED,
        proof=dump_proof(case, root),
        advice="Look for a lock taken twice by one thread, or for two locks taken in opposite order.",
    )


def _holder(case: Case, root: Wait, wanted: Place | None) -> str:
    """The thread that took the lock, as the source of the lines shows that it stands in."""
    if wanted is None:
        return ""
    for stack in case.looked[root.rank].stacks if root.rank in case.looked else ():
        own = any((one.file, one.line) == (wanted.file, wanted.line) for one in stack.frames)
        held = taken_at(case.evidence.sources, wanted, stack.frames)
        if held is not None:
            return f"{'it' if own else f'its thread {stack.thread or stack.tid}'} took that lock{at(held)}, and "
    return ""


def _sleeps(root: Wait) -> bool:
    """Itself, or the process that it waits for; of `sleep` in a shell the end cannot be read."""
    return (root.child.deepest.kind if root.child else root.kind) is WaitKind.SLEEP


@rule(RulePhase.WAITS_BY_ITSELF, Cause.STARVED, outranks=("blocked_io",))
def starved(case: Case) -> Explanation | None:
    sleeping = [root for root in hung_roots(case) if root.until_s is not None or _sleeps(root)]
    if not sleeping:
        return None
    root = sleeping[0]
    ranks = _alike(sleeping)
    place = wait_place(case, root)
    deadline_s = case.evidence.limits.deadline_s
    until = "" if root.until_s is None else f" until {root.until_s:.0f} s after the launch"
    late = root.until_s is not None and deadline_s is not None and root.until_s > deadline_s
    over = f", past the deadline of {deadline_s:g} s" if late else ""
    what = f"{_do(ranks, 'sleeps')}{at(place)}"
    if root.child is not None:
        what = f"rank {root.rank} waits{at(place)} for its child process {_named(root.child.deepest)}, which sleeps"
    return explained(
        Cause.STARVED,
        f"{what}{until}{over}, and the others wait for it",
        ranks=ranks,
        place=place,
        seen=Seen.KERNEL,
        proof=dump_proof(case, root),
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.BLOCKED_IO, outranks=("transport",))
def blocked_io(case: Case) -> Explanation | None:
    blocked = [root for root in hung_roots(case) if root.kind in _OUTSIDE]
    if not blocked:
        return None
    root, ranks = blocked[0], _alike(blocked)
    # Where nobody can end it, the innermost process that waits shows why; else the rank's own line says what to limit.
    place = _child_place(case, root, root.child.deepest) if root.child and root.closed else wait_place(case, root)
    quiet_s = case.evidence.ended_s - (case.evidence.last_progress_s or 0.0)
    on = f" on {shorten(root.target, 80)}" if root.target and not root.target.startswith(("pipe:", "socket:")) else ""
    other = f"; its child process {_named(root.child)} stands in {_stands_in(root.child)}" if root.child else ""
    silent = "; whoever holds the other end waits too" if root.closed else ", and no byte came or went"
    return explained(
        Cause.BLOCKED_IO,
        f"{_do(ranks, 'stands')} in {root.stands_in}{on}{at(place)} for {quiet_s:.0f} s{silent}{other}",
        ranks=ranks,
        place=place,
        seen=Seen.KERNEL,
        proof=dump_proof(case, root),
        advice="Look at the other end: a pipe nobody writes to, a socket, a file system that does not answer. A limit"
        " on the read turns the wait into an error.",
    )


@rule(RulePhase.WAITS_BY_ITSELF, Cause.INFINITE_LOOP, outranks=("pool_worker_lost",))
def infinite_loop(case: Case) -> Explanation | None:
    looping = [root for root in hung_roots(case) if root.kind in _COMPUTING or root.computing]
    if not looping:
        return None
    root, ranks = looping[0], _alike(looping)
    lines = sorted({line for _, line in loop_lines(root, case.evidence.samples)})
    place = loop_place(case, root)
    return explained(
        Cause.INFINITE_LOOP,
        f"{_computes(case, root, ranks, place)}: only line{'s' if len(lines) > 1 else ''}"
        f" {', '.join(map(str, lines))} in every sample, no mark, no step",
        ranks=ranks,
        place=place,
        seen=Seen.SAMPLES,
        proof=dump_proof(case, root),
    )


def _computes(case: Case, root: Wait, ranks: Sequence[int], place: Place | None) -> str:
    """Who computes without end, and where: the rank, or a process below it that it waits for."""
    if not root.computing:
        what = "compiles" if root.kind is WaitKind.COMPILE else "computes"
        return f"{_do(ranks, what)} without end{in_function(root)}{at(place)}"
    child, more = root.computing[0], len(root.computing) - 1
    loads = root.kind is WaitKind.LOADER
    who = f"a batch, and its data loader worker {child.pid}" if loads else f"its child process {child.pid}, which"
    inside = f" in {place.function}" if place and place.function else ""
    others = f" (and so {'does' if more == 1 else 'do'} {counted(more, 'other')})" if more else ""
    waits = f"rank {root.rank} waits{at(wait_place(case, root))}"
    return f"{waits} for {who} computes without end{inside}{at(place)}{others}"


def _alike(roots: Sequence[Wait]) -> tuple[int, ...]:
    """The ranks that stand where the first of the roots stands, and in the same."""
    first = (roots[0].kind, roots[0].user)
    return tuple(root.rank for root in roots if (root.kind, root.user) == first)


def _below(case: Case, wanted: Callable[[ChildWait], bool]) -> tuple[Wait, ChildWait] | None:
    """The first root that waits for a process below it, at the end of which one stands in what is wanted."""
    waiting = ((root, root.child.deepest) for root in hung_roots(case) if root.child is not None)
    return next(((root, child) for root, child in waiting if wanted(child)), None)


def _is_forked_lock(child: ChildWait) -> bool:
    """A lock of its own memory, in a process that began as a copy of another: a new program has no locks to inherit."""
    began_anew = any(word in child.command for word in _NEW_PROCESSES)
    return child.kind is WaitKind.LOCK and child.closed and not child.target and not began_anew


def _child_place(case: Case, root: Wait, child: ChildWait) -> Place | None:
    """The child's line; the rank's own, where the child is no Python process or could not be read."""
    in_a_file = child.user is not None and not child.user.file.startswith("<")
    return place_of(case, None, child.user) if in_a_file else wait_place(case, root)


def _stands_in(child: ChildWait) -> str:
    words = {
        WaitKind.LOCK: "a lock",
        WaitKind.FILE_LOCK: "a lock on a file",
        WaitKind.PIPE: "a write to a full pipe",
        WaitKind.SLEEP: "a sleep",
        WaitKind.CHILD: "a wait for a child process of its own",
        WaitKind.IO: "a read or write",
        WaitKind.STOPPED: "state T, stopped by a signal",
    }
    return words.get(child.deepest.kind, "a wait of unknown kind")


def _named(child: ChildWait) -> str:
    return f"{child.pid} ({shorten(child.command, 60)})"


def _do(ranks: Sequence[int], does: str) -> str:
    """ "rank 1 waits", "ranks 0-3 wait"."""
    return f"{ranks_text(ranks)} {does if len(ranks) == 1 else does.removesuffix('s')}"
