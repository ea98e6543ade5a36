"""Rules about runs that failed, and fallback rules for all other runs."""

from __future__ import annotations

import re
import signal

from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.call_paths import branch_that_skipped_call
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    call_facts,
    dump_proof,
    exception_place,
    failed_ranks,
    first_failure_of,
    first_own_exception,
    is_same_exception,
    last_call_before_exit,
    last_heartbeat_facts,
    last_known_place,
    last_progress_facts,
    place_of,
    program_frames,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion, rule_if
from nsa_harness.core.diagnosis.rules.threads import death_facts
from nsa_harness.core.evidence.evidence import Ending, Evidence, RaisedException
from nsa_harness.core.evidence.exit_messages import TIMEOUT_MESSAGE, is_from_outside, timeout_message, timeout_s
from nsa_harness.core.evidence.health_samples import PrintedMessage
from nsa_harness.core.evidence.stacks import is_library, user_frame
from nsa_harness.core.report import CollectiveRef, Facts, Place, Status
from nsa_harness.core.verdict.motion import Motion
from nsa_harness.core.verdict.verdict import Failure, FailureKind, lacks_node, ranks_with_progress
from nsa_harness.core.verdict.wait import Wait
from nsa_harness.core.verdict.wait_graph import RANK_WAITS


def _timeout_failure(context: DiagnosisContext) -> tuple[Failure, re.Match[str]] | None:
    """Return the first failure and its message about timing out while waiting for others, or None if it has none."""
    first = context.first_failure
    message = TIMEOUT_MESSAGE.search(first.text) if first else None
    return (first, message) if first and message else None


@rule_if(_timeout_failure)
def came_too_late(context: DiagnosisContext, first: Failure, _: re.Match[str]) -> Explanation | None:
    """Explain a failure in which ranks timed out in a collective that another rank had not yet reached."""
    absent = (difference for difference in context.differences if difference.absent)
    late = next(
        (difference for difference in absent if all(_was_on_its_way(context, rank) for rank in difference.ranks)), None
    )
    if late is None or late.expected is None:
        return None
    rank, call = late.ranks[0], late.expected
    status_file = context.status_files[rank]
    made_progress = status_file.latest_training_event is not None and status_file.latest_training_event.at_s > call.at_s
    computed = any(
        sample.rank == rank and sample.at_s > call.at_s and sample.motion == Motion.BURNING
        for sample in context.evidence.samples
    )
    return Explanation(
        cause=Cause.SLOW,
        evidence=EvidenceKind.OPEN if made_progress else EvidenceKind.ABSENCE,
        facts={
            "variant": "came too late",
            "op": call.op,
            "line": call.place,
            "waiting": tuple(waiting for waiting, _ in late.entered_events),
            "message": first.text,
            "timeout_s": timeout_s(first.text),
            "was_busy": made_progress or computed,
        },
        ranks=late.ranks,
        place=last_known_place(context, rank),
        proof=(f"rank{rank}/calls.txt", "output.log"),
        step=call.step,
        collective=CollectiveRef(group=call.group, seq=call.seq, op=call.op),
    )


def _was_on_its_way(context: DiagnosisContext, rank: int) -> bool:
    """Return whether the rank was outside all collectives when it was terminated, and so could still have arrived."""
    evidence = context.rank(rank)
    if evidence is None or evidence.status_file is None or evidence.exception is not None or evidence.exit is None:
        return False
    in_call = any(call.left_s is None for call in evidence.status_file.calls)
    was_ended = evidence.exit.during_teardown or evidence.exit.status in (-signal.SIGTERM, -signal.SIGKILL)
    return was_ended and not in_call and evidence.status_file.enqueued == evidence.status_file.completed


@rule_if(_timeout_failure)
def never_arrived(context: DiagnosisContext, first: Failure, message: re.Match[str]) -> Explanation | None:
    """Explain a failure in which ranks timed out although no recorded call shows which rank was late."""
    failing_ranks = [failure.rank for failure in context.judgement.failures if failure.status not in _KILL_SIGNALS]
    named_ranks = [int(rank) for rank in (message["absent"] or "").split(", ") if rank]
    late = tuple(named_ranks or [rank.rank for rank in context.evidence.ranks if rank.rank not in failing_ranks])
    if not late or not first.is_collateral:
        return None
    return Explanation(
        cause=Cause.SLOW,
        evidence=EvidenceKind.ABSENCE,
        facts={
            "variant": "never arrived",
            "waiting_rank": first.rank,
            "message": first.text,
            "timeout_s": timeout_s(first.text),
        },
        ranks=late,
        place=last_known_place(context, late[0]),
        proof=("output.log",),
    )


def _waiting_and_absent(context: DiagnosisContext) -> tuple[list[Wait], list[int]] | None:
    """Return the waits for other ranks and the missing ranks in a hang found post mortem, or None if there are none."""
    if context.evidence.ending is not Ending.POST_MORTEM or context.judgement.status is not Status.HANG:
        return None
    waiting = [wait for wait in context.waits.values() if wait.kind in RANK_WAITS]
    inside = {wait.rank for wait in waiting}
    members = {peer for wait in waiting for peer in wait.peers if wait.collective}
    everyone = _ranks_reported_missing(context) or members or {rank.rank for rank in context.evidence.ranks}
    absent = sorted(everyone - inside)
    return (waiting, absent) if waiting and absent else None


@rule_if(_waiting_and_absent)
def rank_absent(context: DiagnosisContext, waiting: list[Wait], absent: list[int]) -> Explanation:
    """Explain a hang in which ranks waited for ranks that were not in the same call.

    Only for jobs that nsa-harness did not watch. A stack dump or the last recorded call shows where the absent ranks
    were.
    """
    last = waiting[0]
    messages = (message for wait in waiting if (rank := context.rank(wait.rank)) and (message := timeout_message(rank)))
    elsewhere = next((wait for rank in absent if (wait := context.waits.get(rank)) and wait.leaf), None)
    call = None if elsewhere else _last_event(context, absent[0])
    may_have_waited = not (elsewhere or call) and _ranks_reported_missing(context).isdisjoint(absent)
    place = wait_place(context, elsewhere) if elsewhere else None
    return Explanation(
        cause=Cause.RANK_ABSENT,
        evidence=EvidenceKind.STACKS if elsewhere else EvidenceKind.ABSENCE,
        facts={
            "waiting": tuple(wait.rank for wait in waiting),
            "blocked_in": last.blocked_in,
            "line": wait_place(context, last),
            "gave_up": next((message[0] for message in messages), ""),
            "may_have_waited_too": may_have_waited,
            "elsewhere": {"rank": elsewhere.rank, "blocked_in": elsewhere.blocked_in} if elsewhere else None,
            "last_call": call_facts(context, absent[0], call) if call else None,
        },
        ranks=tuple(absent),
        place=call.place if call else place,
        proof=dump_proof(context, elsewhere or last),
        left_open=(OpenQuestion(code="call_did_not_end"),) if may_have_waited else (),
    )


def _ranks_reported_missing(context: DiagnosisContext) -> set[int]:
    """Return the ranks that are named as missing in other ranks' timeout messages."""
    messages = (message for rank in context.evidence.ranks if (message := timeout_message(rank)) and message["absent"])
    return {int(rank) for message in messages for rank in message["absent"].split(", ")}


def _last_event(context: DiagnosisContext, rank: int) -> Event | None:
    timeline = context.timelines.get(rank)
    return timeline.events[-1] if timeline and timeline.events else None


def _all_waits_in_one_call(context: DiagnosisContext) -> tuple[list[Wait]] | None:
    """Return the waits of all ranks in a hang found post mortem, or None if not every rank waits in the same call."""
    waits = list(context.waits.values())
    if context.evidence.ending is not Ending.POST_MORTEM or context.judgement.status is not Status.HANG:
        return None
    all_wait = len(waits) == context.evidence.world_size > 1 and all(wait.kind in RANK_WAITS for wait in waits)
    return (waits,) if all_wait and len({(wait.blocked_in, wait.user_frame) for wait in waits}) == 1 else None


@rule_if(_all_waits_in_one_call)
def not_delivered(context: DiagnosisContext, waits: list[Wait]) -> Explanation:
    """Explain a hang of a job that was not watched, in which all ranks wait in the same collective."""
    return Explanation(
        cause=Cause.TRANSPORT,
        evidence=EvidenceKind.ABSENCE,
        facts={"variant": "not delivered", "waiting_ranks": len(waits), "blocked_in": waits[0].blocked_in},
        place=wait_place(context, waits[0]),
        proof=dump_proof(context, waits[0]),
        left_open=(OpenQuestion(code="one_came_too_late"),),
    )


@rule_if(first_own_exception)
def exception(context: DiagnosisContext, first: Failure, error: RaisedException) -> Explanation:
    """Explain a failure caused by an exception that a rank raised on its own."""
    line = exception_place(context, first.rank, error)
    death = _death_before_exception(context, first, error)
    package = _package_with_missing_name(error) or ""
    return Explanation(
        cause=Cause.EXCEPTION,
        evidence=EvidenceKind.PRINTED if death else EvidenceKind.RAISED,
        facts={
            "before": {"rank": first.rank, **death_facts(death)} if death else None,
            "error": first.text,
            "line": line,
            "beneath": _library_line(error, line),
            "came_out": _final_error_facts(context, first, error),
            "package": package,
            "package_is_ours": package in _HARNESS_PACKAGES,
        },
        ranks=failed_ranks([failure for failure in context.judgement.failures if is_same_exception(failure, first)]),
        place=death.place if death else line,
        proof=(error.proof,),
    )


# Exceptions that follow from the death of a child process or thread with which the process communicates.
_LOST_PARTNER = re.compile(r"(?:EOF|BrokenPipe|ConnectionReset|CalledProcess|ChildProcess)Error$|BrokenProcessPool$")
# Exceptions that follow from a wait (for example, for a child process or thread) that took too long.
_WAIT_TIMEOUT = re.compile(r"(?:Timeout|BrokenBarrier)Error$|Empty$")


def _death_before_exception(context: DiagnosisContext, first: Failure, error: RaisedException) -> PrintedMessage | None:
    """Return the last message from a dead thread or child process that explains the exception, or None."""
    rank = context.rank(first.rank)
    lost_partner, timeout = _LOST_PARTNER.search(error.type), _WAIT_TIMEOUT.search(error.type)
    for death in rank.background_failures if rank else ():
        if lost_partner or (timeout and death.name != death.kind):
            return death
    return None


def _library_line(error: RaisedException, place: Place | None) -> Place | None:
    """Return the innermost line of the exception's traceback if it is in a library, otherwise None."""
    innermost = error.frames[0] if error.frames else None
    if innermost is None or place is None or (innermost.file, innermost.line) == (place.file, place.line):
        return None
    return Place(file=innermost.file, line=innermost.line, function=innermost.function)


def _final_error_facts(context: DiagnosisContext, first: Failure, original: RaisedException) -> Facts | None:
    """Return facts about the exception that ended the rank, or None if it is `original` itself."""
    rank = context.rank(first.rank)
    if rank is None or rank.exception is None or rank.exception.frames == original.frames:
        return None
    text = f"{rank.exception.type}: {rank.exception.message}".partition("\n")[0]
    return {"line": exception_place(context, None, rank.exception), "error": text}


_HARNESS_PACKAGES = ("nsa_harness", "nsa_attention")
_CHECKOUT_DIRECTORIES = (
    "nsa",
    "harness",
)  # directories of the repository; another program may have packages with these names
# Matches the name of a package in which an import found no such name or module.
_IMPORTED_PACKAGE = re.compile(r"(?:from '(?=[\w.]+')|No module named '(?=\w+\.))(\w+)")


def _package_with_missing_name(error: RaisedException) -> str | None:
    """Return the nsa-harness package from which the program failed to import a name, or None."""
    program_frames = [
        frame for frame in error.frames if not (is_library(frame.file) or _harness_package_in(frame.file))
    ]
    if error.type not in ("ImportError", "ModuleNotFoundError") or not program_frames:
        return None
    if harness_package := next(
        filter(None, map(_harness_package_in, (error.message, *(frame.file for frame in error.frames)))), None
    ):
        return harness_package
    package = _IMPORTED_PACKAGE.search(error.message)
    return package[1] if package and package[1] in (*_HARNESS_PACKAGES, *_CHECKOUT_DIRECTORIES) else None


def _harness_package_in(text: str) -> str | None:
    return next((package for package in _HARNESS_PACKAGES if f"/{package}/" in text), None)


@rule_if(first_failure_of(FailureKind.LEFT))
def early_exit(context: DiagnosisContext, first: Failure) -> Explanation:
    """Explain a failure in which a rank exited with code 0 while other ranks still needed it."""
    is_attached = context.evidence.is_attached  # an attached job has no records of what the rank did before
    evidence = EvidenceKind.EFFECT if is_attached else EvidenceKind.KERNEL
    place = (
        _skipped_branch(context, first.rank)
        if is_attached
        else last_call_before_exit(context, first.rank) or last_known_place(context, first.rank)
    )
    return Explanation(
        cause=Cause.EARLY_EXIT,
        evidence=EvidenceKind.ABSENCE if first.status is None else evidence,
        facts={
            "failure": first.text,
            "last_seen": None if is_attached else last_progress_facts(context, first.rank),
            "blocked": blocked_ranks(context),
        },
        ranks=failed_ranks([first]),
        place=place,
        proof=exit_record(context),
    )


def _skipped_branch(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return the branch that made a rank of an attached job skip the awaited call, or else the line of this call."""
    waiting = _waits_for_ranks(context)
    if rank is None or not waiting:
        return None
    return branch_that_skipped_call(context, rank, program_frames(context, waiting[0].rank)) or wait_place(
        context, waiting[0]
    )


def _waits_for_ranks(context: DiagnosisContext) -> list[Wait]:
    return [wait for _, wait in sorted(context.waits.items()) if wait.peers]


def blocked_ranks(context: DiagnosisContext) -> Facts | None:
    """Return facts about the waiting ranks of a job that nsa-harness attached to, or None if none is waiting."""
    waiting = _waits_for_ranks(context) if context.evidence.is_attached else []
    if not waiting:
        return None
    calls = {wait.blocked_in for wait in waiting}
    return {
        "ranks": tuple(wait.rank for wait in waiting),
        "blocked_in": waiting[0].blocked_in if len(calls) == 1 else "",
        "line": wait_place(context, waiting[0]),
    }


def exit_record(context: DiagnosisContext) -> tuple[str, ...]:
    """Return a tuple with the path of the journal that records the exits of processes."""
    return ("watch.jsonl",) if context.evidence.is_attached else ("processes.jsonl",)


def killed(context: DiagnosisContext) -> Explanation | None:
    """Explain a failure in which SIGKILL or SIGTERM ended a rank or the launcher."""
    first = context.first_failure
    kill_signals = _KILL_SIGNALS if first is None or first.rank is not None else _KILL_SIGNALS | _LAUNCHER_SIGNALS
    if first is None or first.status not in kill_signals:
        return None
    name = kill_signals[first.status].name
    signals = [
        sending for sending in context.evidence.signals if sending.signal == name and sending.sender != "harness"
    ]
    job_signal = next((sending for sending in signals if not sending.pid), None)
    sender = job_signal or next((sending for sending in signals if sending.rank == first.rank), None)
    return Explanation(
        cause=Cause.KILLED,
        evidence=EvidenceKind.KERNEL,
        facts={
            "killed_rank": first.rank,
            "signal": name,
            "sender": sender.sender if sender else "",
            "sent_to_whole_job": job_signal is not None,
            "cancelled": job_signal is not None and is_from_outside(job_signal.sender),
            "watched": context.evidence.ending is not Ending.POST_MORTEM,
            "last_seen": last_progress_facts(context, first.rank),
            "last_line": last_heartbeat_facts(context, first.rank),
            "blocked": blocked_ranks(context),
        },
        ranks=() if first.rank is None or sender else (first.rank,),
        place=None if sender else last_known_place(context, first.rank),
        proof=("output.log",) if sender else exit_record(context),
    )


_KILL_SIGNALS = {
    -signal.SIGKILL: signal.SIGKILL,
    -signal.SIGTERM: signal.SIGTERM,
    128 + signal.SIGTERM: signal.SIGTERM,  # exit code of a shell, or of a signal handler in the program
}
# Signals that end a launcher if its terminal is closed or Ctrl-C is pressed.
_LAUNCHER_SIGNALS = {-number: number for number in (signal.SIGHUP, signal.SIGINT)}


@rule_if(first_failure_of(FailureKind.SIGNAL))
def crashed(context: DiagnosisContext, first: Failure) -> Explanation:
    """Explain a failure in which a fatal signal such as SIGSEGV or SIGABRT ended a rank."""
    rank = context.rank(first.rank)
    frame = user_frame(rank.death_stacks[-1].frames) if rank and rank.death_stacks else None
    return Explanation(
        cause=Cause.SEGFAULT if first.status in (-signal.SIGSEGV, -signal.SIGBUS) else Cause.ABORTED,
        evidence=EvidenceKind.ENDED,
        facts={
            "failure": first.text,
            "last_seen": last_progress_facts(context, first.rank),
            "blocked": blocked_ranks(context),
        },
        ranks=failed_ranks([first]),
        place=place_of(context, first.rank, frame) if frame else last_known_place(context, first.rank),
        proof=(f"rank{first.rank}/stacks.txt",) if frame else exit_record(context),
    )


@rule_if(first_failure_of(FailureKind.CODE))
def bad_exit(context: DiagnosisContext, first: Failure) -> Explanation:
    """Explain a failure in which a rank exited with an error code without raising an exception."""
    rank = context.rank(first.rank)
    place = last_known_place(context, first.rank)
    # The last recorded line is that of the exit only if it says so.
    exits_there = place is not None and "exit(" in (context.program.statement(place) or "")
    branch = context.program.guard(place) if place is not None and exits_there else None
    return Explanation(
        cause=Cause.BAD_EXIT,
        evidence=EvidenceKind.ENDED,
        facts={
            "failure": first.text,
            "condition": {"text": branch.text, "line": branch.place} if branch else None,
            "last_seen": last_progress_facts(context, first.rank),
            "error_line": rank.error_lines[-1] if rank and rank.error_lines else None,
            "blocked": blocked_ranks(context),
        },
        ranks=failed_ranks([first]),
        place=place,
        proof=exit_record(context) if context.evidence.is_attached else (f"rank{first.rank}/stderr.log",),
    )


def not_judged(context: DiagnosisContext) -> Explanation | None:
    """Explain why a run has no verdict: it was inspected or interrupted, or nsa-harness failed."""
    if context.judgement.status is not Status.ERROR:
        return None
    ending, error = context.evidence.ending, context.judgement.error or ""
    if lacks_node(context.evidence, context.judgement.failures):
        return _explain_missing_node(context.evidence)
    full_disk = context.evidence.disk_full
    if full_disk is not None and ending not in (Ending.DETACHED, Ending.INTERRUPTED, Ending.CONTROLLER_DIED):
        return Explanation(
            cause=Cause.DISK_FULL,
            evidence=EvidenceKind.FACT,
            facts={"variant": "not judged", "disk": full_disk, "error": error},
            proof=("processes.jsonl",),
        )
    attached_cause = Cause.STILL_RUNNING if ranks_with_progress(context.evidence) else Cause.SUSPECTED
    cause, proof = {
        Ending.DETACHED: (attached_cause, ("watch.jsonl",)),
        Ending.POST_MORTEM: (Cause.INCONCLUSIVE, ()),
        Ending.INTERRUPTED: (Cause.INTERRUPTED, ()),
        Ending.CONTROLLER_DIED: (Cause.INTERRUPTED, () if context.evidence.is_observed else ("interrupted",)),
    }.get(ending, (Cause.HARNESS_ERROR, ()))
    return Explanation(cause=cause, evidence=EvidenceKind.FACT, facts={"error": error}, proof=proof)


def _explain_missing_node(evidence: Evidence) -> Explanation:
    lost, missing = list(evidence.lost_nodes), list(dict.fromkeys(evidence.missing_nodes))
    ranks = sum(node in lost for node in evidence.nodes.values())
    facts: Facts = {"lost": lost, "lost_ranks": ranks, "world_size": evidence.world_size, "missing": missing}
    proof = tuple(f"nodes/{node}/state.json" for node in lost) or ("watch.jsonl",)
    return Explanation(cause=Cause.NODE_LOST, evidence=EvidenceKind.FACT, facts=facts, proof=proof)


def retracted_hang(context: DiagnosisContext) -> Explanation | None:
    """Report that a job under `watch` made progress again after nsa-harness had reported a hang."""
    retractions = context.evidence.retractions
    if not retractions:
        return None
    last = retractions[-1]
    return Explanation(
        cause=Cause.RETRACTED_HANG,
        evidence=EvidenceKind.FACT,
        facts={
            "proven_at_s": last.at_s,
            "kind": last.kind,
            "reason": last.reason,
            "no_progress_s": last.no_progress_s,
            "times": len(retractions),
        },
        proof=("watch.jsonl",),
    )


def unknown(context: DiagnosisContext) -> Explanation:
    """Explain a run for which no other rule found a cause, by listing its failures and blocked calls."""
    proof = dict.fromkeys(path for root in context.roots for path in dump_proof(context, root))
    return Explanation(
        cause=Cause.UNKNOWN,
        evidence=EvidenceKind.NOTHING,
        facts={
            "failures": tuple(failure.text for failure in context.judgement.failures),
            "waits": tuple({"rank": root.rank, "blocked_in": root.blocked_in} for root in context.roots),
            "attached": context.evidence.is_attached,
        },
        ranks=tuple(sorted({*failed_ranks(context.judgement.failures[:1]), *(root.rank for root in context.roots)})),
        place=wait_place(context, context.roots[0]) if context.roots else None,
        proof=tuple(proof) if context.evidence.is_observed else ("output.log",),
    )


def orphan_process(context: DiagnosisContext) -> Explanation | None:
    """Report processes of the run that were still running after the launcher had exited."""
    undead = context.evidence.unkillable or ()
    processes = undead or context.evidence.leftovers
    if not processes:
        return None
    return Explanation(
        cause=Cause.ORPHAN_PROCESS,
        evidence=EvidenceKind.FACT,
        facts={
            "processes": tuple(processes),
            "could_not_be_ended": bool(undead),
            "left_alone": context.evidence.is_observed,
        },
        proof=("processes.jsonl",),
    )
