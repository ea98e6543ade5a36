"""Rules about threads that wait for another thread of their process, and about native code that keeps the GIL."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    function_of,
    hung_roots,
    loop_place,
    place_of,
    standing,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, given
from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.health_samples import LastMessages
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
_JOINS = (
    ("/threading.py", ("join", "_shutdown", "_wait_for_tstate_lock")),
    ("concurrent/futures/_base.py", ("result", "exception", "wait", "as_completed")),
    ("concurrent/futures/thread.py", ("shutdown", "_python_exit")),
)
_LOCKS = frozenset({WaitKind.LOCK, WaitKind.UNKNOWN})
# Waits that a thread or child could end.
_BEREFT = frozenset({WaitKind.LOCK, WaitKind.SLEEP, WaitKind.IO, WaitKind.PIPE})


def _bereft(context: DiagnosisContext) -> tuple[Wait, LastMessages] | None:
    """Find a root that waits as for a thread or child, with what the first thread or child that died printed."""
    alone = (root for root in hung_roots(context) if root.kind in _BEREFT and root.child is None)
    # A traceback without a name may be one that was caught and printed.
    deaths = ((root, one) for root in alone if (rank := context.rank(root.rank)) for one in rank.deaths)
    return next(((root, one) for root, one in deaths if one.name != one.kind), None)


@given(_bereft)
def thread_died(context: DiagnosisContext, root: Wait, dead: LastMessages) -> Explanation:
    """An exception ended a thread or child, and the rank waits for something that it would have done."""
    return Explanation(
        cause=Cause.THREAD_DIED,
        evidence=EvidenceKind.PRINTED,
        facts={**death_facts(dead), "function": function_of(root), "line": wait_place(context, root)},
        ranks=(root.rank,),
        place=dead.entered or dead.place,  # others may raise the same: it is there that no thread hears of it
        proof=(f"rank{root.rank}/stderr.log", *dump_proof(context, root)),
    )


def death_facts(dead: LastMessages) -> Facts:
    """Return what a sentence may say of a thread or child that an exception ended."""
    return {"died": dead.kind, "error": dead.error, "raised_at": dead.place}


def pool_worker_lost(context: DiagnosisContext) -> Explanation | None:
    """A rank waits for a task of its multiprocessing.Pool, and every worker of the pool waits for a task."""
    looked = ((root, context.looked.get(root.rank)) for root in hung_roots(context))
    root = next((root for root, seen in looked if seen and _awaits_pool(seen)), None)
    if root is None:
        return None
    return Explanation(
        cause=Cause.POOL_WORKER_LOST,
        evidence=EvidenceKind.CLOSED,
        facts={"function": function_of(root)},
        ranks=(root.rank,),
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


@given(standing(lambda root: root.kind is WaitKind.SLEEP))
def livelock(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation | None:
    """A rank sleeps, polls and sleeps again on the same line, and makes no progress."""
    if context.judgement.proof is None or context.judgement.proof.kind is not HangKind.LIVELOCK:
        return None
    return Explanation(
        cause=Cause.LIVELOCK,
        evidence=EvidenceKind.SAMPLES,
        facts={"function": function_of(root)},
        ranks=ranks,
        place=loop_place(context, root),
        proof=(*dump_proof(context, root), "watch.jsonl"),
    )


def _openly_behind(context: DiagnosisContext) -> tuple[Wait, Stack, str] | None:
    waiting = (root for root in hung_roots(context) if root.kind in _LOCKS and not root.closed)
    return next(((root, *behind) for root in waiting if (behind := thread_behind(context, root))), None)


@given(_openly_behind)
def open_thread_wait(context: DiagnosisContext, root: Wait, stack: Stack, syscall: str) -> Explanation:
    """A rank waits for another thread, which may still act, but has not for longer than an open wait may last."""
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


def thread_behind(context: DiagnosisContext, root: Wait) -> tuple[Stack, str] | None:
    """Return the thread with a line of the program that the rank waits for, and its system call for bytes.

    None if it waits for no thread, or for several, unless one of them waits for a lock that it has taken itself, or all
    for the same lock.
    """
    seen, stack = context.looked.get(root.rank), _stack(context, root)
    if seen is None or stack is None or not any(_within(stack.frames, *one) for one in _JOINS):
        return None
    others = [one for one in seen.stacks if one is not stack and not is_poller(one) and user_frame(one.frames)]
    others = [one for one in others if _takes_again(context, one)] or others
    lines = {user_frame(one.frames) for one in others}
    locks = {context.program.locks_taken_at(line) for line in lines if line}
    if not lines or (len(lines) > 1 and (len(locks) != 1 or frozenset() in locks)):
        return None
    tasks = seen.process.tasks if seen.process else ()
    syscall = next((task.syscall for task in tasks if task.tid == others[0].tid), "")
    return others[0], "" if syscall in ("futex", "running") else syscall


def _takes_again(context: DiagnosisContext, stack: Stack) -> bool:
    wanted = user_frame(stack.frames)
    return wanted is not None and context.program.lock_taken_by(wanted, stack.frames) is not None


def line_behind(context: DiagnosisContext, root: Wait) -> Place | None:
    """Return the line of the thread that the rank waits for; None if it waits for none, or for several."""
    behind = thread_behind(context, root)
    return place_of(context, None, user_frame(behind[0].frames)) if behind else None


def _within(frames: Sequence[Frame], file: str, names: Sequence[str]) -> bool:
    """Return whether a frame is one of these functions; py-spy names a method with its class, faulthandler without."""
    return any(one.file.endswith(file) and one.function.rpartition(".")[2] in names for one in frames)


def _awaits_pool(seen: RankSnapshot) -> bool:
    """Return whether the rank waits for a result of its pool, and each worker of the pool for a task.

    A concurrent.futures.ProcessPoolExecutor notices that a worker is gone, and raises.
    """
    stack = rank_stack(seen)
    if stack is None or awaits_result(stack.frames) is not MULTIPROCESSING:
        return False
    stood = (training_stack(stacks, pid) for pid, stacks in seen.child_stacks.items())
    workers = [one for one in stood if one and is_worker(MULTIPROCESSING, one.frames)]
    return bool(workers) and all(awaits_task(one.frames) for one in workers)


_SILENT_S = 2.0  # the heartbeat thread writes four times a second whenever it gets the GIL
# Frames between a Python line and the C function that it calls.
_BRIDGES = ("ffi_", "libffi", "_ctypes", "_call_function_pointer", "?", "cpython-", "libpython", "_PyEval", "PyObject_")


def _keeping(context: DiagnosisContext) -> tuple[Wait, Stack] | None:
    """Find the first root that waits and keeps the GIL, else the first that computes and never releases it.

    A loop in Python releases the GIL when another thread asks for it, so its heartbeat continues. A function of the
    interpreter itself, such as a search with a regular expression, does not.
    """
    held = [
        (root, stack)
        for root in hung_roots(context)
        if (stack := _stack(context, root)) and _keeps(context, root, stack)
    ]
    waiting = [(root, stack) for root, stack in held if root.kind is not WaitKind.COMPUTE]
    silent = ((root, stack) for root, stack in held if not _in_library(stack) and _silent_in_all_samples(context, root))
    return waiting[0] if waiting else next(silent, None)


@given(_keeping)
def gil_held_native(context: DiagnosisContext, root: Wait, stack: Stack) -> Explanation:
    """A rank is in native code and keeps the interpreter's lock."""
    computes = root.kind is WaitKind.COMPUTE
    return Explanation(
        cause=Cause.GIL_HELD_NATIVE,
        evidence=EvidenceKind.SAMPLES if computes else EvidenceKind.HOLDER if stack.native else EvidenceKind.STACKS,
        facts={"computes": computes, "native": _native(stack), "function": function_of(root)},
        ranks=(root.rank,),
        place=loop_place(context, root) if computes else wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _silent_in_all_samples(context: DiagnosisContext, root: Wait) -> bool:
    seen = [one.at_s for one in context.evidence.samples if one.rank == root.rank][-LOOP_SAMPLES:]
    lines = loop_lines(root, context.evidence.samples)
    looked_s = context.evidence.snapshots[-1].at_s
    return len(lines) == 1 and bool(seen) and _silent_s(context, root) >= max(_SILENT_S, looked_s - seen[0])


def _in_native_loop(context: DiagnosisContext) -> tuple[Wait, Stack] | None:
    looping = ((root, _stack(context, root)) for root in hung_roots(context) if root.kind is WaitKind.COMPUTE)
    return next(((root, stack) for root, stack in looping if stack and _stays_native(context, root, stack)), None)


@given(_in_native_loop)
def native_busy_loop(context: DiagnosisContext, root: Wait, stack: Stack) -> Explanation:
    return Explanation(
        cause=Cause.NATIVE_BUSY_LOOP,
        # A lock that is kept is a fault of its own.
        evidence=EvidenceKind.STACKS if stack.gil else EvidenceKind.SAMPLES,
        facts={"native": _native(stack), "function": function_of(root)},
        ranks=(root.rank,),
        place=loop_place(context, root),
        proof=dump_proof(context, root),
    )


def _stack(context: DiagnosisContext, root: Wait) -> Stack | None:
    """Return the stack of the rank's training thread in the last snapshot."""
    return rank_stack(context.looked[root.rank]) if root.rank in context.looked else None


def _stays_native(context: DiagnosisContext, root: Wait, stack: Stack) -> bool:
    """Return whether it never returns to Python: one line in all samples, and the GIL released, or kept in silence.

    A Python loop that calls small C functions shows some of them too, but it holds the GIL and releases it again.
    """
    one_line = len(loop_lines(root, context.evidence.samples)) == 1
    return one_line and _in_library(stack) and (not stack.gil or _silent_s(context, root) >= _SILENT_S)


def _keeps(context: DiagnosisContext, root: Wait, stack: Stack) -> bool:
    """Return whether it keeps the GIL; without native frames only a missing heartbeat shows that."""
    return stack.gil and (bool(stack.native) or _silent_s(context, root) >= _SILENT_S)


def _silent_s(context: DiagnosisContext, root: Wait) -> float:
    """Return the time from its last heartbeat to the last snapshot; 0 if it has no heartbeat."""
    board = context.looked[root.rank].board if root.rank in context.looked else None
    return context.evidence.snapshots[-1].at_s - board.beat_s if board and board.beat_s is not None else 0.0


def _in_library(stack: Stack) -> bool:
    """Return whether the thread runs in a function of a library, not of the interpreter."""
    return bool(stack.native) and not any(word in stack.native[0] for word in ("libpython", "_PyEval"))


def _native(stack: Stack) -> tuple[str, ...]:
    """Return the native function nearest to Python that is no bridge, and the innermost one if that is another."""
    named = [name for name in stack.native if not any(word in name for word in _BRIDGES)] or [*stack.native]
    return tuple(dict.fromkeys((named[-1], named[0]))) if named else ()
