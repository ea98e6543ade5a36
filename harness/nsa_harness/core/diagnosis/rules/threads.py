"""Rules about ranks that wait for their own threads or that hang in native code."""

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
from nsa_harness.core.evidence.process_pools import MULTIPROCESSING, awaits_result, awaits_task, is_worker
from nsa_harness.core.evidence.stacks import is_library, is_poller, thread_wait, training_stack, user_frame
from nsa_harness.core.report import Facts, HangKind, Place
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import LOOP_SAMPLES, POLLED, loop_lines
from nsa_harness.core.verdict.wait import Wait, WaitKind

# Functions in which a thread waits for another thread to end or to return a result, by file.
_JOIN_CALLS = (
    ("/threading.py", ("join", "_shutdown", "_wait_for_tstate_lock")),
    ("concurrent/futures/_base.py", ("result", "exception", "wait", "as_completed")),
    ("concurrent/futures/thread.py", ("shutdown", "_python_exit")),
)
_LOCKS = frozenset({WaitKind.LOCK, WaitKind.UNKNOWN})
# Kinds of waits that a thread or child process could end.
_ENDED_BY_PARTNER = frozenset({WaitKind.LOCK, WaitKind.SLEEP, WaitKind.IO, WaitKind.PIPE})


def _wait_for_dead_partner(context: DiagnosisContext) -> tuple[Wait, PrintedMessage] | None:
    """Return the wait of a rank for a dead thread or child process, and its last message, or None if there is none."""
    waiting = (root for root in hung_roots(context) if root.kind in _ENDED_BY_PARTNER and root.child is None)
    # A traceback without the name of a thread or child may be one that the program caught and printed.
    deaths = (
        (root, death) for root in waiting if (rank := context.rank(root.rank)) for death in rank.background_failures
    )
    named = ((root, death) for root, death in deaths if death.name != death.kind)
    return next(((root, death) for root, death in named if not _has_other_partner(context, root, death)), None)


def _has_other_partner(context: DiagnosisContext, root: Wait, death: PrintedMessage) -> bool:
    living = living_partner(context, root)
    functions = {place.function for place in (death.entry_place, death.place) if place}
    return living is not None and death.kind == "thread" and living["function"] not in functions


@rule_if(_wait_for_dead_partner)
def thread_died(context: DiagnosisContext, root: Wait, death: PrintedMessage) -> Explanation:
    """Explain a hang in which a rank waits for a thread or child process that died from an exception."""
    return Explanation(
        cause=Cause.THREAD_DIED,
        evidence=EvidenceKind.PRINTED,
        facts={
            **death_facts(death),
            "function": waiting_function(root),
            "line": wait_place(context, root),
            "living": living_partner(context, root) or _living_thread(context, root),
        },
        ranks=(root.rank,),
        place=death.entry_place
        or death.place,  # the function in which the thread started, which did not catch the exception
        proof=(f"rank{root.rank}/stderr.log", *dump_proof(context, root)),
    )


def death_facts(death: PrintedMessage) -> Facts:
    """Return facts about a thread or child process that died from an exception."""
    return {"died": death.kind, "error": death.error, "raised_at": death.place}


def living_partner(context: DiagnosisContext, root: Wait) -> Facts | None:
    """Return the facts about the thread that should end the rank's wait for a queue, if this thread is alive."""
    stack = _training_stack_of(context, root)
    partner = context.program.missing_partner(stack.frames) if stack else None
    return _living_thread(context, root, partner) if partner else None


def _living_thread(context: DiagnosisContext, root: Wait, partner: Place | None = None) -> Facts | None:
    """Return facts about another living thread of the program, in the function of `partner` if given, or None."""
    snapshot, training = context.last_snapshot.get(root.rank), _training_stack_of(context, root)
    for stack in snapshot.stacks if snapshot else ():
        own = [frame for frame in stack.frames if not is_library(frame.file) and not frame.file.startswith("<")]
        functions = {(frame.file, frame.function.rpartition(".")[2]) for frame in own}
        is_partner = partner is None or (partner.file, partner.function) in functions
        if stack is not training and not is_poller(stack) and own and is_partner:
            call = "" if stack.frames[0] == own[0] else thread_wait(stack.frames).call
            line = place_of(context, None, own[0])
            name = stack.thread or str(stack.tid)
            return {"thread": name, "call": call, "line": line, "function": partner.function if partner else ""}
    return None


def pool_worker_lost(context: DiagnosisContext) -> Explanation | None:
    """Explain a hang in which a rank waits for a `multiprocessing.Pool` whose workers all wait for tasks."""
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


@rule_if(root_where(lambda root: root.kind in POLLED))
def livelock(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation | None:
    """Explain a hang in which a rank repeatedly polls on one line, with a sleep or with a time limit for each wait."""
    proof = context.judgement.proof
    if proof is None or proof.kind is not HangKind.LIVELOCK or (proof.is_closed and root.kind is not WaitKind.SLEEP):
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
    """Return the first hung rank that waits for a thread that could still act, or None if there is none."""
    waiting = (root for root in hung_roots(context) if root.kind in _LOCKS and not root.is_closed)
    return next(((root, *thread) for root in waiting if (thread := awaited_thread(context, root))), None)


@rule_if(_root_waiting_for_thread)
def open_thread_wait(context: DiagnosisContext, root: Wait, stack: Stack, syscall: str) -> Explanation:
    """Explain a hang in which a rank has waited too long for another thread, although that thread can still act."""
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
    """Return the stack and the system call of the thread that the rank waits for, or None if it is unclear.

    The system call is "" if the thread waits for a lock or runs. If several threads may be meant, one that waits for a
    lock that it holds itself comes first. If all wait for the same lock, the first is returned.
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
    """Return the program line of the thread that the rank waits for, or None if it is unknown."""
    thread = awaited_thread(context, root)
    return place_of(context, None, user_frame(thread[0].frames)) if thread else None


def _has_frame_in(frames: Sequence[Frame], file: str, names: Sequence[str]) -> bool:
    return any(frame.file.endswith(file) and frame.function.rpartition(".")[2] in names for frame in frames)


def _waits_for_idle_pool(snapshot: RankSnapshot) -> bool:
    """Return whether the rank waits for a `multiprocessing.Pool` whose workers all wait for tasks."""
    stack = rank_stack(snapshot)
    if stack is None or awaits_result(stack.frames) is not MULTIPROCESSING:
        return False
    children = (training_stack(stacks, pid) for pid, stacks in snapshot.child_stacks.items())
    workers = [worker for worker in children if worker and is_worker(MULTIPROCESSING, worker.frames)]
    return bool(workers) and all(awaits_task(worker.frames) for worker in workers)


_MISSING_HEARTBEAT_S = 2.0  # after this many seconds a heartbeat counts as missing; it is written four times a second
# Native frames that lie between a Python frame and the C function that it calls.
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
    """Return the first hung rank that holds the GIL without releasing it, or None if there is none.

    A loop in Python releases the GIL whenever another thread requests it, so its heartbeat continues. A single function
    of the interpreter, such as a regular-expression search, does not release it.
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
    """Explain a hang in which a rank holds the GIL in native code, which prevents other Python threads from running."""
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
    """Return whether all recent samples show the same line while no heartbeat was written."""
    sampled_s = [sample.at_s for sample in context.evidence.samples if sample.rank == root.rank][-LOOP_SAMPLES:]
    lines = loop_lines(root, context.evidence.samples)
    sampled_for_s = context.evidence.snapshots[-1].at_s - sampled_s[0] if sampled_s else 0.0
    return (
        len(lines) == 1
        and bool(sampled_s)
        and _heartbeat_age_s(context, root) >= max(_MISSING_HEARTBEAT_S, sampled_for_s)
    )


def _root_in_native_loop(context: DiagnosisContext) -> tuple[Wait, Stack] | None:
    """Return the first hung rank that computes in native code without returning to Python, or None if there is none."""
    looping = (
        (root, _training_stack_of(context, root)) for root in hung_roots(context) if root.kind is WaitKind.COMPUTE
    )
    return next(((root, stack) for root, stack in looping if stack and _stays_native(context, root, stack)), None)


@rule_if(_root_in_native_loop)
def native_busy_loop(context: DiagnosisContext, root: Wait, stack: Stack) -> Explanation:
    """Explain a hang in which a rank computes in native code indefinitely."""
    return Explanation(
        cause=Cause.NATIVE_BUSY_LOOP,
        # If the native code holds the GIL, holding it may be the only fault, so the cause is less certain.
        evidence=EvidenceKind.STACKS if stack.gil else EvidenceKind.SAMPLES,
        facts={"native": _native_functions(stack), "function": waiting_function(root)},
        ranks=(root.rank,),
        place=loop_place(context, root),
        proof=dump_proof(context, root),
    )


def _training_stack_of(context: DiagnosisContext, root: Wait) -> Stack | None:
    return rank_stack(context.last_snapshot[root.rank]) if root.rank in context.last_snapshot else None


def _stays_native(context: DiagnosisContext, root: Wait, stack: Stack) -> bool:
    """Return whether the rank stays in native code and never returns to Python."""
    is_one_line = len(loop_lines(root, context.evidence.samples)) == 1
    return (
        is_one_line
        and _in_library(stack)
        and (not stack.gil or _heartbeat_age_s(context, root) >= _MISSING_HEARTBEAT_S)
    )


def _keeps_gil(context: DiagnosisContext, root: Wait, stack: Stack) -> bool:
    """Return whether the rank keeps the GIL in native code, as its native frames or a missing heartbeat show."""
    return stack.gil and (bool(stack.native) or _heartbeat_age_s(context, root) >= _MISSING_HEARTBEAT_S)


def _heartbeat_age_s(context: DiagnosisContext, root: Wait) -> float:
    """Return the age of the rank's last heartbeat in seconds, or 0 if there is none."""
    status_file = context.last_snapshot[root.rank].status_file if root.rank in context.last_snapshot else None
    return (
        context.evidence.snapshots[-1].at_s - status_file.beat_s
        if status_file and status_file.beat_s is not None
        else 0.0
    )


def _in_library(stack: Stack) -> bool:
    """Return whether the thread's native code belongs to a library rather than to the Python interpreter."""
    return bool(stack.native) and not any(word in stack.native[0] for word in ("libpython", "_PyEval"))


def _native_functions(stack: Stack) -> tuple[str, ...]:
    """Return the outermost and the innermost native function on a thread's stack."""
    functions = [name for name in stack.native if not any(word in name for word in _BRIDGE_FRAMES)] or [*stack.native]
    return tuple(dict.fromkeys((functions[-1], functions[0]))) if functions else ()
