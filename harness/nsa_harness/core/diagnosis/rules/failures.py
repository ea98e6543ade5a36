"""Why a run failed, in order of time; what was too slow; and what is said of a run that nothing else explains."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.diagnosis.call_paths import turned_off_at
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.collective_text import event_text
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    at,
    counted,
    dump_proof,
    failed_as,
    last_line,
    last_place,
    last_seen,
    place_of,
    raised_alike,
    raised_at,
    raised_first,
    ranks_of,
    shorten,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, explained, given
from nsa_harness.core.diagnosis.profile import PROFILE_FILE, HotLine, Pace, RankProfile, busiest, pace, profiles
from nsa_harness.core.diagnosis.progress import own_frames
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.diagnosis.rules.threads import died_of
from nsa_harness.core.evidence.evidence import Ending, Frame, Raised
from nsa_harness.core.evidence.exit_messages import GAVE_UP, timeout_message
from nsa_harness.core.evidence.health_samples import LastMessages
from nsa_harness.core.evidence.stacks import is_library, user_frame
from nsa_harness.core.report import CollectiveRef, Place, Status
from nsa_harness.core.verdict.motion import BUSY_SHARE
from nsa_harness.core.verdict.verdict import Failure, FailureKind, still_moving
from nsa_harness.core.verdict.wait import Wait
from nsa_harness.core.verdict.wait_graph import FOR_RANKS, wait_for

_ENOUGH_SAMPLES = 30
_SHORT_S = 0.1  # of a step; below, tenths of a second say nothing
_SAME = 0.6  # of the time of two ranks
_SAME_STEP = 5  # times the median: no other work than the steps before
_LONG_STEP = 50  # times the median of those before it: slower work is possible, and so is a loop without end


def slow(context: DiagnosisContext) -> Explanation | None:
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
    stuck = "; the step in progress is much longer than the others were, and may never end" if endless else ""
    idle = "" if sampled is None or works else f", at work in only {sampled.working} of {sampled.samples} samples"
    return explained(
        Cause.SLOW,
        f"{_still_there(context)}, {_pace(speed)};"
        f" the time goes{_where(context, sampled) if sampled else ' to no single line'}"
        f"{', on every rank alike' if alike else ''}{idle}{stuck}",
        ranks=() if sampled is None or alike else (sampled.rank,),
        place=place,
        evidence=_seen(sampled, speed) if sampled and place and works else EvidenceKind.CLOCK,
        proof=(PROFILE_FILE,) if sampled else ("watch.jsonl",),
        advice=_ADVICE[_spent(context, sampled)] + _LONGER,
    )


def _gave_up(context: DiagnosisContext) -> tuple[Failure, re.Match[str]] | None:
    """What failed first, where it had waited for the others."""
    first = context.first_failure
    said = GAVE_UP.search(first.text) if first else None
    return (first, said) if first and said else None


@given(_gave_up)
def came_too_late(context: DiagnosisContext, first: Failure, _: re.Match[str]) -> Explanation | None:
    """The others' wait in a collective ran out while this rank was still on its way there."""
    absent = (one for one in context.differences if one.absent)
    late = next((one for one in absent if all(_on_its_way(context, rank) for rank in one.ranks)), None)
    if late is None or late.expected is None:
        return None
    rank, call = late.ranks[0], late.expected
    waiting = ranks_text([rank for rank, _ in late.entered])
    board = context.boards[rank]
    moved = board.training is not None and board.training.at_s > call.at_s
    place = last_place(context, rank)
    of_step = "" if call.step is None else f" of step {call.step}"
    return explained(
        Cause.SLOW,
        f"rank {rank} had not reached {call.op}{at(call.place)}{of_step} when {waiting} gave up waiting for it there"
        f" ({shorten(first.text, 120)}); {'it was still busy' if moved else 'it was seen last'}{at(place)}, or it"
        " skipped the call",
        ranks=late.ranks,
        place=place,
        step=call.step,
        collective=CollectiveRef(group=call.group, seq=call.seq, op=call.op),
        evidence=EvidenceKind.OPEN if moved else EvidenceKind.ABSENCE,
        proof=(f"rank{rank}/calls.txt", "output.log"),
        advice="Let the work that only one rank does be shared or made shorter, or give the process group a longer"
        " timeout: init_process_group(timeout=...), a group of its own for that barrier.",
    )


def _on_its_way(context: DiagnosisContext, rank: int) -> bool:
    """It went on to no other call, and was ended from outside as the others failed."""
    known = context.rank(rank)
    if known is None or known.board is None or known.raised is not None or known.exit is None:
        return False
    inside = any(one.left_s is None for one in known.board.calls)
    ended = known.exit.by_us or known.exit.status in (-signal.SIGTERM, -signal.SIGKILL)
    return ended and not inside and known.board.enqueued == known.board.completed


@given(_gave_up)
def never_arrived(context: DiagnosisContext, first: Failure, said: re.Match[str]) -> Explanation | None:
    """The same where no call shows it: who failed in nothing of its own is the one that the others waited for."""
    failed = [one.rank for one in context.judgement.failures if one.status not in _KILLING]
    named = [int(rank) for rank in (said["absent"] or "").split(", ") if rank]
    late = tuple(named or [rank.rank for rank in context.evidence.ranks if rank.rank not in failed])
    if not late or not first.collateral:
        return None
    place = last_place(context, late[0])
    return explained(
        Cause.SLOW,
        f"{ranks_text(late)} never reached the point where rank {first.rank} gave up waiting"
        f" ({shorten(first.text, 120)}); the last that was seen of rank {late[0]} is{at(place) or ' nothing'}",
        ranks=late,
        place=place,
        evidence=EvidenceKind.ABSENCE,
        proof=("output.log",),
    )


def _waited_in_vain(context: DiagnosisContext) -> tuple[list[Wait], list[int]] | None:
    """Of a hang that nobody watched: who waited for other ranks, and who was in no such wait."""
    if context.evidence.ending is not Ending.POST_MORTEM or context.judgement.status is not Status.HANG:
        return None
    waiting = [wait for wait in context.waits.values() if wait.kind in FOR_RANKS]
    inside = {wait.rank for wait in waiting}
    said = [words["absent"] for rank in context.evidence.ranks if (words := timeout_message(rank)) and words["absent"]]
    named = {int(rank) for words in said for rank in words.split(", ")}
    members = {peer for wait in waiting for peer in wait.peers if wait.collective}
    absent = sorted((named or members or {rank.rank for rank in context.evidence.ranks}) - inside)
    return (waiting, absent) if waiting and absent else None


@given(_waited_in_vain)
def rank_absent(context: DiagnosisContext, waiting: list[Wait], absent: list[int]) -> Explanation:
    """They waited for ranks that were elsewhere; where, a dump of these tells, else the last call they recorded."""
    last = waiting[0]
    gave_up = next(
        (said[0] for wait in waiting if (rank := context.rank(wait.rank)) and (said := timeout_message(rank))), ""
    )
    stood = [wait for rank in absent if (wait := context.waits.get(rank)) and wait.leaf]
    line = context.timelines.get(absent[0])
    before = line.events[-1] if line and line.events else None
    call, who = f"{last.blocked_in}{at(wait_place(context, last))}", ranks_text(absent)
    others = f"{ranks_text([wait.rank for wait in waiting])} waited{f' ({gave_up})' if gave_up else ''}"
    place, claim = None, f"{who} never came to {call}, where {others}"
    left_open: tuple[str, ...] = ()
    if stood:
        place = wait_place(context, stood[0])
        claim += f"; rank {stood[0].rank} stood in {stood[0].blocked_in}{at(place)}"
    elif before is not None:
        place = before.place
        claim += f"; the last call that rank {absent[0]} recorded is {event_text(context, absent[0], before)}"
    elif not _gave_up_for(context, absent):
        claim = f"{others} in {call}, and nothing that was read says where {who} stood"
        left_open = ("they waited there too, and the call itself did not end",)
    return explained(
        Cause.RANK_ABSENT,
        claim,
        ranks=tuple(absent),
        place=place,
        evidence=EvidenceKind.STACKS if stood else EvidenceKind.ABSENCE,
        proof=dump_proof(context, stood[0] if stood else last),
        left_open=left_open,
    )


def _gave_up_for(context: DiagnosisContext, ranks: Sequence[int]) -> bool:
    """Who gave up named one of these."""
    said = (words["absent"] or "" for rank in context.evidence.ranks if (words := timeout_message(rank)))
    return any(str(rank) in words.split(", ") for words in said for rank in ranks)


def _all_in_one_call(context: DiagnosisContext) -> tuple[list[Wait]] | None:
    """Of a hang that nobody watched: every rank waited in the same call."""
    waits = list(context.waits.values())
    if context.evidence.ending is not Ending.POST_MORTEM or context.judgement.status is not Status.HANG:
        return None
    alike = len(waits) == context.evidence.world_size > 1 and all(wait.kind in FOR_RANKS for wait in waits)
    return (waits,) if alike and len({(wait.blocked_in, wait.user) for wait in waits}) == 1 else None


@given(_all_in_one_call)
def not_delivered(context: DiagnosisContext, waits: list[Wait]) -> Explanation:
    place = wait_place(context, waits[0])
    return explained(
        Cause.TRANSPORT,
        f"all {len(waits)} ranks that are known were in {waits[0].blocked_in}{at(place)}, and it did not end: they do"
        " not differ, so the network or a device",
        place=place,
        evidence=EvidenceKind.ABSENCE,
        proof=dump_proof(context, waits[0]),
        advice="Look at dmesg for Xid errors and at the links between the nodes; run it again with NCCL_DEBUG=INFO, and"
        " with NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME set.",
        left_open=("one of them came to it only as the others gave up",),
    )


_ADVICE = {
    "input": "The data loader is waited for: give it more workers (num_workers), or make one item cheaper to load.",
    "compute": "Look at the named line: a Python loop over tokens or heads builds one autograd node a turn.",
    "sleep": "The named line sleeps: wait for an event in place of the clock, or sleep for less long.",
    "wait": "Little is computed meanwhile: look at what the named line reads, writes or waits for.",
}
_LONGER = " Raise limits.deadline_s if the work is meant to take that long."


def _spent(context: DiagnosisContext, sampled: RankProfile | None) -> str:
    """On what the time goes, by who is called there, by the CPU time, and by the statement."""
    if sampled is not None and sampled.fetching and 2 * sampled.fetching >= sampled.working:
        return "input"
    if sampled is None or sampled.cpu_share is None or sampled.cpu_share >= BUSY_SHARE:
        return "compute"
    user = _parts(context, sampled)[0].user
    said = context.program.statement(Place(file=user.file, line=user.line)) or ""
    return "sleep" if "sleep(" in said else "wait"


def _seen(sampled: RankProfile, speed: Pace | None) -> EvidenceKind:
    """Samples enough, and step follows step: only then it is known that the one in progress ends as well."""
    goes_on = speed is not None and speed.step_s is not None and speed.running_s <= _SAME_STEP * max(speed.step_s, 0.1)
    return EvidenceKind.SAMPLES if goes_on and sampled.samples >= _ENOUGH_SAMPLES else EvidenceKind.OPEN


def _held_up(context: DiagnosisContext) -> Explanation | None:
    """Nobody works: the ranks that no other rank holds up, where all others wait for them.

    That nobody moves the samples show; so one look is enough to see who waits for whom.
    """
    looks = context.evidence.snapshots[-2:]
    graph = wait_for(looks[0], looks[-1], (), context.evidence.backend) if looks else None
    if graph is None or graph.moved or not 0 < len(graph.roots) < len(graph.waits):
        return None
    root = graph.roots[0]
    ranks = tuple(sorted(one.rank for one in graph.roots))
    place = place_of(context, root.rank, (root.child.deepest.user if root.child else None) or root.user)
    return explained(
        Cause.SLOW,
        f"{_still_there(context)}, {_pace(pace(context.evidence))}; {ranks_text(ranks)}"
        f" {'stands' if len(ranks) == 1 else 'stand'} in"
        f" {root.blocked_in}{at(place)}, which may yet end, and all others wait for it",
        ranks=ranks,
        place=place,
        evidence=EvidenceKind.CLOCK,
        proof=(PROFILE_FILE,),
        advice="Look at what the named rank waits for. limits.open_wait_s says how long such a wait may last.",
    )


def _still_there(context: DiagnosisContext) -> str:
    deadline_s = context.evidence.limits.deadline_s
    return f"not proven to hang: still there at its deadline{'' if deadline_s is None else f' of {deadline_s:g} s'}"


def _pace(speed: Pace | None) -> str:
    if speed is None:
        return "no board to count its steps"
    words = counted(speed.done, "step") + " done"
    if speed.step_s is not None:
        short = speed.step_s < _SHORT_S
        words += f", {speed.step_s * 1000:.1f} ms a step" if short else f", {speed.step_s:.1f} s a step"
    if speed.left_s is not None:
        words += f", {speed.left_s:.0f} s more for all {speed.planned}"
    return words


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A loop of a function, or what lies in none of its loops."""

    user: Frame  # its line seen most often
    loop: int | None  # the line of its `for` or `while`; None where there is none, or the source is not known
    seen: int


def _parts(context: DiagnosisContext, sampled: RankProfile) -> list[_Part]:
    """The first one holds most of the time."""
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
    """Every rank was seen at work, and on the same parts for most of its time."""
    if not len(made) == len(context.evidence.ranks) > 1 or any(2 * one.computing < one.samples for one in made):
        return False
    shares = [
        {(part.user.file, part.user.function, part.loop): part.seen / one.working for part in _parts(context, one)}
        for one in made
    ]
    return all(sum(min(share, shares[0].get(part, 0.0)) for part, share in one.items()) > _SAME for one in shares)


def _where(context: DiagnosisContext, sampled: RankProfile) -> str:
    """The two parts seen most often, with their share of the samples."""
    told = [
        (part, "" if part.loop is None else f", in the loop of line {part.loop},")
        for part in _parts(context, sampled)[:2]
    ]
    return " and".join(
        f" to {part.user.function}{at(Place(file=part.user.file, line=part.user.line))}{loop}"
        f" ({100 * part.seen // sampled.working} %)"
        for part, loop in told
    )


@given(raised_first)
def exception(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation:
    place = raised_at(context, first.rank, raised)
    ranks = ranks_of([one for one in context.judgement.failures if raised_alike(one, first)])
    met = _met_in_an_import(raised)
    ours = f"; {met} is a package of nsa-harness" if met in _INSTALLED else ""
    dead = _died_before(context, first, raised)
    before = f"{died_of(dead, first.rank)}, and then " if dead else ""
    return explained(
        Cause.EXCEPTION,
        f"{before}{ranks_text(ranks) if ranks else 'the launcher'} raised {shorten(first.text)}{at(place)}"
        f"{_beneath(raised, place)}{_met_as(context, first, raised)}{ours}",
        ranks=ranks,
        place=dead.place if dead else place,
        evidence=EvidenceKind.PRINTED if dead else EvidenceKind.RAISED,
        proof=(raised.proof,),
        advice=_advice_on_import(met) if met else None,
    )


# What somebody raises who waits for a child that is gone, or for a thread.
_BEREFT = re.compile(r"(?:EOF|BrokenPipe|ConnectionReset|CalledProcess|ChildProcess)Error$|BrokenProcessPool$")
_IN_VAIN = re.compile(r"(?:Timeout|BrokenBarrier)Error$|Empty$")


def _died_before(context: DiagnosisContext, first: Failure, raised: Raised) -> LastMessages | None:
    """A thread or child that printed why it ended, where the rank raised what follows from that."""
    rank = context.rank(first.rank)
    bereft, in_vain = _BEREFT.search(raised.type), _IN_VAIN.search(raised.type)
    # A traceback without a name may be one that was caught and printed.
    dead = (one for one in (rank.deaths if rank else ()) if bereft or (in_vain and one.name != one.kind))
    return next(dead, None)


def _beneath(raised: Raised, place: Place | None) -> str:
    """The line of a library in which it came up, behind the program's own."""
    top = raised.frames[0] if raised.frames else None
    if top is None or place is None or (top.file, top.line) == (place.file, place.line):
        return ""
    return f", in {top.function}{at(Place(file=top.file, line=top.line))}"


def _met_as(context: DiagnosisContext, first: Failure, raised: Raised) -> str:
    """What the rank itself raised, of what a worker handed on or something else led to."""
    rank = context.rank(first.rank)
    if rank is None or rank.raised is None or rank.raised.frames == raised.frames:
        return ""
    words = f"{rank.raised.type}: {rank.raised.message}".partition("\n")[0]
    return f"; it came out{at(raised_at(context, None, rank.raised))} as {shorten(words, 80)}"


_INSTALLED = ("nsa_harness", "nsa_attention")
_CHECKOUT = ("nsa", "harness")  # folders of a checkout: a program of somebody else may well have such names of its own
_FOUND = re.compile(r"(?:from '(?=[\w.]+')|No module named '(?=\w+\.))(\w+)")  # a package that is there, and lacks that


def _met_in_an_import(raised: Raised) -> str | None:
    """The package, by a name that we have too, in which an import of the user's program did not find what it wants."""
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


def _advice_on_import(package: str) -> str:
    if package in _INSTALLED:
        return (
            "What a program may import of nsa-harness is `from nsa_harness import run_one`. A package of your own needs"
            " another name, or an environment without nsa-harness."
        )
    return (
        f"See whose `{package}` that is: `{package}.__path__`. A checkout of nsa-harness has a folder of that name; it"
        " comes first where the checkout is the working directory or on PYTHONPATH: start the program elsewhere."
    )


@given(failed_as(FailureKind.LEFT))
def early_exit(context: DiagnosisContext, first: Failure) -> Explanation:
    found_so = context.evidence.attached  # without a record of what it did before
    return explained(
        Cause.EARLY_EXIT,
        f"{first.text}{who_waits(context)}" if found_so else f"{first.text}, {last_seen(context, first.rank)}",
        ranks=ranks_of([first]),
        place=_went(context, first.rank)
        if found_so
        else _left_at(context, first.rank) or last_place(context, first.rank),
        evidence=EvidenceKind.ABSENCE
        if first.status is None
        else EvidenceKind.EFFECT
        if found_so
        else EvidenceKind.KERNEL,
        proof=journal_of_ends(context),
    )


def _went(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Where a rank of which nothing is known may have turned off before the line in which the others wait for it."""
    waiting = _waiting(context)
    if rank is None or not waiting:
        return None
    return turned_off_at(context, rank, own_frames(context, waiting[0].rank)) or wait_place(context, waiting[0])


def _waiting(context: DiagnosisContext) -> list[Wait]:
    """Of a proven hang, those that wait for another rank."""
    return [wait for _, wait in sorted(context.waits.items()) if wait.peers]


def who_waits(context: DiagnosisContext) -> str:
    """ "; ranks 0 and 2 are blocked in all_reduce at train.py:18", of a job that was found as it ran."""
    waiting = _waiting(context) if context.evidence.attached else []
    if not waiting:
        return ""
    first, ranks = waiting[0], [wait.rank for wait in waiting]
    what = first.blocked_in if len({wait.blocked_in for wait in waiting}) == 1 else "calls to other ranks"
    blocked = f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} blocked"
    return f"; {blocked} in {what}{at(wait_place(context, first))}"


def journal_of_ends(context: DiagnosisContext) -> tuple[str, ...]:
    return ("watch.jsonl",) if context.evidence.attached else ("processes.jsonl",)


def _left_at(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Its last call, where it went on to one after its beat had looked for the last time; sys.exit tells its line."""
    board = context.boards.get(rank) if rank is not None else None
    if board is None or board.left_from or not board.calls or board.beat_s is None:
        return None
    marked_s = board.training.at_s if board.training is not None else 0.0  # a module it went into after that call
    return board.calls[-1].place if board.calls[-1].entered_s > max(board.beat_s, marked_s) else None


def killed(context: DiagnosisContext) -> Explanation | None:
    first = context.first_failure
    if first is None or first.status not in _KILLING:
        return None
    who = "the launcher" if first.rank is None else f"rank {first.rank}"
    name = _KILLING[first.status].name
    sent = [one for one in context.evidence.signals if one.signal == name and one.sender != "harness"]
    job = next((one for one in sent if not one.pid), None)
    sender = job or next((one for one in sent if one.rank == first.rank), None)
    unknown = (
        "by nobody that a file names" if context.evidence.ending is Ending.POST_MORTEM else "from outside the harness"
    )
    by = f"by {sender.sender}" if sender else unknown
    return explained(
        Cause.KILLED,
        f"{who} was killed by {name}, sent {by}{' to the whole job' if job else ''}, {last_seen(context, first.rank)}"
        f"{last_line(context, first.rank)}{who_waits(context)}",
        ranks=() if first.rank is None or sender else (first.rank,),
        place=None if sender else last_place(context, first.rank),
        evidence=EvidenceKind.KERNEL,
        proof=("output.log",) if sender else journal_of_ends(context),
    )


_KILLING = {
    -signal.SIGKILL: signal.SIGKILL,
    -signal.SIGTERM: signal.SIGTERM,
    128 + signal.SIGTERM: signal.SIGTERM,  # of a shell, or of a handler of the program's own
}


@given(failed_as(FailureKind.SIGNAL))
def crashed(context: DiagnosisContext, first: Failure) -> Explanation:
    rank = context.rank(first.rank)
    frame = user_frame(rank.death_stacks[-1].frames) if rank and rank.death_stacks else None
    place = place_of(context, first.rank, frame) if frame else last_place(context, first.rank)
    return explained(
        Cause.SEGFAULT if first.status in (-signal.SIGSEGV, -signal.SIGBUS) else Cause.ABORTED,
        f"{first.text}{at(place)}, {last_seen(context, first.rank)}{who_waits(context)}",
        ranks=ranks_of([first]),
        place=place,
        evidence=EvidenceKind.ENDED,
        proof=(f"rank{first.rank}/stacks.txt",) if frame else journal_of_ends(context),
    )


@given(failed_as(FailureKind.CODE))
def bad_exit(context: DiagnosisContext, first: Failure) -> Explanation:
    """A rank that left with an exit code and no exception: sys.exit, argparse, os._exit."""
    rank = context.rank(first.rank)
    said = f': "{shorten(rank.error_lines[-1])}"' if rank and rank.error_lines else ""
    return explained(
        Cause.BAD_EXIT,
        f"{first.text}, {last_seen(context, first.rank)}{said}{who_waits(context)}",
        ranks=ranks_of([first]),
        place=last_place(context, first.rank),
        evidence=EvidenceKind.ENDED,
        proof=journal_of_ends(context) if context.evidence.attached else (f"rank{first.rank}/stderr.log",),
    )


def not_judged(context: DiagnosisContext) -> Explanation | None:
    if context.judgement.status is not Status.ERROR:
        return None
    full = context.evidence.disk_full
    if full is not None and context.evidence.ending not in (
        Ending.DETACHED,
        Ending.INTERRUPTED,
        Ending.CONTROLLER_DIED,
    ):
        said = f"the disk of the run was full ({full}): {context.judgement.error}"
        return explained(Cause.DISK_FULL, said, evidence=EvidenceKind.FACT, proof=("processes.jsonl",))
    detached = Cause.STILL_RUNNING if still_moving(context.evidence) else Cause.SUSPECTED
    cause, proof = {
        Ending.DETACHED: (detached, ("watch.jsonl",)),
        Ending.POST_MORTEM: (Cause.INCONCLUSIVE, ()),
        Ending.INTERRUPTED: (Cause.INTERRUPTED, ()),
        Ending.CONTROLLER_DIED: (Cause.INTERRUPTED, () if context.evidence.observed else ("interrupted",)),
    }.get(context.evidence.ending, (Cause.HARNESS_ERROR, ()))
    said = context.judgement.error or "the run could not be judged"
    return explained(cause, said, evidence=EvidenceKind.FACT, proof=proof)


def retracted_hang(context: DiagnosisContext) -> Explanation | None:
    """Only an observed job can move again after its proof: one of ours is ended there."""
    retracted = context.evidence.retracted
    if not retracted:
        return None
    last = retracted[-1]
    times = "" if len(retracted) == 1 else f" ({len(retracted)} times, this was the last)"
    return explained(
        Cause.RETRACTED_HANG,
        f"proven to hang {last.at_s:.0f} s after the start ({last.kind}: {last.reason}), and it moved again after"
        f" {last.quiet_s:.0f} s{times}: that was no hang",
        evidence=EvidenceKind.FACT,
        proof=("watch.jsonl",),
    )


def unknown(context: DiagnosisContext) -> Explanation:
    seen = [failure.text for failure in context.judgement.failures]
    seen += [f"rank {root.rank} is blocked in {root.blocked_in}" for root in context.roots]
    return explained(
        Cause.UNKNOWN,
        "no rule names the cause; seen: " + ("; ".join(seen) or "nothing"),
        ranks=tuple(sorted({*ranks_of(context.judgement.failures[:1]), *(root.rank for root in context.roots)})),
        place=wait_place(context, context.roots[0]) if context.roots else None,
        evidence=EvidenceKind.NOTHING,
        proof=tuple(dict.fromkeys(path for root in context.roots for path in dump_proof(context, root)))
        if context.evidence.observed
        else ("output.log",),
        advice="Read dumps/: what each rank stands in." if context.evidence.attached else None,
    )


def orphan_process(context: DiagnosisContext) -> Explanation | None:
    outlived = f"outlived the run, {'left alone' if context.evidence.observed else 'ended by the harness'}"
    undead, left = context.evidence.undead or (), context.evidence.leftovers
    there, told = (undead, "of the run could not be ended") if undead else (left, outlived)
    if not there:
        return None
    return explained(
        Cause.ORPHAN_PROCESS,
        f"{counted(len(there), 'process', 'processes')} {told}: {shorten('; '.join(there))}",
        evidence=EvidenceKind.FACT,
        proof=("processes.jsonl",),
    )
