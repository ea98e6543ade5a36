"""Why a run hangs: rules over the roots of the wait-for graph."""

from __future__ import annotations

from harness.core.judged.case import (
    Case,
    at,
    dump_proof,
    finding,
    hung_roots,
    in_function,
    loop_place,
    ranks_text,
    verb,
    wait_place,
)
from harness.core.judged.proof import loop_lines
from harness.core.judged.waitfor import WaitKind
from harness.core.report import Finding, Status


def stopped_process(case: Case) -> Finding | None:
    stopped = [root for root in case.roots if root.kind is WaitKind.STOPPED]
    if not stopped or case.judgement.status is not Status.HANG:
        return None
    ranks = tuple(root.rank for root in stopped)
    return finding(
        "stopped_process",
        f"{ranks_text(ranks)} {verb(ranks)} stopped by a signal (state T): a debugger, Ctrl-Z or a foreign SIGSTOP",
        ranks=ranks,
        place=wait_place(case, stopped[0]),
        confidence=1.0,
        proof=dump_proof(case, stopped[0]),
        advice="Find who sent the signal (a scheduler that suspends, a debugger, a shell); `kill -CONT PID` resumes.",
    )


def backward_function_blocked(case: Case) -> Finding | None:
    blocked = [root for root in hung_roots(case) if root.kind is WaitKind.LOCK and root.in_backward]
    if not blocked:
        return None
    root = blocked[0]
    place = wait_place(case, root)
    return finding(
        "backward_function_blocked",
        f"rank {root.rank} waits for a lock inside the backward pass{in_function(root)}{at(place)};"
        " no thread of the process is left that could release it",
        ranks=(root.rank,),
        place=place,
        confidence=0.95,
        proof=dump_proof(case, root),
        advice="Code that runs during backward (autograd functions, hooks) must not wait for what another rank or this"
        " same thread holds. Release the lock before backward, or use a timeout and fail.",
    )


def lock_cycle(case: Case) -> Finding | None:
    locked = [root for root in hung_roots(case) if root.kind is WaitKind.LOCK]
    if not locked:
        return None
    root = locked[0]
    place = wait_place(case, root)
    return finding(
        "lock_cycle",
        f"rank {root.rank} waits for a lock{in_function(root)}{at(place)}; no thread of the process is left that"
        " could release it",
        ranks=(root.rank,),
        place=place,
        confidence=0.9,
        proof=dump_proof(case, root),
        advice="Look for a lock taken twice by one thread, or for two locks taken in opposite order.",
    )


def starved(case: Case) -> Finding | None:
    sleeping = [root for root in hung_roots(case) if root.kind is WaitKind.SLEEP]
    if not sleeping:
        return None
    root = sleeping[0]
    place = wait_place(case, root)
    deadline_s = case.evidence.limits.deadline_s
    until = "" if root.until_s is None else f" until {root.until_s:.0f} s after the launch"
    over = "" if root.until_s is None or deadline_s is None else f", past the deadline of {deadline_s:g} s"
    return finding(
        "starved",
        f"rank {root.rank} sleeps{at(place)}{until}{over}, and the others wait for it",
        ranks=(root.rank,),
        place=place,
        confidence=0.95,
        proof=dump_proof(case, root),
        advice="Find what the sleep waits for (a file, a lock, another job), and give it a limit.",
    )


def blocked_io(case: Case) -> Finding | None:
    blocked = [root for root in hung_roots(case) if root.kind is WaitKind.IO]
    if not blocked:
        return None
    root = blocked[0]
    place = wait_place(case, root)
    quiet_s = case.evidence.ended_s - (case.evidence.last_progress_s or 0.0)
    return finding(
        "blocked_io",
        f"rank {root.rank} stands in {root.stands_in}{at(place)} for {quiet_s:.0f} s, and no byte came or went",
        ranks=(root.rank,),
        place=place,
        confidence=0.85,
        proof=dump_proof(case, root),
        advice="Look at the other end: a pipe nobody writes to, a socket, a file system that does not answer. A limit"
        " on the read turns the wait into an error.",
    )


def infinite_loop(case: Case) -> Finding | None:
    looping = [root for root in hung_roots(case) if root.kind is WaitKind.COMPUTE]
    if not looping:
        return None
    root = looping[0]
    lines = sorted({line for _, line in loop_lines(root.rank, case.evidence.samples)})
    place = loop_place(case, root)
    return finding(
        "infinite_loop",
        f"rank {root.rank} computes without end{in_function(root)}{at(place)}: only line"
        f"{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))} in every sample, no mark, no step",
        ranks=(root.rank,),
        place=place,
        confidence=0.9,
        proof=dump_proof(case, root),
        advice="Give the loop an end that every rank reaches, and check the condition that should have ended it.",
    )
