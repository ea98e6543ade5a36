"""Rules about ranks that hang on their own host, for example in locks, files, sleeps or endless loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    hung_roots,
    loop_place,
    place_of,
    process_facts,
    root_where,
    wait_place,
    waiting_function,
)
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.diagnosis.rules.threads import awaited_thread_line, living_partner
from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.evidence.stacks import A_LOCK, ThreadWait, process_wait, thread_wait, training_stack
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.source_code.loops import innermost_loop, looks_outside
from nsa_harness.core.verdict.host_waits import is_from_spawn
from nsa_harness.core.verdict.limits import final_limits
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import loop_lines
from nsa_harness.core.verdict.wait import ChildWait, Wait, WaitKind


def _child_wait_where(
    matches: Callable[[ChildWait], bool],
) -> Callable[[DiagnosisContext], tuple[Wait, ChildWait] | None]:
    """Return a function for `@rule_if` that finds a hung child process whose wait satisfies `matches`."""

    def find(context: DiagnosisContext) -> tuple[Wait, ChildWait] | None:
        waiting = ((root, root.child.deepest) for root in hung_roots(context) if root.child is not None)
        return next(((root, child) for root, child in waiting if matches(child)), None)

    return find


def _rank_or_child_in(
    kind: WaitKind,
) -> Callable[[DiagnosisContext], tuple[Wait, tuple[int, ...], ChildWait | None] | None]:
    """Return a function for `@rule_if` that finds a hung rank or child process whose wait is of the given kind."""

    def find(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...], ChildWait | None] | None:
        if own := root_where(lambda root: root.kind is kind, all_matching=True)(context):
            return *own, None
        child_match = _child_wait_where(lambda child: child.kind is kind)(context)
        return child_match and (child_match[0], (child_match[0].rank,), child_match[1])

    return find


@rule_if(_rank_or_child_in(WaitKind.STOPPED))
def stopped_process(
    context: DiagnosisContext, root: Wait, ranks: tuple[int, ...], child: ChildWait | None
) -> Explanation:
    """Explain a hang in which a rank or its child process is stopped (SIGSTOP)."""
    snapshot = context.last_snapshot.get(root.rank)
    pid = child.pid if child else snapshot.pid if snapshot else None
    senders = [(rank, file.stopped[pid]) for rank, file in context.status_files.items() if pid in file.stopped]
    sender, lines = senders[0] if senders else (None, ())
    sender_line = place_of(context, sender, _with_directory(context, lines[0])) if lines else None
    return Explanation(
        cause=Cause.STOPPED_PROCESS,
        evidence=EvidenceKind.FACT,
        facts={
            "child": process_facts(child),
            "stopped": ranks,
            "waiting": root.rank,
            "wait_line": wait_place(context, root),
            "sender": sender,
            "itself": sender is None and (child or root).is_closed,
        },
        ranks=ranks if sender is None else (sender,),
        place=sender_line or wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _with_directory(context: DiagnosisContext, frame: Frame) -> Frame:
    """Return the frame, of which only the name of the file is known, with the path if only one file has this name."""
    stacks = (stack for rank in context.last_snapshot.values() for stack in rank.stacks)
    files = {frame.file for stack in stacks for frame in stack.frames}
    files |= {source.file for source in context.evidence.sources}
    matching = [file for file in files if file.rpartition("/")[2] == frame.file]
    return replace(frame, file=matching[0]) if len(matching) == 1 else frame


@rule_if(root_where(lambda root: bool(root.debugger)))
def debugger_waits(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a rank is at a debugger's prompt or waits for a debugger to connect."""
    return Explanation(
        cause=Cause.DEBUGGER_WAITS,
        evidence=EvidenceKind.KERNEL,
        facts={"debugger": root.debugger, "closed": root.is_closed, "target": "" if root.is_closed else root.target},
        ranks=ranks,
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _blocked_loader(context: DiagnosisContext) -> tuple[Wait, ChildWait] | None:
    """Return the wait of a rank, and that of the blocked DataLoader worker behind it, or None if there is none."""
    waiting = (root for root in hung_roots(context) if root.kind is WaitKind.LOADER and not root.computing)
    return next(((root, root.child) for root in waiting if root.child is not None), None)


@rule_if(_blocked_loader)
def dataloader_worker_blocked(context: DiagnosisContext, root: Wait, worker: ChildWait) -> Explanation:
    """Explain a hang in which a rank waits for a DataLoader worker that is blocked."""
    return _explain_blocked_child(
        context,
        Cause.DATALOADER_WORKER_BLOCKED,
        root,
        worker,
        evidence=EvidenceKind.KERNEL if worker.is_closed else EvidenceKind.PART,
    )


def _may_be_inherited_lock(child: ChildWait) -> bool:
    """Return whether a forked child process could be waiting for a lock that was locked when it was forked."""
    is_inheritable = child.kind is WaitKind.LOCK and child.is_closed and not child.target
    return is_inheritable and not is_from_spawn(child.command)


@rule_if(_child_wait_where(_may_be_inherited_lock))
def fork_lock(context: DiagnosisContext, root: Wait, child: ChildWait) -> Explanation:
    """Explain a hang in which a child process waits for a lock that was already locked when it was forked."""
    return _explain_blocked_child(context, Cause.FORK_LOCK, root, child, evidence=EvidenceKind.CLOSED)


def _explain_blocked_child(
    context: DiagnosisContext, cause: Cause, root: Wait, child: ChildWait, *, evidence: EvidenceKind
) -> Explanation:
    """Create the explanation for a rank that waits for a blocked child process."""
    line = _child_place(context, root, child)
    is_inherited = _may_be_inherited_lock(child)
    taker = context.program.other_holder_of_lock(line) if line and is_inherited else None
    return Explanation(
        cause=cause,
        evidence=evidence,
        facts={
            "line": wait_place(context, root),
            "child": process_facts(child),
            "child_line": line,
            "inherited_lock": is_inherited,
            "lock_taken_at": taker,
        },
        ranks=(root.rank,),
        place=taker or line,
        proof=dump_proof(context, root),
    )


@rule_if(_rank_or_child_in(WaitKind.PIPE))
def pipe_full(context: DiagnosisContext, root: Wait, _: tuple[int, ...], child: ChildWait | None) -> Explanation:
    """Explain a hang in which a rank or its child process writes to a full pipe that no process reads."""
    return Explanation(
        cause=Cause.PIPE_FULL,
        evidence=EvidenceKind.KERNEL,
        facts={"child": process_facts(child)},
        ranks=(root.rank,),
        place=_child_place(context, root, child) if child else wait_place(context, root),
        proof=dump_proof(context, root),
    )


@rule_if(root_where(lambda root: root.kind is WaitKind.LOCK and root.in_backward))
def backward_function_blocked(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a custom autograd function waits for a lock during the backward pass."""
    return Explanation(
        cause=Cause.BACKWARD_FUNCTION_BLOCKED,
        evidence=EvidenceKind.KERNEL,
        facts={"function": waiting_function(root)},
        ranks=ranks,
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _is_lock_deadlock(root: Wait) -> bool:
    return root.kind in (WaitKind.LOCK, WaitKind.FILE_LOCK) and root.is_closed


@rule_if(root_where(_is_lock_deadlock))
def lock_cycle(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a rank waits for a lock that no thread or process can release."""
    thread_line, own_line = awaited_thread_line(context, root), wait_place(context, root)
    place = thread_line or own_line
    stack = rank_stack(context.last_snapshot[root.rank]) if root.rank in context.last_snapshot else None
    missing_partner = context.program.missing_partner(stack.frames) if stack and not thread_line else None
    exit_line = context.program.exit_with_lock(place) if place else None
    waited_for = thread_wait(stack.frames) if stack else A_LOCK
    is_file_lock = root.kind is WaitKind.FILE_LOCK
    return Explanation(
        cause=Cause.LOCK_CYCLE,
        evidence=EvidenceKind.CLOSED,
        facts={
            "variant": "file" if is_file_lock else "thread",
            "waits_for": waited_for.awaited_item,
            "ended_by": waited_for.ended_by,
            "is_lock": is_file_lock or waited_for is A_LOCK or thread_line is not None,
            "file": root.target,
            "file_held_by": root.peers,
            "line": own_line,
            "function": waiting_function(root),
            "thread_line": thread_line,
            "holder": None if is_file_lock else _lock_holder_facts(context, root, place),
            "never_released_at": exit_line,
            "served_at": missing_partner,
            "living": living_partner(context, root) if missing_partner else None,
        },
        ranks=tuple(hung_root.rank for hung_root in hung_roots(context) if _is_lock_deadlock(hung_root))
        if is_file_lock
        else ranks,
        place=exit_line or missing_partner or place,
        proof=dump_proof(context, root),
    )


def _lock_holder_facts(context: DiagnosisContext, root: Wait, lock_line: Place | None) -> Facts | None:
    """Return facts about the thread that took the lock (None: the waiting one), or None if this thread is unknown."""
    if lock_line is None:
        return None
    for stack in context.last_snapshot[root.rank].stacks if root.rank in context.last_snapshot else ():
        is_own = any((frame.file, frame.line) == (lock_line.file, lock_line.line) for frame in stack.frames)
        acquired_at = context.program.lock_taken_by(lock_line, stack.frames)
        if acquired_at is not None:
            return {"thread": None if is_own else stack.thread or stack.tid, "line": acquired_at}
    return None


def _is_sleeping(root: Wait) -> bool:
    return root.until_s is not None or (root.child.deepest.kind if root.child else root.kind) is WaitKind.SLEEP


@rule_if(root_where(_is_sleeping))
def starved(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a rank sleeps, or waits for a child process that sleeps."""
    deadline_s = final_limits(context.evidence).deadline_s
    is_late = root.until_s is not None and deadline_s is not None and root.until_s > deadline_s
    return Explanation(
        cause=Cause.STARVED,
        evidence=EvidenceKind.KERNEL,
        facts={
            "child": process_facts(root.child and root.child.deepest),
            "until_s": root.until_s,
            "missed_deadline_s": context.evidence.limits.deadline_s if is_late else None,
        },
        ranks=ranks,
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


@rule_if(root_where(lambda root: root.kind in (WaitKind.IO, WaitKind.FILE_LOCK, WaitKind.CHILD)))
def blocked_io(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a rank, or a child process that it waits for, is blocked in I/O or a file lock."""
    is_named = not root.target.startswith(("pipe:", "socket:"))
    # If no process can end the wait, the innermost child shows why. Otherwise, the rank's own line needs a timeout.
    blocking_child = root.child.deepest if root.child and root.is_closed else None
    return Explanation(
        cause=Cause.BLOCKED_IO,
        evidence=EvidenceKind.KERNEL,
        facts={
            "variant": "call",
            "blocked_in": root.blocked_in,
            "target": root.target if is_named else "",
            "no_progress_s": context.evidence.ended_s - (context.evidence.last_progress_s or 0.0),
            "closed": root.is_closed,
            "child": process_facts(root.child),
        },
        ranks=ranks,
        place=_child_place(context, root, blocking_child) if blocking_child else wait_place(context, root),
        proof=dump_proof(context, root),
    )


@rule_if(root_where(lambda root: root.kind in (WaitKind.COMPUTE, WaitKind.COMPILE) or bool(root.computing)))
def infinite_loop(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a rank computes indefinitely, or waits for a thread or process that does."""
    child, place = root.computing[0] if root.computing else None, loop_place(context, root)
    lines = loop_lines(root, context.evidence.samples)
    own_lines = {line for file, line in lines if place is not None and file == place.file}
    return Explanation(
        cause=Cause.INFINITE_LOOP,
        evidence=EvidenceKind.OPEN if _may_end_from_outside(context, place) else EvidenceKind.SAMPLES,
        facts={
            "compiles": root.kind is WaitKind.COMPILE,
            "function": waiting_function(root),
            "line": wait_place(context, root),
            "computing": {"pid": child.pid, "thread": child.thread} if child else None,
            "loads_data": root.kind is WaitKind.LOADER,
            "others_computing": max(len(root.computing) - 1, 0),
            "lines": sorted(own_lines or {line for _, line in lines}),
        },
        ranks=ranks,
        place=place,
        proof=dump_proof(context, root),
    )


def _may_end_from_outside(context: DiagnosisContext, place: Place | None) -> bool:
    """Return whether the loop around `place` waits for something outside the process, such as a file."""
    excerpt = context.program.excerpt(place) if place else None
    if excerpt is None or place is None or place.line is None:
        return False
    return looks_outside(innermost_loop(dedent(excerpt.text), place.line - excerpt.first + 1))


def _child_place(context: DiagnosisContext, root: Wait, child: ChildWait) -> Place | None:
    """Return the program line that the child is on or, if that is unknown, the line that the rank is on."""
    in_a_file = child.user_frame is not None and not child.user_frame.file.startswith("<")
    return place_of(context, None, child.user_frame) if in_a_file else wait_place(context, root)


def _waiting_child(context: DiagnosisContext) -> tuple[Wait, ChildWait, ThreadWait] | None:
    """Return the wait of a rank, the child process behind it, and what the child waits for, or None.

    If a child waits for a child itself, the innermost one counts. A child that reads or writes something other than a
    queue does not count.
    """
    for root in hung_roots(context):
        if root.kind not in (WaitKind.IO, WaitKind.CHILD) or root.child is None or root.computing:
            continue
        child, snapshot = root.child.deepest, context.last_snapshot.get(root.rank)
        stack = training_stack(snapshot.child_stacks.get(child.pid, ()), child.pid) if snapshot else None
        wait = process_wait(stack.frames) if stack else A_LOCK
        has_line = child.user_frame is not None and not child.user_frame.file.startswith("<")
        if has_line and (child.kind is WaitKind.LOCK or wait is not A_LOCK):
            return root, child, wait
    return None


@rule_if(_waiting_child)
def child_waits(context: DiagnosisContext, root: Wait, child: ChildWait, wait: ThreadWait) -> Explanation:
    """Explain a hang in which a rank waits for a child process that waits for a lock, a barrier or a queue."""
    rank_is_at_fault = wait.call == "Queue.put" and not root.is_closed
    return Explanation(
        cause=Cause.LOCK_CYCLE,
        evidence=EvidenceKind.CLOSED if root.is_closed else EvidenceKind.KERNEL,
        facts={
            "variant": "child",
            "waits_for": wait.awaited_item,
            "ended_by": wait.ended_by,
            "is_lock": wait is A_LOCK,
            "living": None,
            "line": wait_place(context, root),
            "child": process_facts(child),
            "closed": root.is_closed,
            "no_progress_s": context.evidence.ended_s - (context.evidence.last_progress_s or 0.0),
        },
        ranks=(root.rank,),
        place=wait_place(context, root) if rank_is_at_fault else place_of(context, None, child.user_frame),
        proof=dump_proof(context, root),
    )
