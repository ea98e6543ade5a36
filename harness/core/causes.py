"""The rules: one pure function a cause, from a case to a finding or nothing.

The first one of CAUSES that answers gives the cause. Rules work from mechanisms (who waits for whom, what differs
between ranks, who left first), not from the texts of known programs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from harness.core.case import (
    Case,
    at,
    busiest_rank,
    dump_proof,
    finding,
    hung_roots,
    in_function,
    last_line,
    last_place,
    last_seen,
    layer_of,
    ledger_proof,
    loop_place,
    most_common_user,
    place_of,
    ranks_text,
    shorten,
    step_rate,
    verb,
    wait_place,
    with_module,
)
from harness.core.evidence import Ending, Place
from harness.core.proof import loop_lines
from harness.core.report import Finding, Status
from harness.core.stacks import user_frame
from harness.core.verdict import FailureKind
from harness.core.waitfor import WaitKind

Rule = Callable[[Case], "Finding | None"]


def _not_judged(case: Case) -> Finding | None:
    if case.judgement.status is not Status.ERROR:
        return None
    interrupted = case.evidence.ending in (Ending.INTERRUPTED, Ending.ABANDONED)
    return finding(
        "interrupted" if interrupted else "harness_error",
        case.judgement.error or "the run could not be judged",
        confidence=1.0,
        advice="Run it again with the command below."
        if interrupted
        else "Read test_execution.log; report this as a bug.",
        proof=("interrupted",) if case.evidence.ending is Ending.ABANDONED else (),
    )


def _rank_conditional_collective(case: Case) -> Finding | None:
    """A rank passed a call that the others made, and then some rank failed or waits for ever."""
    skipped = case.skipped
    if skipped is None or case.evidence.ending is Ending.DEADLINE:
        return None
    first = case.first_failure
    if first and first.kind is FailureKind.RAISED and not first.collateral:
        return None  # a rank that raised left out everything after it
    place = skipped.place
    counts = " · ".join(f"rank {rank} x{count}" for rank, count in skipped.counts)
    others = ranks_text([rank for rank, count in skipped.counts if rank != skipped.rank])
    return finding(
        "rank_conditional_collective",
        f"rank {skipped.rank} skipped {skipped.call.op}{at(place)} in step {skipped.step}; {others} called it"
        f" ({counts})",
        ranks=(skipped.rank,),
        place=place,
        confidence=0.95,
        proof=ledger_proof(case, skipped.rank),
        advice="Call the collective on every rank, in the same order: move it out of the condition, or contribute"
        " zeros where there is nothing to add.",
    )


def _stopped_process(case: Case) -> Finding | None:
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


def _backward_function_blocked(case: Case) -> Finding | None:
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


def _lock_cycle(case: Case) -> Finding | None:
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


def _infinite_loop(case: Case) -> Finding | None:
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


def _slow(case: Case) -> Finding | None:
    if case.evidence.ending is not Ending.DEADLINE or case.first_failure is not None:
        return None
    busiest = busiest_rank(case)
    place = with_module(case, busiest, most_common_user(case, busiest)) if busiest is not None else None
    done = max((len(rank.board.steps_s) for rank in case.evidence.ranks if rank.board), default=0)
    deadline_s = case.evidence.limits.deadline_s
    deadline = "its deadline" if deadline_s is None else f"its deadline of {deadline_s:g} s"
    return finding(
        "slow",
        f"not proven to hang: still there at {deadline}, {done} steps done{step_rate(case)};"
        f" the time goes{at(place) or ' to no single line'}",
        ranks=() if busiest is None else (busiest,),
        place=place,
        confidence=0.9 if place else 0.5,
        proof=("watch.jsonl",),
        advice="Look at the named line: a Python loop over tokens or heads builds one autograd node a turn. Raise"
        " limits.deadline_s if the work is meant to take that long.",
    )


def _exception(case: Case) -> Finding | None:
    first = case.first_failure
    if first is None or first.kind is not FailureKind.RAISED or first.collateral or first.raised is None:
        return None
    frame = user_frame(first.raised.frames)
    place = place_of(case, first.rank, frame)
    return finding(
        "exception",
        f"rank {first.rank} raised {shorten(first.text)}{at(place)}",
        ranks=(first.rank,) if first.rank is not None else (),
        place=place,
        confidence=0.95,
        proof=(first.raised.proof,),
        advice="This is the first failure in time; what other ranks say about lost connections follows from it.",
    )


def _early_exit(case: Case) -> Finding | None:
    left = [failure for failure in case.judgement.failures if failure.kind is FailureKind.LEFT]
    first = case.first_failure
    if not left or first is None or first.kind is not FailureKind.LEFT:
        return None
    return finding(
        "early_exit",
        f"{left[0].text}, {last_seen(case, left[0].rank)}",
        ranks=(left[0].rank,) if left[0].rank is not None else (),
        place=last_place(case, left[0].rank),
        confidence=0.95,
        proof=("processes.jsonl",),
        advice="Find the return, sys.exit or exhausted iterator that only this rank reaches.",
    )


def _killed(case: Case) -> Finding | None:
    first = case.first_failure
    if first is None or first.status not in (-signal.SIGKILL, -signal.SIGTERM) or case.skipped is not None:
        return None
    who = "the launcher" if first.rank is None else f"rank {first.rank}"
    name = signal.Signals(-first.status).name
    return finding(
        "killed",
        f"{who} was killed by {name}, sent from outside the harness, {last_seen(case, first.rank)}"
        f"{last_line(case, first.rank)}",
        ranks=() if first.rank is None else (first.rank,),
        place=last_place(case, first.rank),
        confidence=0.95,
        proof=("processes.jsonl",),
        advice="Look for the sender: the kernel's out-of-memory killer (dmesg), a scheduler's limit, a colleague.",
    )


def _crashed(case: Case) -> Finding | None:
    first = case.first_failure
    if first is None or first.kind is not FailureKind.SIGNAL or first.collateral or first.status is None:
        return None
    rank = case.rank(first.rank) if first.rank is not None else None
    frame = next((user_frame(stack.frames) for stack in rank.death_stacks[-1:]), None) if rank else None
    place = place_of(case, first.rank, frame) if frame else last_place(case, first.rank)
    return finding(
        "segfault" if first.status in (-signal.SIGSEGV, -signal.SIGBUS) else "aborted",
        f"{first.text}{at(place)}, {last_seen(case, first.rank)}",
        ranks=(first.rank,) if first.rank is not None else (),
        place=place,
        confidence=0.9,
        proof=(f"rank{first.rank}/stacks.txt",) if frame else ("processes.jsonl",),
        advice="The stack at death names the Python line; a native fault needs `py-spy --native` or a core file.",
    )


def _bad_exit(case: Case) -> Finding | None:
    """A rank that left with an exit code and no exception: sys.exit, argparse, os._exit."""
    first = case.first_failure
    if first is None or first.kind is not FailureKind.CODE or first.collateral or first.rank is None:
        return None
    rank = case.rank(first.rank)
    said = f': "{shorten(rank.error_lines[-1])}"' if rank and rank.error_lines else ""
    return finding(
        "bad_exit",
        f"{first.text}, {last_seen(case, first.rank)}{said}",
        ranks=(first.rank,),
        place=last_place(case, first.rank),
        confidence=0.9,
        proof=(f"rank{first.rank}/stderr.log",),
        advice="The program chose to leave: read the end of the rank's stderr.log.",
    )


def unknown(case: Case) -> Finding:
    seen = [failure.text for failure in case.judgement.failures]
    seen += [f"rank {root.rank} stands in {root.stands_in}" for root in case.roots]
    ranks = sorted(
        {*(f.rank for f in case.judgement.failures[:1] if f.rank is not None), *(r.rank for r in case.roots)}
    )
    return finding(
        "unknown",
        "no rule names the cause; seen: " + ("; ".join(seen) or "nothing"),
        ranks=tuple(ranks),
        place=wait_place(case, case.roots[0]) if case.roots else None,
        confidence=0.3,
        proof=("output.log",),
        advice="Read output.log and dumps/ from the earliest line on.",
    )


def _no_gradient(case: Case) -> Finding | None:
    missing = sorted({name for rank in case.evidence.ranks for name in rank.traces.missing_parameters})
    if not missing:
        return None
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    ranks = tuple(rank.rank for rank in case.evidence.ranks if rank.traces.missing_parameters)
    return finding(
        "no_gradient",
        f"{len(missing)} parameters received no gradient: {shown}",
        ranks=ranks,
        place=Place(parameter=missing[0], module=missing[0].rpartition(".")[0] or None, layer=layer_of(missing[0])),
        confidence=1.0,
        proof=("traces.log",),
        advice="Frozen on purpose, or not reached by the loss; under DDP the second kind needs find_unused_parameters"
        " or a term of zero.",
    )


def _orphan_process(case: Case) -> Finding | None:
    left = case.evidence.leftovers
    if not left:
        return None
    return finding(
        "orphan_process",
        f"{len(left)} processes outlived the run and were ended by the harness: {shorten('; '.join(left))}",
        confidence=1.0,
        proof=("processes.jsonl",),
        advice="Join or end child processes before the program leaves.",
    )


CAUSES: tuple[Rule, ...] = (
    _not_judged,
    _slow,
    _exception,
    _rank_conditional_collective,
    _early_exit,
    _killed,
    _crashed,
    _bad_exit,
    _stopped_process,
    _backward_function_blocked,
    _lock_cycle,
    _infinite_loop,
)
BESIDES: tuple[Rule, ...] = (_no_gradient, _orphan_process)
