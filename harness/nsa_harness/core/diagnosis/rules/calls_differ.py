"""Where the collectives of the ranks part: one difference, the reason that came before it, and the cause they make.

Two ranks that differ in one call leave open which of them is wrong. What they did before decides, or else the claim
says both and is no more than likely.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations

from nsa_harness.core.collectives.alignment import Difference, DifferenceKind, Link, broke_pattern, index_of
from nsa_harness.core.collectives.call_history import diverged_before_history
from nsa_harness.core.collectives.reasons import (
    OtherModules,
    StepDifference,
    abandoned_batch,
    diverging_modules,
    first_out_of_batches,
    other_pace,
    still_given,
)
from nsa_harness.core.collectives.timeline import Event, Field, value
from nsa_harness.core.diagnosis.call_paths import turn_between, turned_off_at
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.collective_text import (
    apart,
    counts_text,
    entered_text,
    event_place,
    event_text,
    flight_proof,
    number_text,
    on_ranks,
    parted,
    reference,
    unseen,
)
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    at,
    ledger_proof,
    place_of,
    shorten,
)
from nsa_harness.core.diagnosis.explanation import Explanation, explained
from nsa_harness.core.diagnosis.progress import frames_of, own_frames
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.evidence.evidence import CaughtException, Ending, Frame, Stack, StatusFile
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Branch, Loop
from nsa_harness.core.source_code.value_origin import Origin, origin_of_arguments, origin_of_loop
from nsa_harness.core.verdict.verdict import FailureKind

_ERROR = re.compile(r"error|exception|warn|skip", re.IGNORECASE)
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"})
_COMPARED = 16  # ranks, pair by pair
_LATELY = 64  # events
_LINKS = 4  # of a cycle, that a sentence names


class Reason(StrEnum):
    """What the ranks that left their routine did just before."""

    CAUGHT = "an exception was caught"
    SKIPPED = "a batch was skipped"
    EXHAUSTED = "its batches were at their end"
    OTHER_PACE = "a step takes another number of batches"
    FEWER_GRADIENTS = "parameters had no gradient"
    NOT_REDUCED = "its gradients were not reduced"
    FEWER = "a step had fewer collectives"
    OTHER_MODULES = "other modules were entered"
    OTHER_GRADIENTS = "other modules gave gradients"
    NONE = "nothing that was seen"


@dataclass(frozen=True, kw_only=True)
class _Why:
    reason: Reason
    ranks: tuple[int, ...]  # whom it speaks of
    said: str
    place: Place | None = None
    step: int | None = None
    besides: str = ""  # behind what is said of the difference itself
    proof: tuple[str, ...] = ()  # besides the calls of those ranks


K, R = DifferenceKind, Reason
_CALLS = (K.MISSING, K.EXTRA, K.ORDER, K.COUNT)
_OF_VALUES = (K.SHAPE, K.DTYPE, K.ROOT)
_KNOWN_AT = (
    Reason.CAUGHT,
    Reason.SKIPPED,
    Reason.OTHER_MODULES,
    Reason.OTHER_GRADIENTS,
)  # what was done there made the difference, wherever it shows
# Kind and reason make the cause.
CAUSES: Mapping[tuple[DifferenceKind, Reason], Cause] = {
    **{(kind, R.CAUGHT): Cause.SWALLOWED_EXCEPTION for kind in _CALLS},
    **{(kind, R.SKIPPED): Cause.RANK_CONDITIONAL_COLLECTIVE for kind in _CALLS},
    **{(kind, R.EXHAUSTED): Cause.UNEVEN_INPUTS for kind in _CALLS},
    **{(kind, R.OTHER_PACE): Cause.NO_SYNC_MISMATCH for kind in _CALLS},
    **{(kind, R.NOT_REDUCED): Cause.NO_SYNC_MISMATCH for kind in _CALLS},
    **{(kind, R.FEWER_GRADIENTS): Cause.RANK_CONDITIONAL_UNUSED_PARAMS for kind in _CALLS},
    **{(kind, R.FEWER): Cause.RANK_CONDITIONAL_COLLECTIVE for kind in _CALLS},
    (K.MISSING, R.NONE): Cause.RANK_CONDITIONAL_COLLECTIVE,
    (K.COUNT, R.NONE): Cause.RANK_CONDITIONAL_COLLECTIVE,
    (K.EXTRA, R.NONE): Cause.RANK_CONDITIONAL_COLLECTIVE,
    (K.ORDER, R.NONE): Cause.COLLECTIVE_ORDER_MISMATCH,
    **{(K.SHAPE, reason): Cause.SHAPE_MISMATCH for reason in Reason},
    # Of other modules, other buckets or shards.
    **{(kind, R.OTHER_MODULES): Cause.RANK_CONDITIONAL_COLLECTIVE for kind in (*_CALLS, K.SHAPE)},
    **{(kind, R.OTHER_GRADIENTS): Cause.RANK_CONDITIONAL_UNUSED_PARAMS for kind in (*_CALLS, K.SHAPE)},
    **{(K.DTYPE, reason): Cause.DTYPE_MISMATCH for reason in Reason},
    **{(K.ROOT, reason): Cause.ROOT_MISMATCH for reason in Reason},
}


def calls_differ(context: DiagnosisContext) -> Explanation | None:
    found = context.difference
    if not _explains(context) or (found is not None and _left_before(context, found)):
        return None
    if found is None:
        return _out_of_batches(context)
    context = _as_they_parted(context, found)
    found = context.difference or found  # the same one, with the events of that case's own timelines
    stands = _stands(context, found)
    found, branch = _by_rank(context, found, stands)
    if branch is not None:
        stands = replace(stands, left={})  # nobody left a loop: it went where the others never go
    elif found.kind in _CALLS:
        found = _counted(found, stands)
        found = _conditional(context, found) if context.stacks_only and found.kind is K.ORDER else found
    why = next(_reasons(context, found, stands)) if branch is None else _only_if(context, found, branch)
    cause = CAUSES[found.kind, why.reason]
    known = branch is not None or not context.stacks_only
    if cause is Cause.RANK_CONDITIONAL_COLLECTIVE and found.kind is K.EXTRA and found.ranks == (0,) and known:
        cause = Cause.RANK0_ONLY_COLLECTIVE
    return _explained(context, found, why, cause, stands, sure=branch is not None and stands.compared)


def cross_group_deadlock(context: DiagnosisContext) -> Explanation | None:
    """Ranks in a ring, each in a group in which the next one has not come as far; nobody left anything out."""
    ring = context.cycle if parted(context) and context.difference is None else ()
    if not ring:
        return None
    links = [_link_text(context, link) for link in ring]
    everyone = tuple(sorted(link.rank for link in ring))
    other = tuple(link.rank for link in ring if broke_pattern(context.timelines[link.rank], link.event))
    ranks = tuple(sorted(other)) or everyone
    told = 0 < len(other) < len(everyone)
    before = next(filter(None, (_unseen_of_group(context, link.event.group, everyone) for link in ring)), ())
    first = next(link for link in ring if link.rank in ranks)
    return explained(
        Cause.CROSS_GROUP_DEADLOCK,
        f"{len(everyone)} ranks wait for each other in different groups:"
        f" {', '.join(links[:_LINKS])}{f' and {len(links) - _LINKS} more' if len(links) > _LINKS else ''}"
        f"{f'; {ranks_text(ranks)} took another order before' if told else ''}",
        ranks=ranks,
        place=_crossing(context, ranks, everyone) or event_place(context, first.rank, first.event),
        step=first.event.step,
        collective=reference(first.event),
        parties=everyone,
        evidence=EvidenceKind.REPAIRED if told and not before else EvidenceKind.PART,
        proof=flight_proof(context, everyone),
        left_open=before,
    )


def _unseen_of_group(context: DiagnosisContext, group: str, ranks: Sequence[int]) -> tuple[str, ...]:
    lost = tuple(rank for rank in ranks if group in context.timelines[rank].lost)
    boards = {rank: context.boards[rank] for rank in ranks if rank in context.boards}
    return unseen(group, lost, diverged_before_history=diverged_before_history(group, boards))


def _crossing(context: DiagnosisContext, ranks: Sequence[int], everyone: Sequence[int]) -> Place | None:
    """The line of the function in which a rank that took another order parts from one that did not."""
    others = [rank for rank in everyone if rank not in ranks]
    found = turn_between(context, ranks[0], next(iter(others), everyone[-1]))
    if found.alike and found.reached is None:
        return _other_round(context, found.alike)
    return place_of(context, ranks[0], found.reached) if others and found.in_one_function else None


def _other_round(context: DiagnosisContext, frames: Sequence[Frame]) -> Place | None:
    """The innermost loop around lines in which all ranks stand: they are in other rounds of it, for other groups."""
    loop = next(
        (one for frame in reversed(frames) for one in context.program.loops_around(frame) if one.of_items), None
    )
    return Place(file=loop.file, line=loop.line, function=loop.function) if loop else None


def _link_text(context: DiagnosisContext, link: Link) -> str:
    who = f"rank {link.waits_for}{', which never entered that group' if link.never_entered else ''}"
    return f"rank {link.rank} is blocked in {event_text(context, link.rank, link.event)} for {who}"


def _as_they_parted(context: DiagnosisContext, found: Difference) -> DiagnosisContext:
    """With each rank where its recorder says that it stood as they parted: it may have gone on from there."""
    frames = {rank: event.collective.frames for rank, event in found.entered if event.collective}
    if len(frames) < len(found.entered) or not all(frames.values()) or not context.looked:
        return context
    last = context.evidence.snapshots[-1]
    looked = [
        replace(
            one,
            stacks=(Stack(thread="MainThread", tid=None, active=False, frames=frames[one.rank], source="recorder"),),
        )
        if one.rank in frames
        else one
        for one in last.ranks
    ]
    snapshots = (*context.evidence.snapshots[:-1], replace(last, ranks=tuple(looked)))
    return replace(context, evidence=replace(context.evidence, snapshots=snapshots))


def _explains(context: DiagnosisContext) -> bool:
    """Ranks wait for each other, and for nothing else; of a run that failed no rank said why, and none was killed."""
    first = context.first_failure
    silent = first is not None and first.status is not None and (first.status > 0 or first.status == -signal.SIGTERM)
    return parted(context) or (silent and context.evidence.ending is not Ending.DEADLINE)


def _left_before(context: DiagnosisContext, found: Difference) -> bool:
    """The rank has ended with 0 in that step, which it never finished: it left no call out, it left."""
    first = context.first_failure
    if first is None or first.kind is not FailureKind.LEFT or first.rank is None or first.rank not in found.absent:
        return False
    board, step = context.boards.get(first.rank), _step(found)
    done = board.steps_s[-1][0] if board and board.steps_s else 0
    return step is not None and 0 < done < step


# The reasons, the ones that explain most first.


def _reasons(context: DiagnosisContext, found: Difference, stands: _Stands) -> Iterator[_Why]:
    for ask in (_gave_up_a_batch, _caught, _exhausted, _other_pace, _other_modules, _reduced_less):
        why = ask(context, found)
        if why is not None and (ask is not _exhausted or _may_be_exhausted(why, stands)):
            yield why
    if (why := _passed_over(context, found, stands)) is not None:
        yield why
    yield _Why(reason=R.NONE, ranks=found.ranks, said="")


def _only_if(context: DiagnosisContext, found: Difference, branch: Branch) -> _Why:
    place = branch.place
    made = tuple(rank for rank in found.everyone if rank not in found.ranks) if found.kind is K.MISSING else found.ranks
    way = f"past `{branch.text}: return`" if branch.leaves else branch.text
    besides = f"; {ranks_text(made)} {'gets' if len(made) == 1 else 'get'} there only {way}{at(place)}"
    frames = (frame for rank, _ in found.entered for frame in own_frames(context, rank))
    held = next((one for one in frames if context.program.is_later_statement(branch, one)), None)
    ways = ((rank, turn_between(context, rank, other)) for rank, other in permutations(found.everyone[:_COMPARED], 2))
    # Inside of a `with` at whose beginning another one stands.
    within = next(
        ((rank, way) for rank, way in ways if context.program.opens_block_around(way.stands, way.reached)), None
    )
    if within is not None:
        held = within[1].reached
        besides += (
            f"; rank {within[0]} is inside of a `with` that others have yet to enter{at(place_of(context, None, held))}"
        )
    place = place if held is None else Place(file=held.file, line=held.line, function=held.function)
    return _Why(reason=R.NONE, ranks=found.ranks, said="", place=place, besides=besides)


def _gave_up_a_batch(context: DiagnosisContext, _: Difference) -> _Why | None:
    """Its steps show it: it began again in one of them, and came to its end a batch before the others."""
    gave_up = abandoned_batch(context.boards)
    if gave_up is None or context.step_difference is not None:
        return None
    caught = next(
        (one for one in context.boards[gave_up.rank].caught if gave_up.step in (one.step, one.last_step)), None
    )
    jumps = next((some for other in gave_up.others if (some := _jumps_before(context, other))), [])
    handled = bool(jumps) and all(one.catches for one in jumps)
    jump = jumps[-1].place if jumps else None
    why = f"{caught.type} was raised{at(caught.place)} and caught" if caught else _printed(context, gave_up.rank)
    if handled and not caught:
        why = f"an exception was caught{at(jump)}{f', and {why}' if why else ''}"
    return _Why(
        reason=R.CAUGHT if caught or handled else R.SKIPPED,
        ranks=(gave_up.rank,),
        said=f"rank {gave_up.rank} gave up a batch in step {gave_up.step} and began again ({gave_up.marks} marks of"
        f" training there, {gave_up.usual} in its other steps){f': {why}' if why else ''}; so it came to its end while"
        f" {ranks_text(gave_up.others)} had another step to do",
        place=caught.place if caught else jump,
        step=gave_up.step,
    )


def _jumps_before(context: DiagnosisContext, rank: int) -> list[Branch]:
    """What may begin the loop anew before the line in which the rank stands."""
    jumps = (_jumps(context, frame) for frame in reversed(own_frames(context, rank)))
    return next(filter(None, jumps), [])


def _jumps(context: DiagnosisContext, frame: Frame) -> list[Branch]:
    """To the next round of the loop, or out of it, before this line of it."""
    return [one for one in context.program.branches(frame) if one.leaves and not one.ends]


def _caught(context: DiagnosisContext, found: Difference) -> _Why | None:
    """One side alone caught an exception, in the step in which it parted, and not out of that very call."""
    caught = {rank: board.caught for rank, board in context.boards.items() if rank in found.everyone}
    step = _step(found)
    for rank, own in caught.items():
        event = found.event(rank)
        others = {one.type for other, some in caught.items() if other != rank for one in some}
        new = (one for one in own if one.type not in others and not (event and one.place == event.place))
        first = next((one for one in new if step in _steps_of(one) and _turned_by(context, found, rank, one)), None)
        if first is not None:
            caught_at = first.handled or _handler(context, rank)
            return _Why(
                reason=R.CAUGHT,
                ranks=(rank,),
                said=f"rank {rank} raised {first.type}{at(first.place)} in step {first.step}, caught it{at(caught_at)}"
                " and went on",
                place=caught_at or first.place,
                step=first.step,
            )
    return None


def _turned_by(context: DiagnosisContext, found: Difference, rank: int, caught: CaughtException) -> bool:
    """It took the rank out of a forward, or what caught it leads to a call here, and so decides what is called.

    A helper that tries and goes on, as many do, decides nothing.
    """
    if caught.left_forward or caught.handled is None:
        return caught.left_forward
    events = [event for event in (found.expected, found.event(rank)) if event is not None]
    ways = [*own_frames(context, rank), *(frame for event in events for frame in event.chain)]
    handler = (caught.handled.file, (caught.handled.function or "").rpartition(".")[2])
    return any((frame.file, frame.function.rpartition(".")[2]) == handler for frame in ways)


def _steps_of(caught: CaughtException) -> tuple[int, ...]:
    """In which it may have been raised: a step that is not counted yet is the next one."""
    last = caught.step if caught.last_step is None else caught.last_step
    return (caught.step, caught.step + 1, last, last + 1)


def _passed_over(context: DiagnosisContext, found: Difference, stands: _Stands) -> _Why | None:
    """It stands behind a loop of which only an `except` leaves a round out."""
    rank = next((rank for rank in found.ranks if rank in stands.left and not stands.left[rank].exits), None)
    if rank is None or not stands.left[rank].skips:
        return None
    place = stands.left[rank].skips[0].place
    printed = _printed(context, rank)
    said = (
        f"{ranks_text(found.ranks)} left a round of the loop out{at(place)}, where an exception is caught"
        f"{f': {printed}' if printed else ''}"
    )
    return _Why(reason=R.CAUGHT, ranks=found.ranks, said=said, place=place)


def _handler(context: DiagnosisContext, rank: int) -> Place | None:
    """The nearest `except` to where the rank stands."""
    known = (one for frame in reversed(own_frames(context, rank)) for one in context.program.handlers(frame))
    return next((one.place for one in known), None)


def _printed(context: DiagnosisContext, rank: int) -> str:
    known = context.rank(rank)
    said = [line for line in known.error_lines if _ERROR.search(line)] if known else []
    return f'its stderr says "{shorten(said[-1])}"' if said else ""


def _exhausted(context: DiagnosisContext, _: Difference | None) -> _Why | None:
    finished, difference = first_out_of_batches(context.boards), context.step_difference
    if (
        finished is None
        or (difference is not None and difference.step <= finished.step)
        or not still_given(context.boards, finished)
    ):
        return None
    instead = "ended" if finished.inside is None else f"entered {finished.inside.op}{at(finished.inside.place)}"
    return _Why(
        reason=R.EXHAUSTED,
        ranks=finished.ranks,
        said=f"{ranks_text(finished.ranks)} ran out of batches after step {finished.step}"
        f" and {instead}; {ranks_text(finished.others)} went on to step"
        f" {finished.step + 1}",
        place=finished.inside.place if finished.inside else None,
        step=finished.step + 1,
        proof=("step_ledger.txt",),
    )


def _may_be_exhausted(why: _Why, stands: _Stands) -> bool:
    """They left a loop over items that others are still in; where there is no source, their batches alone tell."""
    return not stands.compared or all(rank in stands.left and stands.left[rank].of_items for rank in why.ranks)


def _out_of_batches(context: DiagnosisContext) -> Explanation | None:
    """Without a collective by which it would show."""
    why = _exhausted(context, None)
    if why is None:
        return None
    return explained(
        Cause.UNEVEN_INPUTS,
        why.said,
        ranks=why.ranks,
        place=why.place,
        step=why.step,
        evidence=EvidenceKind.PART,
        proof=tuple(path for rank in why.ranks for path in ledger_proof(context, rank)),
    )


def _other_pace(context: DiagnosisContext, _: Difference) -> _Why | None:
    """As many reductions a step on every rank, but of another number of batches."""
    pace = other_pace(context.boards)
    if pace is None:
        return None
    marks = on_ranks([(rank, str(count)) for rank, count in pace.marks])
    said = f"the ranks take another number of batches to a step: {marks} marks of training in each"
    return _Why(reason=R.OTHER_PACE, ranks=pace.ranks, said=said)


def _other_modules(context: DiagnosisContext, found: Difference) -> _Why | None:
    """Of calls that DDP or FSDP make: a branch of the model that one side took, or left out."""
    below = [event for _, event in found.entered if not event.called]
    boards = {rank: context.boards[rank] for rank in found.everyone if rank in context.boards}
    if not below or len(boards) < len(found.everyone) or any(map(_evaluates, boards.values())):
        return None
    one = diverging_modules(boards)
    if one is None:
        return None
    way = one.entered if one.besides else one.expected
    decides = context.program.guard(way.place) if way.place else None
    reduces = all(event.op in _REDUCTIONS for event in below)
    return _Why(
        reason=R.OTHER_GRADIENTS if reduces else R.OTHER_MODULES,
        ranks=one.ranks,
        said=f"in step {one.step} {_modules_text(one, found)}{f', {decides.text}' if decides else ''}",
        place=decides.place if decides else way.place,
        step=one.step,
    )


def _modules_text(one: OtherModules, found: Difference) -> str:
    who, others = ranks_text(one.ranks), ranks_text([rank for rank in found.everyone if rank not in one.ranks])
    if one.ranks == found.everyone:
        return f"the ranks diverge in their modules: {one.expected.name}{at(one.expected.place)}, {one.entered.name}"
    if one.skipped:
        return f"{who} skipped module {one.expected.name}, which {others} entered{at(one.expected.place)}"
    if one.besides:
        return f"{who} entered module {one.entered.name}{at(one.entered.place)}, which {others} skipped"
    return f"{who} entered module {one.entered.name}, and {others} {one.expected.name}{at(one.expected.place)}"


def _reduced_less(context: DiagnosisContext, found: Difference) -> _Why | None:
    """In one step a rank entered fewer of the collectives that DDP or FSDP make, and never made up for it."""
    less = context.step_difference
    if less is None:
        return _left_backward(context, found)
    ranks = apart(less)
    reduces = less.op in _REDUCTIONS and not less.called and less.alone
    fewer = bool(less.without_gradients)
    # Of what DDP or FSDP entered: where it showed is no other call's line.
    shows = (event_place(context, rank, event) for rank, event in found.entered if not (reduces and event.called))
    what = "reduced gradients" if reduces else f"entered {less.op} of group {less.group}"
    return _Why(
        reason=R.FEWER if not reduces else R.FEWER_GRADIENTS if fewer else R.NOT_REDUCED,
        ranks=ranks,
        said=f"{ranks_text(ranks)} {what} differently from the rest in step {less.step} ({less.op} of group"
        f" {less.group}: {counts_text(less.counts)}){': fewer gradients there than on the others' if fewer else ''};"
        " from there on collectives of different steps were paired",
        place=_left_out_at(context, less, ranks) or next((one for one in shows if one is not None), None),
        step=less.step,
        proof=("step_ledger.txt",),
    )


def _left_out_at(context: DiagnosisContext, less: StepDifference, ranks: Sequence[int]) -> Place | None:
    """What decides, on the way to the last such call of that step, whether there is another one."""
    events = context.timelines[ranks[0]].events if ranks and less.called else ()
    made = [one for one in events if (one.step, one.op, one.group) == (less.step, less.op, less.group)][-1:]
    known = (context.program.deciding_branch(frame, None) for one in made for frame in one.chain)
    return next((one.place for one in known if one is not None and one.varies), None)


def _left_backward(context: DiagnosisContext, found: Difference) -> _Why | None:
    """DDP reduces what every parameter has given. Whoever leaves without that left a part out, or reduced nothing."""
    left = [(rank, event) for rank, event in found.entered if event.called]
    if any(_evaluates(context.boards.get(rank)) for rank, _ in left):
        return None  # what it went through last has no backward pass
    inside = [rank for rank, event in found.entered if not event.called and _in_backward(context.boards.get(rank))]
    if not left or not inside or len(left) + len(inside) < len(found.entered):
        return None
    step = context.boards[inside[0]].step
    usual = [_usual_position(context, rank, event) for rank, event in left]
    if any(event.step != step for _, event in left) or None in usual:
        return None
    skipped_part = all((event.position or 0) < (at or 0) for (_, event), at in zip(left, usual, strict=True))
    ranks = tuple(rank for rank, _ in left)
    either = ("a part of the model was skipped there", "no_sync was on there, or nothing required a gradient")
    likely, other = either if skipped_part else either[::-1]
    return _Why(
        reason=R.FEWER_GRADIENTS if skipped_part else R.NOT_REDUCED,
        ranks=ranks,
        said=f"{ranks_text(ranks)} came out of the backward pass of step {step} and entered {left[0][1].op}"
        f"{at(left[0][1].place)}, while {ranks_text(inside)} still wait{'s' if len(inside) == 1 else ''} in it for"
        f" gradients: {likely}, or {other}",
        place=event_place(context, inside[0], dict(found.entered)[inside[0]]),
        step=step,
    )


def _evaluates(board: StatusFile | None) -> bool:
    return board is not None and board.mode is not None and not board.mode.gradients


def _in_backward(board: StatusFile | None) -> bool:
    return board is not None and board.training is not None and board.training.kind == "backward"


def _usual_position(context: DiagnosisContext, rank: int, event: Event) -> int | None:
    """How much training lay before this call in the steps before; None where the rank never made it."""
    line = context.timelines[rank].events
    same = (one.position for one in line if one.site == event.site and (one.step or 0) < (event.step or 0))
    return min((at for at in same if at is not None), default=None)


# What is said.


def _explained(
    context: DiagnosisContext, found: Difference, why: _Why, cause: Cause, stands: _Stands, *, sure: bool
) -> Explanation:
    ranks = why.ranks or found.ranks
    where = found.where or (found.or_swapped and _in_order_of_lines(context, found))
    known = not found.diverged_before_history and not found.lost
    sure = known and (sure or (where and found.who and not found.symmetric))
    return explained(
        cause,
        (
            f"{why.said}; it showed when {entered_text(context, found)}"
            if why.said
            else f"{_claim(context, found)}{why.besides}"
        ),
        ranks=ranks,
        place=(why.place if why.reason in _KNOWN_AT else None)
        or _exit(context, found, stands, ranks)
        or why.place
        or _place(context, found, ranks),
        step=why.step or _step(found),
        collective=reference(found.expected or found.entered[0][1]),
        evidence=_seen(context, found, sure=sure),
        proof=(
            *why.proof,
            *(path for rank in ranks for path in ledger_proof(context, rank)),
            *flight_proof(context, ranks),
        ),
        parties=found.everyone,
        left_open=(
            *(() if why.said or why.besides else _alternatives(found)),
            *unseen(found.group, found.lost, diverged_before_history=found.diverged_before_history),
        ),
    )


def _seen(context: DiagnosisContext, found: Difference, *, sure: bool) -> EvidenceKind:
    if sure:
        return EvidenceKind.STACKS if context.stacks_only else EvidenceKind.REPAIRED
    return EvidenceKind.OPEN if found.symmetric else EvidenceKind.PART


def _in_order_of_lines(context: DiagnosisContext, found: Difference) -> bool:
    """The ranks stand in one function, those that skipped the call further down: they do not make it afterwards."""
    others = [rank for rank in found.everyone if rank not in found.ranks]
    ways = turn_between(context, found.ranks[0], others[0]) if others else None
    if ways is None or ways.reached is None or ways.stands is None or not ways.in_one_function:
        return False
    return context.program.same_function(ways.reached, ways.stands) and ways.reached.line > ways.stands.line


def _exit(context: DiagnosisContext, found: Difference, stands: _Stands, ranks: Sequence[int]) -> Place | None:
    """Of ranks that went fewer rounds of a loop, or more: what lets them out, or the loop."""
    loop = next((stands.left[rank] for rank in ranks if rank in stands.left), None)
    left = loop is not None
    if loop is None and found.kind is K.COUNT:
        around = (
            one for frame in reversed(own_frames(context, ranks[0])) for one in context.program.loops_around(frame)
        )
        loop = next(around, None)
    if loop is None:
        return None
    # By an exception that stops it only where it would go as many rounds on every rank.
    own = origin_of_loop(context.program, Place(file=loop.file, line=loop.line), ()) if loop.stops else None
    line = next((one.line for one in (*loop.exits, *loop.skips, *(() if own else loop.stops))), None)
    others = [rank for rank in found.everyone if rank not in ranks] if left and not loop.exits else []
    made = next((one for rank in others if (one := _rounds_of(context, loop, rank))), None)
    if made is not None and line is None:
        return made.place
    return Place(file=loop.file, line=loop.line if line is None else line, function=loop.function)


def _rounds_of(context: DiagnosisContext, left: Loop, rank: int) -> Origin | None:
    """What gives the number of rounds of the loop, or of the first one within it that may go another number of them."""
    frames = own_frames(context, rank)
    for depth, frame in enumerate(frames):
        for loop in reversed(context.program.loops_around(frame)):
            if (loop.file, loop.function) != (left.file, left.function) or left.line <= loop.line <= left.last:
                line = Place(file=loop.file, line=loop.line)
                made = origin_of_loop(context.program, line, tuple(reversed(frames[:depth])))
                if made is not None:
                    return made
    return None


def _place(context: DiagnosisContext, found: Difference, ranks: Sequence[int]) -> Place | None:
    """Where the fix belongs: the branch that leads there, else the line at which the ways of the ranks part."""
    if found.kind in _OF_VALUES and (made := _made_at(context, found, ranks)):
        return made
    others = [rank for rank in found.everyone if rank not in found.ranks]
    if others and ranks:
        went, stands = (ranks[0], others[0]) if found.kind is K.EXTRA else (others[0], ranks[0])
        way = _own_way(context, found, stands)
        place = turned_off_at(context, stands, way or own_frames(context, went), own=bool(way))
        if place is not None:
            return place
    if found.kind in (K.MISSING, K.COUNT) and found.expected is not None:
        rank = next((rank for rank, event in found.entered if event is found.expected), None)
        return event_place(context, rank, found.expected) if rank is not None else found.expected.place
    event = found.event(ranks[0])
    return event_place(context, ranks[0], event) if event else None


def _own_way(context: DiagnosisContext, found: Difference, rank: int) -> tuple[Frame, ...]:
    """By which the rank came to the call in its rounds before, from the outside in, if others come by another one."""
    due = found.expected
    went = next((rank for rank, event in found.entered if event is due), None)
    ways = turn_between(context, went, rank) if went is not None and found.kind is K.MISSING else None
    if due is None or ways is None or not ways.alike or ways.in_one_function:
        return ()
    chains = [one.chain for one in context.timelines[rank].events if (one.op, one.place) == (due.op, due.place)]
    if due.chain and due.chain not in chains:
        return tuple(reversed(next(filter(None, reversed(chains)), ())))
    return context.program.path_to_call(own_frames(context, rank), [one.function for one in ways.deeper])


def _made_at(context: DiagnosisContext, found: Difference, ranks: Sequence[int]) -> Place | None:
    """Where the ranks give a call unlike values: what makes them unlike, or the line that hands them to a helper."""
    event = found.event(ranks[0]) if ranks else None
    if event is None or not event.called or event.place is None:
        return None
    frames = tuple(reversed(own_frames(context, ranks[0])))
    stands = next(
        (at for at, one in enumerate(frames) if (one.file, one.line) == (event.place.file, event.place.line)), None
    )
    chain = event.chain or (() if stands is None else frames[stands:]) or (event.place,)
    made = origin_of_arguments(context.program, chain)
    if made is None or (not made.of_rank and context.program.same_function(made.place, chain[0])):
        return None
    return made.place


def _by_rank(context: DiagnosisContext, found: Difference, stands: _Stands) -> tuple[Difference, Branch | None]:
    """The condition on the rank around a call, or around a caller's line that leads to it: the others never make it.

    A call of every so many steps is made in rounds of its own. Who makes one round less has not left the loop where
    the lines that the ranks stand in lie in the same rounds of every loop.
    """
    in_the_same_loops = stands.compared and not stands.left
    if found.kind not in _CALLS or (found.kind is K.COUNT and not in_the_same_loops):
        return found, None
    for rank, event in found.entered:
        branch = _branch(context, rank, event)
        if branch is not None:
            made = tuple(other for other, one in found.entered if one.site == event.site)
            others = tuple(other for other in found.everyone if other not in made)
            # Who has left a loop may have done so at its end as well, and who is above a way out has yet to come to it.
            if branch.leaves and (stands.left or any(_short_of(context, other, branch) for other in others)):
                continue
            if 0 < len(others) < len(made):
                return replace(found, kind=K.MISSING, ranks=others, expected=event), branch
            return replace(found, kind=K.EXTRA, ranks=made, expected=None), branch
    return found, None


def _short_of(context: DiagnosisContext, rank: int, branch: Branch) -> bool:
    """It stands before that line of its function, or in what is called there: it has yet to come to it."""
    frames, board = own_frames(context, rank), context.boards.get(rank)
    if board and frames and [one.function for one in board.stepped_from[:1]] == [frames[-1].function]:
        frames += board.stepped_from[1:]  # of a rank that nobody looked at only the innermost line is known
    file = branch.file.rpartition("/")[2]
    same = (one for one in frames if one.file.rpartition("/")[2] == file and one.function == branch.function)
    return any(one.line < branch.line for one in same)


def _branch(context: DiagnosisContext, rank: int, event: Event) -> Branch | None:
    stands = context.rank(rank) if not event.done else None
    callers = [one for one in frames_of(context, stands) if not is_library(one.file)] if stands else []
    lines: list[Place | Frame] = [event.place] if event.called and event.place else []
    known = (one for line in [*lines, *callers] for one in context.program.branches(line))
    return next((one for one in known if one.of_rank), None)


def _conditional(context: DiagnosisContext, found: Difference) -> Difference:
    """The call that one side alone reached under a condition is taken for the one that the other side never makes."""
    ranks = [rank for rank, _ in found.entered][:_COMPARED]
    sides: set[tuple[object, ...]] = set()
    for one, other in permutations(ranks, 2):
        ways, event = turn_between(context, one, other), found.event(one)
        # Seen from the other one: `reached` is where this one stands.
        if event is not None and ways.reached and ways.stands and ways.in_one_function:
            around = context.program.condition_around_only(ways.reached, ways.stands)
            sides |= {event.site} if around is not None else set()
    made = tuple(rank for rank, event in found.entered if {event.site} == sides)
    return replace(found, kind=K.EXTRA, ranks=made) if made else found


@dataclass(frozen=True, kw_only=True)
class _Stands:
    """How the lines in which the ranks stand lie to each other in the function in which their ways part."""

    left: Mapping[int, Loop]  # ranks that stand behind a loop in which another one still is, and the outermost of these
    compared: bool  # the source of some pair was there to tell


def _stands(context: DiagnosisContext, found: Difference) -> _Stands:
    ranks = found.everyone[:_COMPARED]
    left: dict[int, Loop] = {}
    compared = False
    for one, other in permutations(ranks, 2):
        ways = turn_between(context, one, other)
        if ways.reached and ways.stands and ways.in_one_function:
            compared |= context.program.same_function(ways.reached, ways.stands)
            loops = context.program.loops_left(inside=ways.stands, outside=ways.reached)
            loop = loops[-1] if loops else _loop_of_calls(context, found, one, other, ways.stands)
            left |= {one: loop} if loop else {}
    return _Stands(left=left if len(left) < len(ranks) else {}, compared=compared)


def _loop_of_calls(context: DiagnosisContext, found: Difference, one: int, other: int, below: Frame) -> Loop | None:
    """The loop deeper than the line at which they part in which the other still calls what this one called until now.

    Below Python no line is known: there only a backward pass shows that it is the training that both went through.
    """
    mine, theirs = found.event(one), found.event(other)
    if mine is None or theirs is None or mine.site == theirs.site:
        return None
    if not theirs.called and not _in_backward(context.boards.get(other)):
        return None
    line = context.timelines[one].of_group(found.group)
    before = line[: index_of(line, mine)][-_LATELY:]
    if all(event.site != theirs.site for event in before):
        return None
    frames = own_frames(context, other)
    inside = frames[frames.index(below) + 1 :]
    loops = [(frame, loop) for frame in inside for loop in context.program.loops_around(frame)]
    # The last thing that it did there lies in the loop that it left, or behind those within.
    held = (
        (frame, loop) for frame, loop in loops for one in before[-1:] if any(loop.holds(made) for made in one.chain)
    )
    frame, loop = next(held, loops[0] if loops else (below, None))
    if loop is not None and _a_step_further(context, mine, theirs, loop, other):
        return None
    if loop is None or loop.exits:
        return loop
    # One that nothing lets out before its end, in which a round may have been left out.
    return replace(loop, exits=tuple(one for one in _jumps(context, frame) if one.line > loop.line and not one.catches))


def _a_step_further(context: DiagnosisContext, mine: Event, theirs: Event, loop: Loop, other: int) -> bool:
    """Each went through all of the loop in its step: it lies within one, and the other one is in a later step."""
    board = context.boards.get(other)
    if board is None or not board.stepped_from or mine.step is None or theirs.step is None:
        return False
    return theirs.step > mine.step and not any(loop.holds(one) for one in board.stepped_from)


def _counted(found: Difference, stands: _Stands) -> Difference:
    """Who stands behind a loop in which another rank still is has left it before: it went fewer rounds."""
    if not stands.left:
        return found
    event = next((event for rank, event in found.entered if rank not in stands.left), None)
    return replace(found, kind=K.COUNT, ranks=tuple(sorted(stands.left)), expected=event, who=True, where=False)


def _step(found: Difference) -> int | None:
    """In which the ranks part, as far as it is known."""
    events = [found.expected, *(event for rank, event in sorted(found.entered, key=lambda one: one[0] in found.ranks))]
    return next((event.step for event in events if event is not None and event.step is not None), None)


def _claim(context: DiagnosisContext, found: Difference) -> str:
    who, step = ranks_text(found.ranks), _step(found)
    others = [rank for rank, _ in found.entered if rank not in found.ranks]
    of_step = "" if step is None else f" in step {step}"
    expected, own = found.expected, found.event(found.ranks[0]) if found.ranks else None
    went = f", and went on to {event_text(context, found.ranks[0], own)}" if own else ""
    if found.kind is K.MISSING and expected is not None:
        skipped = event_text(context, others[0], expected)
        return f"{who} skipped {skipped}{of_step}, which {ranks_text(others)} called{went}"
    if found.kind is K.COUNT and own is not None and found.event(found.ranks[0]) is expected:
        return f"{who} called {event_text(context, found.ranks[0], own)}{of_step} once more than in its rounds before"
    if found.kind is K.COUNT:
        still = f", which called {event_text(context, others[0], expected)}" if expected is not None and others else ""
        stay = [rank for rank in found.everyone if rank not in found.ranks]
        return f"{who} left the loop before {ranks_text(stay)}{still}{of_step}{went}"
    if found.kind is K.EXTRA and own is not None:
        beside = (
            f", while {entered_text(context, found, others)}" if others else f", and {ranks_text(found.absent)} went on"
        )
        alone = "is alone" if len(found.ranks) == 1 else "are alone"
        return f"{who} {alone} in {event_text(context, found.ranks[0], own)}{of_step}{beside}"
    if found.kind is K.ORDER:
        return f"the ranks enter different collectives at the same point{of_step}: {entered_text(context, found)}"
    return _fields(context, found, of_step)


def _fields(context: DiagnosisContext, found: Difference, of_step: str) -> str:
    field = Field(found.kind.value)
    unit = {Field.SHAPE: "{} elements", Field.DTYPE: "{}", Field.ROOT: "root {}"}[field]
    said = [
        (rank, f"{unit.format(value(event, field))}{at(event_place(context, rank, event))}")
        for rank, event in found.entered
    ]
    first = found.entered[0][1]
    return f"{first.op}{number_text(first)}{of_step} has {on_ranks(said)}"


def _alternatives(found: Difference) -> tuple[str, ...]:
    """What the run leaves open of who is wrong."""
    if found.symmetric:
        return ("the run does not show which of them is wrong",)
    others = tuple(rank for rank in found.everyone if rank not in found.ranks)
    if found.who:
        return ("they call both, in another order",) if found.or_swapped else ()
    if found.kind is K.EXTRA:
        return (f"{ranks_text(others)} skipped it",)
    if found.kind is K.MISSING:
        return (f"{ranks_text(others)} called it where nobody else does",)
    return ()
