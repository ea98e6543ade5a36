"""Why a run hangs on its host: rules over roots of the wait-for graph that wait for no other rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
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
    standing,
    wait_place,
)
from nsa_harness.core.diagnosis.phases import RulePhase, rule_given
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.diagnosis.rules.threads import line_behind
from nsa_harness.core.evidence.stacks import A_LOCK, awaited
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.limits import limits_of
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import loop_lines
from nsa_harness.core.verdict.wait import ChildWait, Wait, WaitKind

_NEW_PROCESSES = ("multiprocessing.spawn", "multiprocessing.forkserver", "multiprocessing-fork")


def _below(wanted: Callable[[ChildWait], bool]) -> Callable[[Case], tuple[Wait, ChildWait] | None]:
    """Finds the first root that waits for a process below it, at the end of which one stands in what is wanted."""

    def found(case: Case) -> tuple[Wait, ChildWait] | None:
        waiting = ((root, root.child.deepest) for root in hung_roots(case) if root.child is not None)
        return next(((root, child) for root, child in waiting if wanted(child)), None)

    return found


def _itself_or_below(kind: WaitKind) -> Callable[[Case], tuple[Wait, tuple[int, ...], ChildWait | None] | None]:
    """Finds the root that stands in that, with the ranks of all that do, or the child that a root waits for."""

    def found(case: Case) -> tuple[Wait, tuple[int, ...], ChildWait | None] | None:
        if itself := standing(lambda root: root.kind is kind, anywhere=True)(case):
            return *itself, None
        below = _below(lambda child: child.kind is kind)(case)
        return below and (below[0], (below[0].rank,), below[1])

    return found


@rule_given(
    _itself_or_below(WaitKind.STOPPED),
    RulePhase.WAITS_BY_ITSELF,
    Cause.STOPPED_PROCESS,
    outranks=("gil_held_native",),
)
def stopped_process(case: Case, root: Wait, ranks: tuple[int, ...], child: ChildWait | None) -> Explanation:
    place = wait_place(case, root)
    said = f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped by a signal (state T): a debugger, Ctrl-Z"
    said += " or a foreign SIGSTOP"
    if child is not None:
        said = f"rank {root.rank} waits{at(place)} for its child process {_named(child)}, which is stopped by a signal"
    who = " (a scheduler that suspends, a debugger, a shell)" if child is None else ""
    resumes = "`kill -CONT PID` resumes." if child is None else f"`kill -CONT {child.pid}` resumes the child."
    return explained(
        Cause.STOPPED_PROCESS,
        said,
        ranks=ranks,
        place=place,
        seen=EvidenceKind.FACT,
        proof=dump_proof(case, root),
        advice=f"Find who sent the signal{who}; {resumes}",
    )


def _loading(case: Case) -> tuple[Wait, ChildWait] | None:
    waiting = (root for root in hung_roots(case) if root.kind is WaitKind.LOADER and not root.computing)
    return next(((root, root.child) for root in waiting if root.child is not None), None)


@rule_given(_loading, RulePhase.WAITS_BY_ITSELF, Cause.DATALOADER_WORKER_BLOCKED, outranks=("fork_lock",))
def dataloader_worker_blocked(case: Case, root: Wait, worker: ChildWait) -> Explanation:
    place = _child_place(case, root, worker)
    held = case.program.other_holder_of_lock(place) if place and _is_forked_lock(worker) else None
    forked = "; it was forked with a lock held by a thread that it does not have" if _is_forked_lock(worker) else ""
    forked += f"; {held.function} takes that lock too{at(held)}" if held else ""
    return explained(
        Cause.DATALOADER_WORKER_BLOCKED,
        f"rank {root.rank} waits for a batch{at(wait_place(case, root))}, and its data loader worker {worker.pid}"
        f" is blocked in {_stands_in(worker)}{at(place)}{forked}",
        ranks=(root.rank,),
        place=held or place,
        seen=EvidenceKind.KERNEL if worker.closed else EvidenceKind.PART,
        proof=dump_proof(case, root),
    )


def _is_forked_lock(child: ChildWait) -> bool:
    """A lock of its own memory, in a process that began as a copy of another: a new program has no locks to inherit."""
    began_anew = any(word in child.command for word in _NEW_PROCESSES)
    return child.kind is WaitKind.LOCK and child.closed and not child.target and not began_anew


@rule_given(_below(_is_forked_lock), RulePhase.WAITS_BY_ITSELF, Cause.FORK_LOCK, outranks=("pipe_full",))
def fork_lock(case: Case, root: Wait, child: ChildWait) -> Explanation:
    place = _child_place(case, root, child)
    held = case.program.other_holder_of_lock(place) if place else None
    return explained(
        Cause.FORK_LOCK,
        f"rank {root.rank} waits{at(wait_place(case, root))} for its child process {child.pid}, which waits for a"
        f" lock{at(place)} that no thread of the child holds: it was held when the child was forked"
        f"{f', by {held.function}{at(held)}' if held else ''}",
        ranks=(root.rank,),
        place=held or place,
        seen=EvidenceKind.CLOSED,
        proof=dump_proof(case, root),
    )


@rule_given(
    _itself_or_below(WaitKind.PIPE),
    RulePhase.WAITS_BY_ITSELF,
    Cause.PIPE_FULL,
    outranks=("backward_function_blocked",),
)
def pipe_full(case: Case, root: Wait, _: tuple[int, ...], child: ChildWait | None) -> Explanation:
    place = _child_place(case, root, child) if child else wait_place(case, root)
    who = f"the child process {child.pid} of rank {root.rank} writes" if child else f"rank {root.rank} writes"
    return explained(
        Cause.PIPE_FULL,
        f"{who} to a pipe that is full{at(place)}; whoever holds the reading end waits too, so nobody empties it",
        ranks=(root.rank,),
        place=place,
        seen=EvidenceKind.KERNEL,
        proof=dump_proof(case, root),
    )


@rule_given(
    standing(lambda root: root.kind is WaitKind.LOCK and root.in_backward),
    RulePhase.WAITS_BY_ITSELF,
    Cause.BACKWARD_FUNCTION_BLOCKED,
    outranks=("lock_cycle",),
)
def backward_function_blocked(case: Case, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    place = wait_place(case, root)
    return explained(
        Cause.BACKWARD_FUNCTION_BLOCKED,
        f"{_do(ranks, 'waits')} for a lock inside the backward pass{in_function(root)}{at(place)};"
        f" no thread of the process is left that could release it",
        ranks=ranks,
        place=place,
        seen=EvidenceKind.KERNEL,
        proof=dump_proof(case, root),
    )


def _is_locked(root: Wait) -> bool:
    return root.kind in (WaitKind.LOCK, WaitKind.FILE_LOCK) and root.closed


@rule_given(standing(_is_locked), RulePhase.WAITS_BY_ITSELF, Cause.LOCK_CYCLE, outranks=("infinite_loop",))
def lock_cycle(case: Case, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    behind, own = line_behind(case, root), wait_place(case, root)
    place = behind or own
    stack = rank_stack(case.looked[root.rank]) if root.rank in case.looked else None
    served = case.program.missing_partner(stack.frames) if stack and not behind else None
    left = case.program.exit_with_lock(place) if place else None
    joined = f", for a thread of its own that waits for a lock{at(behind)}" if behind else ""
    wanted = awaited(stack.frames) if stack else A_LOCK
    what, advice = wanted.what, _ADVICE
    why = f"{_holder(case, root, place)}no thread of the process is left that could {wanted.ended_by}"
    if wanted is not A_LOCK and not behind:
        advice = (
            f"Look at what was to {wanted.ended_by}: it has ended, early or by an exception it keeps, or waits itself."
        )
    if root.kind is WaitKind.FILE_LOCK:
        ranks = tuple(one.rank for one in hung_roots(case) if _is_locked(one))
        what, advice = f"a lock on {root.target or 'a file'}", _ADVICE
        why = f"{ranks_text(root.peers)} holds it and waits too" if root.peers else "whoever holds it waits too"
    why += f"; a function that takes it leaves without giving it back{at(left)}" if left else ""
    why += f"; the other end is for {served.function} to serve, in a thread of its own{at(served)}" if served else ""
    return explained(
        Cause.LOCK_CYCLE,
        f"{_do(ranks, 'waits')} for {what}{in_function(root)}{at(own)}{joined}; {why}",
        ranks=ranks,
        place=left or served or place,
        seen=EvidenceKind.CLOSED,
        proof=dump_proof(case, root),
        advice=advice,
    )


_ADVICE = "Look for a lock taken twice by one thread, or for two locks taken in opposite order."


def _holder(case: Case, root: Wait, wanted: Place | None) -> str:
    """The thread that took the lock, as the source of the lines shows that it stands in."""
    if wanted is None:
        return ""
    for stack in case.looked[root.rank].stacks if root.rank in case.looked else ():
        own = any((one.file, one.line) == (wanted.file, wanted.line) for one in stack.frames)
        held = case.program.lock_taken_by(wanted, stack.frames)
        if held is not None:
            return f"{'it' if own else f'its thread {stack.thread or stack.tid}'} took that lock{at(held)}, and "
    return ""


def _sleeps(root: Wait) -> bool:
    """Itself, or the process that it waits for; of `sleep` in a shell the end cannot be read."""
    return root.until_s is not None or (root.child.deepest.kind if root.child else root.kind) is WaitKind.SLEEP


@rule_given(standing(_sleeps), RulePhase.WAITS_BY_ITSELF, Cause.STARVED, outranks=("blocked_io",))
def starved(case: Case, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    place = wait_place(case, root)
    limit_s, deadline_s = case.evidence.limits.deadline_s, limits_of(case.evidence).deadline_s
    until = "" if root.until_s is None else f" until {root.until_s:.0f} s after the launch"
    late = root.until_s is not None and deadline_s is not None and root.until_s > deadline_s
    over = f", past the deadline of {limit_s:g} s" if late else ""
    what = f"{_do(ranks, 'sleeps')}{at(place)}"
    if root.child is not None:
        what = f"rank {root.rank} waits{at(place)} for its child process {_named(root.child.deepest)}, which sleeps"
    return explained(
        Cause.STARVED,
        f"{what}{until}{over}, and the others wait for it",
        ranks=ranks,
        place=place,
        seen=EvidenceKind.KERNEL,
        proof=dump_proof(case, root),
    )


@rule_given(
    standing(lambda root: root.kind in (WaitKind.IO, WaitKind.FILE_LOCK, WaitKind.CHILD)),
    RulePhase.WAITS_BY_ITSELF,
    Cause.BLOCKED_IO,
    outranks=("transport",),
)
def blocked_io(case: Case, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    # Where nobody can end it, the innermost process that waits shows why; else the rank's own line says what to limit.
    place = _child_place(case, root, root.child.deepest) if root.child and root.closed else wait_place(case, root)
    quiet_s = case.evidence.ended_s - (case.evidence.last_progress_s or 0.0)
    on = f" on {shorten(root.target, 80)}" if root.target and not root.target.startswith(("pipe:", "socket:")) else ""
    other = f"; its child process {_named(root.child)} is blocked in {_stands_in(root.child)}" if root.child else ""
    silent = "; whoever holds the other end waits too" if root.closed else ", and no byte came or went"
    return explained(
        Cause.BLOCKED_IO,
        f"{_do(ranks, 'stands')} in {root.stands_in}{on}{at(place)} for {quiet_s:.0f} s{silent}{other}",
        ranks=ranks,
        place=place,
        seen=EvidenceKind.KERNEL,
        proof=dump_proof(case, root),
        advice="Look at the other end: a pipe nobody writes to, a socket, a file system that does not answer. A limit"
        " on the read turns the wait into an error.",
    )


@rule_given(
    standing(lambda root: root.kind in (WaitKind.COMPUTE, WaitKind.COMPILE) or bool(root.computing)),
    RulePhase.WAITS_BY_ITSELF,
    Cause.INFINITE_LOOP,
    outranks=("pool_worker_lost",),
)
def infinite_loop(case: Case, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    lines = sorted({line for _, line in loop_lines(root, case.evidence.samples)})
    place = loop_place(case, root)
    return explained(
        Cause.INFINITE_LOOP,
        f"{_computes(case, root, ranks, place)}: only line{'s' if len(lines) > 1 else ''}"
        f" {', '.join(map(str, lines))} in every sample, no progress, no step",
        ranks=ranks,
        place=place,
        seen=EvidenceKind.SAMPLES,
        proof=dump_proof(case, root),
    )


def _computes(case: Case, root: Wait, ranks: Sequence[int], place: Place | None) -> str:
    """Who computes without end, and where: the rank, or a process below it that it waits for."""
    if not root.computing:
        what = "compiles" if root.kind is WaitKind.COMPILE else "computes"
        return f"{_do(ranks, what)} without end{in_function(root)}{at(place)}"
    child, more = root.computing[0], len(root.computing) - 1
    loads = root.kind is WaitKind.LOADER
    below = f"its thread {child.thread}" if child.thread else f"its child process {child.pid}"
    who = f"a batch, and its data loader worker {child.pid}" if loads else f"{below}, which"
    inside = f" in {place.function}" if place and place.function else ""
    others = f" (and so {'does' if more == 1 else 'do'} {counted(more, 'other')})" if more else ""
    waits = f"rank {root.rank} waits{at(wait_place(case, root))}"
    return f"{waits} for {who} computes without end{inside}{at(place)}{others}"


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
