"""Why a run failed, in order of time; what was too slow; and the causes of a run that no other rule explains."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.call_paths import turned_off_at
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    call_facts,
    dump_proof,
    failed_as,
    last_line,
    last_place,
    last_seen,
    own_frames,
    place_of,
    raised_alike,
    raised_at,
    raised_first,
    ranks_of,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion, given
from nsa_harness.core.diagnosis.profile import PROFILE_FILE, HotLine, Pace, RankProfile, busiest, pace, profiles
from nsa_harness.core.diagnosis.rules.threads import death_facts
from nsa_harness.core.evidence.evidence import Ending, Frame, Raised
from nsa_harness.core.evidence.exit_messages import GAVE_UP, timeout_message
from nsa_harness.core.evidence.health_samples import LastMessages
from nsa_harness.core.evidence.stacks import is_library, user_frame
from nsa_harness.core.report import CollectiveRef, Facts, Place, Status
from nsa_harness.core.verdict.motion import BUSY_SHARE
from nsa_harness.core.verdict.verdict import Failure, FailureKind, still_moving
from nsa_harness.core.verdict.wait import Wait
from nsa_harness.core.verdict.wait_graph import FOR_RANKS, wait_for

_ENOUGH_SAMPLES = 30
_SAME = 0.6  # share of the time of two ranks that they spend on the same parts
_SAME_STEP = 5  # times the median step: a step this long does the same work as the steps before
_LONG_STEP = 50  # times the median step: slower work is possible, and so is a loop without end


def slow(context: DiagnosisContext) -> Explanation | None:
    """The run was still there at its deadline, and no rank had failed."""
    if context.evidence.ending is not Ending.DEADLINE or context.first_failure is not None:
        return None
    made = profiles(context.evidence)
    sampled = busiest(made)
    works = sampled is not None and 2 * sampled.working >= sampled.samples
    if not works and (held_up := _held_up(context)) is not None:
        return held_up
    place = place_of(context, sampled.rank, _parts(context, sampled)[0].user) if sampled else None
    alike = _alike(context, made)
    speed = pace(context.evidence)
    endless = speed is not None and speed.step_s is not None and speed.running_s > _LONG_STEP * max(speed.step_s, 0.1)
    return Explanation(
        cause=Cause.SLOW,
        evidence=_seen(sampled, speed) if sampled and place and works else EvidenceKind.CLOCK,
        facts={
            "variant": "working",
            "deadline_s": context.evidence.limits.deadline_s,
            "pace": _pace(speed),
            "hot_parts": _hot_parts(context, sampled) if sampled else (),
            "ranks_alike": alike,
            "seldom_at_work": {"samples": sampled.working, "of": sampled.samples} if sampled and not works else None,
            "step_may_never_end": endless,
            "spends_time_on": _spends_time_on(context, sampled),
        },
        ranks=() if sampled is None or alike else (sampled.rank,),
        place=place,
        proof=(PROFILE_FILE,) if sampled else ("watch.jsonl",),
    )


def _gave_up(context: DiagnosisContext) -> tuple[Failure, re.Match[str]] | None:
    """Find the first failure, if its rank gave up waiting for other ranks."""
    first = context.first_failure
    message = GAVE_UP.search(first.text) if first else None
    return (first, message) if first and message else None


@given(_gave_up)
def came_too_late(context: DiagnosisContext, first: Failure, _: re.Match[str]) -> Explanation | None:
    """The others' wait in a collective ran out while this rank was still on its way there."""
    absent = (one for one in context.differences if one.absent)
    late = next((one for one in absent if all(_on_its_way(context, rank) for rank in one.ranks)), None)
    if late is None or late.expected is None:
        return None
    rank, call = late.ranks[0], late.expected
    board = context.boards[rank]
    moved = board.training is not None and board.training.at_s > call.at_s
    return Explanation(
        cause=Cause.SLOW,
        evidence=EvidenceKind.OPEN if moved else EvidenceKind.ABSENCE,
        facts={
            "variant": "came too late",
            "op": call.op,
            "line": call.place,
            "waiting": tuple(waiting for waiting, _ in late.entered),
            "message": first.text,
            "was_busy": moved,
        },
        ranks=late.ranks,
        place=last_place(context, rank),
        proof=(f"rank{rank}/calls.txt", "output.log"),
        step=call.step,
        collective=CollectiveRef(group=call.group, seq=call.seq, op=call.op),
    )


def _on_its_way(context: DiagnosisContext, rank: int) -> bool:
    """Return True if the rank made no other call, and was ended from outside as the others failed."""
    known = context.rank(rank)
    if known is None or known.board is None or known.raised is not None or known.exit is None:
        return False
    inside = any(one.left_s is None for one in known.board.calls)
    ended = known.exit.by_us or known.exit.status in (-signal.SIGTERM, -signal.SIGKILL)
    return ended and not inside and known.board.enqueued == known.board.completed


@given(_gave_up)
def never_arrived(context: DiagnosisContext, first: Failure, message: re.Match[str]) -> Explanation | None:
    """The others' wait ran out, and no call shows for whom: the ranks that did not fail themselves never came."""
    failed = [one.rank for one in context.judgement.failures if one.status not in _KILLING]
    named = [int(rank) for rank in (message["absent"] or "").split(", ") if rank]
    late = tuple(named or [rank.rank for rank in context.evidence.ranks if rank.rank not in failed])
    if not late or not first.collateral:
        return None
    return Explanation(
        cause=Cause.SLOW,
        evidence=EvidenceKind.ABSENCE,
        facts={"variant": "never arrived", "waiting_rank": first.rank, "message": first.text},
        ranks=late,
        place=last_place(context, late[0]),
        proof=("output.log",),
    )


def _waited_in_vain(context: DiagnosisContext) -> tuple[list[Wait], list[int]] | None:
    """Find the ranks that waited for others in a hang that nobody watched, and the ranks that were in no such wait."""
    if context.evidence.ending is not Ending.POST_MORTEM or context.judgement.status is not Status.HANG:
        return None
    waiting = [wait for wait in context.waits.values() if wait.kind in FOR_RANKS]
    inside = {wait.rank for wait in waiting}
    members = {peer for wait in waiting for peer in wait.peers if wait.collective}
    everyone = _ranks_given_up(context) or members or {rank.rank for rank in context.evidence.ranks}
    absent = sorted(everyone - inside)
    return (waiting, absent) if waiting and absent else None


@given(_waited_in_vain)
def rank_absent(context: DiagnosisContext, waiting: list[Wait], absent: list[int]) -> Explanation:
    """Ranks waited for others that were elsewhere: where, a dump of those shows, or else their last recorded call."""
    last = waiting[0]
    messages = (message for wait in waiting if (rank := context.rank(wait.rank)) and (message := timeout_message(rank)))
    elsewhere = next((wait for rank in absent if (wait := context.waits.get(rank)) and wait.leaf), None)
    call = None if elsewhere else _last_event(context, absent[0])
    may_have_waited = not (elsewhere or call) and _ranks_given_up(context).isdisjoint(absent)
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


def _ranks_given_up(context: DiagnosisContext) -> set[int]:
    """Return the ranks that other ranks named as they gave up waiting."""
    messages = (message for rank in context.evidence.ranks if (message := timeout_message(rank)) and message["absent"])
    return {int(rank) for message in messages for rank in message["absent"].split(", ")}


def _last_event(context: DiagnosisContext, rank: int) -> Event | None:
    timeline = context.timelines.get(rank)
    return timeline.events[-1] if timeline and timeline.events else None


def _all_in_one_call(context: DiagnosisContext) -> tuple[list[Wait]] | None:
    """Find the waits of all ranks, if nobody watched the hang and every rank waited in the same call."""
    waits = list(context.waits.values())
    if context.evidence.ending is not Ending.POST_MORTEM or context.judgement.status is not Status.HANG:
        return None
    alike = len(waits) == context.evidence.world_size > 1 and all(wait.kind in FOR_RANKS for wait in waits)
    return (waits,) if alike and len({(wait.blocked_in, wait.user) for wait in waits}) == 1 else None


@given(_all_in_one_call)
def not_delivered(context: DiagnosisContext, waits: list[Wait]) -> Explanation:
    """All ranks were in the same call, and it did not end."""
    return Explanation(
        cause=Cause.TRANSPORT,
        evidence=EvidenceKind.ABSENCE,
        facts={"variant": "not delivered", "waiting_ranks": len(waits), "blocked_in": waits[0].blocked_in},
        place=wait_place(context, waits[0]),
        proof=dump_proof(context, waits[0]),
        left_open=(OpenQuestion(code="one_came_too_late"),),
    )


def _spends_time_on(context: DiagnosisContext, sampled: RankProfile | None) -> str:
    """Return what the time is spent on, by the library called there, the CPU time and the statement."""
    if sampled is not None and sampled.fetching and 2 * sampled.fetching >= sampled.working:
        return "input"
    if sampled is None or sampled.cpu_share is None or sampled.cpu_share >= BUSY_SHARE:
        return "compute"
    user = _parts(context, sampled)[0].user
    source = context.program.statement(Place(file=user.file, line=user.line)) or ""
    return "sleep" if "sleep(" in source else "wait"


def _seen(sampled: RankProfile, speed: Pace | None) -> EvidenceKind:
    """Return SAMPLES if there are enough, and step follows step: only then the step in progress surely ends too."""
    goes_on = speed is not None and speed.step_s is not None and speed.running_s <= _SAME_STEP * max(speed.step_s, 0.1)
    return EvidenceKind.SAMPLES if goes_on and sampled.samples >= _ENOUGH_SAMPLES else EvidenceKind.OPEN


def _held_up(context: DiagnosisContext) -> Explanation | None:
    """No rank works, and all other ranks wait for those that no rank holds up.

    The samples show that no rank moves, so a single snapshot is enough to see which rank waits for which.
    """
    looks = context.evidence.snapshots[-2:]
    graph = wait_for(looks[0], looks[-1], (), context.evidence.backend) if looks else None
    if graph is None or graph.moved or not 0 < len(graph.roots) < len(graph.waits):
        return None
    root = graph.roots[0]
    return Explanation(
        cause=Cause.SLOW,
        evidence=EvidenceKind.CLOCK,
        facts={
            "variant": "held up",
            "deadline_s": context.evidence.limits.deadline_s,
            "pace": _pace(pace(context.evidence)),
            "blocked_in": root.blocked_in,
        },
        ranks=tuple(sorted(one.rank for one in graph.roots)),
        place=place_of(context, root.rank, (root.child.deepest.user if root.child else None) or root.user),
        proof=(PROFILE_FILE,),
    )


def _pace(speed: Pace | None) -> Facts | None:
    if speed is None:
        return None
    return {"steps_done": speed.done, "step_s": speed.step_s, "left_s": speed.left_s, "steps_planned": speed.planned}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A loop of a function, or the rest of the function outside its loops."""

    user: Frame  # its line seen most often
    loop: int | None  # the line of its `for` or `while`; None: outside of loops, or the source is not known
    seen: int


def _parts(context: DiagnosisContext, sampled: RankProfile) -> list[_Part]:
    """Return the parts of the program that the samples show, the part with most of the time first."""
    parts: dict[tuple[str, str, int | None], list[HotLine]] = {}
    for one in sampled.lines:
        loop = context.program.loop_line(one.user)
        parts.setdefault((one.user.file, one.user.function, loop), []).append(one)
    seen = (
        _Part(user=lines[0].user, loop=loop, seen=sum(one.seen for one in lines))
        for (_, _, loop), lines in parts.items()
    )
    return sorted(seen, key=lambda part: -part.seen)


def _alike(context: DiagnosisContext, made: Sequence[RankProfile]) -> bool:
    """Return True if every rank was seen at work, and on the same parts for most of its time."""
    if not len(made) == len(context.evidence.ranks) > 1 or any(2 * one.computing < one.samples for one in made):
        return False
    shares = [
        {(part.user.file, part.user.function, part.loop): part.seen / one.working for part in _parts(context, one)}
        for one in made
    ]
    return all(sum(min(share, shares[0].get(part, 0.0)) for part, share in one.items()) > _SAME for one in shares)


def _hot_parts(context: DiagnosisContext, sampled: RankProfile) -> tuple[Facts, ...]:
    """Return the two parts seen most often, with their samples of those in which the rank worked."""
    return tuple(
        {
            "function": part.user.function,
            "line": Place(file=part.user.file, line=part.user.line),
            "loop_line": part.loop,
            "samples": part.seen,
            "of": sampled.working,
        }
        for part in _parts(context, sampled)[:2]
    )


@given(raised_first)
def exception(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation:
    """A rank raised, and nothing that failed before explains it."""
    line = raised_at(context, first.rank, raised)
    dead = _died_before(context, first, raised)
    package = _met_in_an_import(raised) or ""
    return Explanation(
        cause=Cause.EXCEPTION,
        evidence=EvidenceKind.PRINTED if dead else EvidenceKind.RAISED,
        facts={
            "before": {"rank": first.rank, **death_facts(dead)} if dead else None,
            "error": first.text,
            "line": line,
            "beneath": _beneath(raised, line),
            "came_out": _came_out(context, first, raised),
            "package": package,
            "package_is_ours": package in _INSTALLED,
        },
        ranks=ranks_of([one for one in context.judgement.failures if raised_alike(one, first)]),
        place=dead.place if dead else line,
        proof=(raised.proof,),
    )


# Errors that a process raises if a child or thread that it waits for is gone.
_BEREFT = re.compile(r"(?:EOF|BrokenPipe|ConnectionReset|CalledProcess|ChildProcess)Error$|BrokenProcessPool$")
_IN_VAIN = re.compile(r"(?:Timeout|BrokenBarrier)Error$|Empty$")


def _died_before(context: DiagnosisContext, first: Failure, raised: Raised) -> LastMessages | None:
    """Return a thread or child that printed why it ended, if the rank raised what follows from that."""
    rank = context.rank(first.rank)
    bereft, in_vain = _BEREFT.search(raised.type), _IN_VAIN.search(raised.type)
    # A traceback without a name may be one that was caught and printed.
    dead = (one for one in (rank.deaths if rank else ()) if bereft or (in_vain and one.name != one.kind))
    return next(dead, None)


def _beneath(raised: Raised, place: Place | None) -> Place | None:
    """Return the library's line in which the error came up, below the program's own line."""
    top = raised.frames[0] if raised.frames else None
    if top is None or place is None or (top.file, top.line) == (place.file, place.line):
        return None
    return Place(file=top.file, line=top.line, function=top.function)


def _came_out(context: DiagnosisContext, first: Failure, raised: Raised) -> Facts | None:
    """Return what the rank itself raised, if a worker handed the error on or another one followed from it."""
    rank = context.rank(first.rank)
    if rank is None or rank.raised is None or rank.raised.frames == raised.frames:
        return None
    error = f"{rank.raised.type}: {rank.raised.message}".partition("\n")[0]
    return {"line": raised_at(context, None, rank.raised), "error": error}


_INSTALLED = ("nsa_harness", "nsa_attention")
_CHECKOUT = ("nsa", "harness")  # directories of a checkout; another program may have packages of these names
_FOUND = re.compile(r"(?:from '(?=[\w.]+')|No module named '(?=\w+\.))(\w+)")  # a package that is there, and lacks that


def _met_in_an_import(raised: Raised) -> str | None:
    """Return the package, of a name that we have too, in which the program's import did not find what it wants."""
    theirs = [frame for frame in raised.frames if not (is_library(frame.file) or _installed_in(frame.file))]
    if raised.type not in ("ImportError", "ModuleNotFoundError") or not theirs:
        return None
    if ours := next(filter(None, map(_installed_in, (raised.message, *(frame.file for frame in raised.frames)))), None):
        return ours
    found = _FOUND.search(raised.message)
    return found[1] if found and found[1] in (*_INSTALLED, *_CHECKOUT) else None


def _installed_in(text: str) -> str | None:
    """Return the package of nsa-harness that a path in `text` lies in, or None."""
    return next((package for package in _INSTALLED if f"/{package}/" in text), None)


@given(failed_as(FailureKind.LEFT))
def early_exit(context: DiagnosisContext, first: Failure) -> Explanation:
    """A rank ended while the others still needed it."""
    attached = context.evidence.attached  # without a record of what the rank did before
    seen = EvidenceKind.EFFECT if attached else EvidenceKind.KERNEL
    place = (
        _turned_off(context, first.rank)
        if attached
        else _left_at(context, first.rank) or last_place(context, first.rank)
    )
    return Explanation(
        cause=Cause.EARLY_EXIT,
        evidence=EvidenceKind.ABSENCE if first.status is None else seen,
        facts={
            "failure": first.text,
            "last_seen": None if attached else last_seen(context, first.rank),
            "blocked": blocked_ranks(context),
        },
        ranks=ranks_of([first]),
        place=place,
        proof=journal_of_ends(context),
    )


def _turned_off(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return where a rank without any record may have turned off before the line in which the others wait for it."""
    waiting = _waiting(context)
    if rank is None or not waiting:
        return None
    return turned_off_at(context, rank, own_frames(context, waiting[0].rank)) or wait_place(context, waiting[0])


def _waiting(context: DiagnosisContext) -> list[Wait]:
    """Return the waits of a proven hang that are for another rank."""
    return [wait for _, wait in sorted(context.waits.items()) if wait.peers]


def blocked_ranks(context: DiagnosisContext) -> Facts | None:
    """Return the ranks that wait for others and in which call, in a job that was found as it ran. None: no rank."""
    waiting = _waiting(context) if context.evidence.attached else []
    if not waiting:
        return None
    calls = {wait.blocked_in for wait in waiting}
    return {
        "ranks": tuple(wait.rank for wait in waiting),
        "blocked_in": waiting[0].blocked_in if len(calls) == 1 else "",
        "line": wait_place(context, waiting[0]),
    }


def journal_of_ends(context: DiagnosisContext) -> tuple[str, ...]:
    return ("watch.jsonl",) if context.evidence.attached else ("processes.jsonl",)


def _left_at(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return the rank's last call, if that came after the last beat. The line of a sys.exit is known otherwise."""
    board = context.boards.get(rank) if rank is not None else None
    if board is None or board.left_from or not board.calls or board.beat_s is None:
        return None
    marked_s = board.training.at_s if board.training is not None else 0.0  # a module it went into after that call
    return board.calls[-1].place if board.calls[-1].entered_s > max(board.beat_s, marked_s) else None


def killed(context: DiagnosisContext) -> Explanation | None:
    """SIGKILL or SIGTERM of another process ended a rank or the launcher."""
    first = context.first_failure
    if first is None or first.status not in _KILLING:
        return None
    name = _KILLING[first.status].name
    sent = [one for one in context.evidence.signals if one.signal == name and one.sender != "harness"]
    job = next((one for one in sent if not one.pid), None)
    sender = job or next((one for one in sent if one.rank == first.rank), None)
    return Explanation(
        cause=Cause.KILLED,
        evidence=EvidenceKind.KERNEL,
        facts={
            "killed_rank": first.rank,
            "signal": name,
            "sender": sender.sender if sender else "",
            "sent_to_whole_job": job is not None,
            "watched": context.evidence.ending is not Ending.POST_MORTEM,
            "last_seen": last_seen(context, first.rank),
            "last_line": last_line(context, first.rank),
            "blocked": blocked_ranks(context),
        },
        ranks=() if first.rank is None or sender else (first.rank,),
        place=None if sender else last_place(context, first.rank),
        proof=("output.log",) if sender else journal_of_ends(context),
    )


_KILLING = {
    -signal.SIGKILL: signal.SIGKILL,
    -signal.SIGTERM: signal.SIGTERM,
    128 + signal.SIGTERM: signal.SIGTERM,  # the exit code of a shell, or of the program's own handler
}


@given(failed_as(FailureKind.SIGNAL))
def crashed(context: DiagnosisContext, first: Failure) -> Explanation:
    """A fatal signal ended a rank."""
    rank = context.rank(first.rank)
    frame = user_frame(rank.death_stacks[-1].frames) if rank and rank.death_stacks else None
    return Explanation(
        cause=Cause.SEGFAULT if first.status in (-signal.SIGSEGV, -signal.SIGBUS) else Cause.ABORTED,
        evidence=EvidenceKind.ENDED,
        facts={
            "failure": first.text,
            "last_seen": last_seen(context, first.rank),
            "blocked": blocked_ranks(context),
        },
        ranks=ranks_of([first]),
        place=place_of(context, first.rank, frame) if frame else last_place(context, first.rank),
        proof=(f"rank{first.rank}/stacks.txt",) if frame else journal_of_ends(context),
    )


@given(failed_as(FailureKind.CODE))
def bad_exit(context: DiagnosisContext, first: Failure) -> Explanation:
    """A rank that left with an exit code and no exception: sys.exit, argparse, os._exit."""
    rank = context.rank(first.rank)
    return Explanation(
        cause=Cause.BAD_EXIT,
        evidence=EvidenceKind.ENDED,
        facts={
            "failure": first.text,
            "last_seen": last_seen(context, first.rank),
            "error_line": rank.error_lines[-1] if rank and rank.error_lines else None,
            "blocked": blocked_ranks(context),
        },
        ranks=ranks_of([first]),
        place=last_place(context, first.rank),
        proof=journal_of_ends(context) if context.evidence.attached else (f"rank{first.rank}/stderr.log",),
    )


def not_judged(context: DiagnosisContext) -> Explanation | None:
    """The run could not be judged: it was only looked at, it was interrupted, or the harness failed."""
    if context.judgement.status is not Status.ERROR:
        return None
    ending, error = context.evidence.ending, context.judgement.error or ""
    full = context.evidence.disk_full
    if full is not None and ending not in (Ending.DETACHED, Ending.INTERRUPTED, Ending.CONTROLLER_DIED):
        return Explanation(
            cause=Cause.DISK_FULL,
            evidence=EvidenceKind.FACT,
            facts={"variant": "not judged", "disk": full, "error": error},
            proof=("processes.jsonl",),
        )
    looked_at = Cause.STILL_RUNNING if still_moving(context.evidence) else Cause.SUSPECTED
    cause, proof = {
        Ending.DETACHED: (looked_at, ("watch.jsonl",)),
        Ending.POST_MORTEM: (Cause.INCONCLUSIVE, ()),
        Ending.INTERRUPTED: (Cause.INTERRUPTED, ()),
        Ending.CONTROLLER_DIED: (Cause.INTERRUPTED, () if context.evidence.observed else ("interrupted",)),
    }.get(ending, (Cause.HARNESS_ERROR, ()))
    return Explanation(cause=cause, evidence=EvidenceKind.FACT, facts={"error": error}, proof=proof)


def retracted_hang(context: DiagnosisContext) -> Explanation | None:
    """A job under `watch` moved again after its proof; one that the harness launched is ended there."""
    retracted = context.evidence.retracted
    if not retracted:
        return None
    last = retracted[-1]
    return Explanation(
        cause=Cause.RETRACTED_HANG,
        evidence=EvidenceKind.FACT,
        facts={
            "proven_at_s": last.at_s,
            "kind": last.kind,
            "reason": last.reason,
            "no_progress_s": last.quiet_s,
            "times": len(retracted),
        },
        proof=("watch.jsonl",),
    )


def unknown(context: DiagnosisContext) -> Explanation:
    """No rule names the cause: the failures, and what each root is blocked in."""
    proof = dict.fromkeys(path for root in context.roots for path in dump_proof(context, root))
    return Explanation(
        cause=Cause.UNKNOWN,
        evidence=EvidenceKind.NOTHING,
        facts={
            "failures": tuple(failure.text for failure in context.judgement.failures),
            "waits": tuple({"rank": root.rank, "blocked_in": root.blocked_in} for root in context.roots),
            "attached": context.evidence.attached,
        },
        ranks=tuple(sorted({*ranks_of(context.judgement.failures[:1]), *(root.rank for root in context.roots)})),
        place=wait_place(context, context.roots[0]) if context.roots else None,
        proof=tuple(proof) if context.evidence.observed else ("output.log",),
    )


def orphan_process(context: DiagnosisContext) -> Explanation | None:
    """Processes of the run outlived its launcher."""
    undead = context.evidence.undead or ()
    processes = undead or context.evidence.leftovers
    if not processes:
        return None
    return Explanation(
        cause=Cause.ORPHAN_PROCESS,
        evidence=EvidenceKind.FACT,
        facts={
            "processes": tuple(processes),
            "could_not_be_ended": bool(undead),
            "left_alone": context.evidence.observed,
        },
        proof=("processes.jsonl",),
    )
