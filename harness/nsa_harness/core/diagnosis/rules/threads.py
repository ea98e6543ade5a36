"""Rules about ranks that wait for a thread of their process, and about native code that does not release the GIL."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    hung_roots,
    loop_place,
    place_of,
    root_where,
    wait_place,
    waiting_function,
)
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.health_samples import PrintedMessage
from nsa_harness.core.evidence.stacks import (
    MULTIPROCESSING,
    awaits_result,
    awaits_task,
    is_poller,
    is_worker,
    training_stack,
    user_frame,
)
from nsa_harness.core.report import Facts, HangKind, Place
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import LOOP_SAMPLES, loop_lines
from nsa_harness.core.verdict.wait import Wait, WaitKind

# Calls in which a thread waits for the end of another thread, or for its result.
_JOIN_CALLS = (
    ("/threading.py", ("join", "_shutdown", "_wait_for_tstate_lock")),
    ("concurrent/futures/_base.py", ("result", "exception", "wait", "as_completed")),
    ("concurrent/futures/thread.py", ("shutdown", "_python_exit")),
)
_LOCKS = frozenset({WaitKind.LOCK, WaitKind.UNKNOWN})
# Waits that a thread or child process could end.
_ENDED_BY_PARTNER = frozenset({WaitKind.LOCK, WaitKind.SLEEP, WaitKind.IO, WaitKind.PIPE})


def _wait_for_dead_partner(context: DiagnosisContext) -> tuple[Wait, PrintedMessage] | None:
    """Find a root that a thread or child could end, and the last messages of a thread or child that died instead."""
    waiting = (root for root in hung_roots(context) if root.kind in _ENDED_BY_PARTNER and root.child is None)
    # A traceback without the name of a thread or child may be one that was caught and printed.
    deaths = (
        (root, death) for root in waiting if (rank := context.rank(root.rank)) for death in rank.background_failures
    )
    return next(((root, death) for root, death in deaths if death.name != death.kind), None)


@rule_if(_wait_for_dead_partner)
def thread_died(context: DiagnosisContext, root: Wait, death: PrintedMessage) -> Explanation:
    """An exception ended a thread or child process, and the rank waits for something that this one would have done."""
    return Explanation(
        cause=Cause.THREAD_DIED,
        evidence=EvidenceKind.PRINTED,
        facts={**death_facts(death), "function": waiting_function(root), "line": wait_place(context, root)},
        ranks=(root.rank,),
        place=death.entered or death.place,  # the thread's own function, which lets the exception escape
        proof=(f"rank{root.rank}/stderr.log", *dump_proof(context, root)),
    )


def death_facts(death: PrintedMessage) -> Facts:
    """Return the facts about a thread or child process that an exception ended."""
    return {"died": death.kind, "error": death.error, "raised_at": death.place}


def pool_worker_lost(context: DiagnosisContext) -> Explanation | None:
    """A rank waits for a task of its multiprocessing.Pool, and every worker of the pool waits for a task."""
    snapshots = ((root, context.last_snapshot.get(root.rank)) for root in hung_roots(context))
    root = next((root for root, snapshot in snapshots if snapshot and _waits_for_idle_pool(snapshot)), None)
    if root is None:
        return None
    return Explanation(
        cause=Cause.POOL_WORKER_LOST,
        evidence=EvidenceKind.CLOSED,
        facts={"function": waiting_function(root)},
        ranks=(root.rank,),
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


@rule_if(root_where(lambda root: root.kind is WaitKind.SLEEP))
def livelock(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation | None:
    """A rank polls on one line, sleeping in between, and makes no progress."""
    if context.judgement.proof is None or context.judgement.proof.kind is not HangKind.LIVELOCK:
        return None
    return Explanation(
        cause=Cause.LIVELOCK,
        evidence=EvidenceKind.SAMPLES,
        facts={"function": waiting_function(root)},
        ranks=ranks,
        place=loop_place(context, root),
        proof=(*dump_proof(context, root), "watch.jsonl"),
    )


def _root_waiting_for_thread(context: DiagnosisContext) -> tuple[Wait, Stack, str] | None:
    """Find the first root that waits for another thread which may still act."""
    waiting = (root for root in hung_roots(context) if root.kind in _LOCKS and not root.closed)
    return next(((root, *thread) for root in waiting if (thread := awaited_thread(context, root))), None)


@rule_if(_root_waiting_for_thread)
def open_thread_wait(context: DiagnosisContext, root: Wait, stack: Stack, syscall: str) -> Explanation:
    """A rank waits for another thread. It may still act, but has not done so for longer than an open wait may last."""
    return Explanation(
        cause=Cause.BLOCKED_IO if syscall else Cause.LOCK_CYCLE,
        evidence=EvidenceKind.OPEN,
        facts={
            "variant": "joined thread",
            "line": wait_place(context, root),
            "thread": stack.thread or stack.tid,
            "syscall": syscall,
        },
        ranks=(root.rank,),
        place=place_of(context, None, user_frame(stack.frames)),
        proof=dump_proof(context, root),
    )


def awaited_thread(context: DiagnosisContext, root: Wait) -> tuple[Stack, str] | None:
    """Return the stack of the thread that the rank waits for, and the system call in which that thread reads or writes.

    Return None if the rank waits for no thread of the program, or for several. Of several, the one counts that waits
    for a lock which it holds itself; if all wait for one lock, the first counts.
    """
    snapshot, stack = context.last_snapshot.get(root.rank), _training_stack_of(context, root)
    if snapshot is None or stack is None or not any(_has_frame_in(stack.frames, *join) for join in _JOIN_CALLS):
        return None
    others = [
        thread
        for thread in snapshot.stacks
        if thread is not stack and not is_poller(thread) and user_frame(thread.frames)
    ]
    others = [other for other in others if _waits_for_own_lock(context, other)] or others
    lines = {user_frame(other.frames) for other in others}
    locks = {context.program.locks_taken_at(line) for line in lines if line}
    if not lines or (len(lines) > 1 and (len(locks) != 1 or frozenset() in locks)):
        return None
    tasks = snapshot.process.tasks if snapshot.process else ()
    syscall = next((task.syscall for task in tasks if task.tid == others[0].tid), "")
    return others[0], "" if syscall in ("futex", "running") else syscall


def _waits_for_own_lock(context: DiagnosisContext, stack: Stack) -> bool:
    lock_line = user_frame(stack.frames)
    return lock_line is not None and context.program.lock_taken_by(lock_line, stack.frames) is not None


def awaited_thread_line(context: DiagnosisContext, root: Wait) -> Place | None:
    """Return the program's line in the thread that the rank waits for, or None: see `awaited_thread`."""
    thread = awaited_thread(context, root)
    return place_of(context, None, user_frame(thread[0].frames)) if thread else None


def _has_frame_in(frames: Sequence[Frame], file: str, names: Sequence[str]) -> bool:
    """Return whether a frame is in one of these functions. py-spy prefixes a method with its class."""
    return any(frame.file.endswith(file) and frame.function.rpartition(".")[2] in names for frame in frames)


def _waits_for_idle_pool(snapshot: RankSnapshot) -> bool:
    """Return whether the rank waits for a result of its multiprocessing.Pool while every worker waits for a task.

    A ProcessPoolExecutor would notice the lost worker and raise.
    """
    stack = rank_stack(snapshot)
    if stack is None or awaits_result(stack.frames) is not MULTIPROCESSING:
        return False
    children = (training_stack(stacks, pid) for pid, stacks in snapshot.child_stacks.items())
    workers = [worker for worker in children if worker and is_worker(MULTIPROCESSING, worker.frames)]
    return bool(workers) and all(awaits_task(worker.frames) for worker in workers)


_MISSING_HEARTBEAT_S = (
    2.0  # a heartbeat is missing after this time: its thread writes four times a second if it gets the GIL
)
# Frames between a Python line and the C function that it calls.
_BRIDGE_FRAMES = (
    "ffi_",
    "libffi",
    "_ctypes",
    "_call_function_pointer",
    "?",
    "cpython-",
    "libpython",
    "_PyEval",
    "PyObject_",
)


def _root_with_gil(context: DiagnosisContext) -> tuple[Wait, Stack] | None:
    """Find the first root that waits while it holds the GIL, else the first that computes and never releases it.

    A loop in Python releases the GIL when another thread requests it, so its heartbeat continues. A function of the
    interpreter itself, such as a regular-expression search, does not release it.
    """
    holders = [
        (root, stack)
        for root in hung_roots(context)
        if (stack := _training_stack_of(context, root)) and _keeps_gil(context, root, stack)
    ]
    waiting = [(root, stack) for root, stack in holders if root.kind is not WaitKind.COMPUTE]
    busy = (
        (root, stack)
        for root, stack in holders
        if not _in_library(stack) and _has_no_heartbeat_in_samples(context, root)
    )
    return waiting[0] if waiting else next(busy, None)


@rule_if(_root_with_gil)
def gil_held_native(context: DiagnosisContext, root: Wait, stack: Stack) -> Explanation:
    """A rank is in native code and holds the GIL, so no other Python thread can run."""
    computes = root.kind is WaitKind.COMPUTE
    return Explanation(
        cause=Cause.GIL_HELD_NATIVE,
        evidence=EvidenceKind.SAMPLES if computes else EvidenceKind.HOLDER if stack.native else EvidenceKind.STACKS,
        facts={"computes": computes, "native": _native_functions(stack), "function": waiting_function(root)},
        ranks=(root.rank,),
        place=loop_place(context, root) if computes else wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _has_no_heartbeat_in_samples(context: DiagnosisContext, root: Wait) -> bool:
    """Return whether all recent samples show one line, and no heartbeat came since the first of them."""
    sampled_s = [sample.at_s for sample in context.evidence.samples if sample.rank == root.rank][-LOOP_SAMPLES:]
    lines = loop_lines(root, context.evidence.samples)
    sampled_for_s = context.evidence.snapshots[-1].at_s - sampled_s[0] if sampled_s else 0.0
    return (
        len(lines) == 1
        and bool(sampled_s)
        and _heartbeat_age_s(context, root) >= max(_MISSING_HEARTBEAT_S, sampled_for_s)
    )


def _root_in_native_loop(context: DiagnosisContext) -> tuple[Wait, Stack] | None:
    looping = (
        (root, _training_stack_of(context, root)) for root in hung_roots(context) if root.kind is WaitKind.COMPUTE
    )
    return next(((root, stack) for root, stack in looping if stack and _stays_native(context, root, stack)), None)


@rule_if(_root_in_native_loop)
def native_busy_loop(context: DiagnosisContext, root: Wait, stack: Stack) -> Explanation:
    return Explanation(
        cause=Cause.NATIVE_BUSY_LOOP,
        # Native code that also holds the GIL may be at fault for that alone.
        evidence=EvidenceKind.STACKS if stack.gil else EvidenceKind.SAMPLES,
        facts={"native": _native_functions(stack), "function": waiting_function(root)},
        ranks=(root.rank,),
        place=loop_place(context, root),
        proof=dump_proof(context, root),
    )


def _training_stack_of(context: DiagnosisContext, root: Wait) -> Stack | None:
    """Return the stack of the rank's training thread in the last snapshot."""
    return rank_stack(context.last_snapshot[root.rank]) if root.rank in context.last_snapshot else None


def _stays_native(context: DiagnosisContext, root: Wait, stack: Stack) -> bool:
    """Return whether the rank never returns to Python: all samples show one line, and either the rank released the GIL
    or the heartbeat is missing.

    A Python loop that calls small C functions shows some of them too, but it holds the GIL and the heartbeat continues.
    """
    is_one_line = len(loop_lines(root, context.evidence.samples)) == 1
    return (
        is_one_line
        and _in_library(stack)
        and (not stack.gil or _heartbeat_age_s(context, root) >= _MISSING_HEARTBEAT_S)
    )


def _keeps_gil(context: DiagnosisContext, root: Wait, stack: Stack) -> bool:
    """Return whether the rank keeps the GIL. Without native frames only a missing heartbeat shows that."""
    return stack.gil and (bool(stack.native) or _heartbeat_age_s(context, root) >= _MISSING_HEARTBEAT_S)


def _heartbeat_age_s(context: DiagnosisContext, root: Wait) -> float:
    """Return the time from the rank's last heartbeat to the last snapshot; 0 if it never wrote a heartbeat."""
    status_file = context.last_snapshot[root.rank].status_file if root.rank in context.last_snapshot else None
    return (
        context.evidence.snapshots[-1].at_s - status_file.beat_s
        if status_file and status_file.beat_s is not None
        else 0.0
    )


def _in_library(stack: Stack) -> bool:
    """Return whether the thread runs in a function of a library, not of the interpreter."""
    return bool(stack.native) and not any(word in stack.native[0] for word in ("libpython", "_PyEval"))


def _native_functions(stack: Stack) -> tuple[str, ...]:
    """Return the outermost native function that is not part of the interpreter or ctypes, and the innermost one."""
    functions = [name for name in stack.native if not any(word in name for word in _BRIDGE_FRAMES)] or [*stack.native]
    return tuple(dict.fromkeys((functions[-1], functions[0]))) if functions else ()
