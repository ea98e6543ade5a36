"""Rules about ranks whose collectives differ: the first difference, the reason that came before it, and their cause.

Two ranks that differ in one call leave open which of them is wrong. What they did before may decide that. If it does
not, the finding names both and is no more than likely.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from nsa_harness.core.collectives.alignment import Difference, broke_pattern
from nsa_harness.core.collectives.alignment import DifferenceKind as Kind
from nsa_harness.core.collectives.call_history import diverged_before_history
from nsa_harness.core.collectives.timeline import UNKNOWN_GROUP, Event, Field, value
from nsa_harness.core.diagnosis.call_paths import (
    RelativePositions,
    diverging_pairs,
    loops_around_any,
    relative_positions,
    turn_between,
    turned_off_at,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    call_facts,
    event_place,
    flight_proof,
    frames_of,
    ledger_proof,
    own_frames,
    place_of,
    ranks_by_facts,
)
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.diagnosis.rules.call_reasons import Reason, exhausted, possible_reasons, step_of
from nsa_harness.core.evidence.evidence import Ending, Frame, Stack
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import CollectiveRef, Fact, Facts, Place, Status
from nsa_harness.core.source_code.excerpt import Branch, Loop
from nsa_harness.core.source_code.value_origin import Origin, origin_of_arguments, origin_of_loop
from nsa_harness.core.verdict.verdict import FailureKind
from nsa_harness.core.verdict.wait import WaitKind

_CALLS = (Kind.MISSING, Kind.EXTRA, Kind.ORDER, Kind.COUNT)
_OF_VALUES = {Kind.SHAPE: Cause.SHAPE_MISMATCH, Kind.DTYPE: Cause.DTYPE_MISMATCH, Kind.ROOT: Cause.ROOT_MISMATCH}


def calls_differ(context: DiagnosisContext) -> Explanation | None:
    """Ranks that wait for each other made different calls, or different numbers of them."""
    difference = context.difference
    if not _ranks_wait_for_each_other(context) or (difference is not None and _left_before(context, difference)):
        return None
    if difference is None:
        return _out_of_batches(context)
    context = _as_they_parted(context, difference)
    difference = context.difference or difference  # the same difference, with the events of the new timelines
    positions = relative_positions(context, difference)
    difference, branch = _under_condition_on_rank(context, difference, positions)
    if branch is not None:
        positions = replace(positions, left={})  # no rank left a loop: it went where the others never go
    elif difference.kind in _CALLS:
        difference = _as_iteration_count(difference, positions)
        is_order = context.stacks_only and difference.kind is Kind.ORDER
        difference = _as_conditional_call(context, difference) if is_order else difference
    if branch is None:
        reason = next(possible_reasons(context, difference, positions))
    else:
        reason = _condition_on_rank(context, difference, branch)
    known = branch is not None or not context.stacks_only
    cause = _cause(difference, reason, known=known)
    sure = branch is not None and positions.compared
    return _explained(context, difference, reason, cause, positions, sure=sure)


def _cause(difference: Difference, reason: Reason, *, known: bool) -> Cause:
    """Return the cause that the difference and its reason make. `known`: the calls are known by more than stacks."""
    if difference.kind in _OF_VALUES and not (difference.kind is Kind.SHAPE and reason.explains_sizes):
        return _OF_VALUES[difference.kind]
    if reason.cause is None and difference.kind is Kind.ORDER:
        return Cause.COLLECTIVE_ORDER_MISMATCH
    cause = reason.cause or Cause.RANK_CONDITIONAL_COLLECTIVE
    is_extra_on_rank0 = difference.kind is Kind.EXTRA and difference.ranks == (0,) and known
    is_rank0_only = cause is Cause.RANK_CONDITIONAL_COLLECTIVE and is_extra_on_rank0
    return Cause.RANK0_ONLY_COLLECTIVE if is_rank0_only else cause


def cross_group_deadlock(context: DiagnosisContext) -> Explanation | None:
    """Ranks wait in a ring, each in a group in which the next rank is not as far. No rank skipped a call."""
    ring = context.cycle if _ended_by_mutual_wait(context) and context.difference is None else ()
    if not ring:
        return None
    everyone = tuple(sorted(link.rank for link in ring))
    other = tuple(link.rank for link in ring if broke_pattern(context.timelines[link.rank], link.event))
    ranks = tuple(sorted(other)) or everyone
    known = 0 < len(other) < len(everyone)
    unseen = next(filter(None, (_unseen_of_group(context, link.event.group, everyone) for link in ring)), ())
    first = next(link for link in ring if link.rank in ranks)
    waits: list[Facts] = [
        {
            "rank": link.rank,
            "call": call_facts(context, link.rank, link.event),
            "waits_for": link.waits_for,
            "never_entered": link.never_entered,
        }
        for link in ring
    ]
    return Explanation(
        cause=Cause.CROSS_GROUP_DEADLOCK,
        evidence=EvidenceKind.REPAIRED if known and not unseen else EvidenceKind.PART,
        facts={"waits": waits, "took_another_order": known},
        ranks=ranks,
        place=_crossing(context, ranks, everyone) or event_place(context, first.rank, first.event),
        step=first.event.step,
        collective=_reference(first.event),
        parties=everyone,
        proof=flight_proof(context, everyone),
        left_open=unseen,
    )


def _crossing(context: DiagnosisContext, ranks: Sequence[int], everyone: Sequence[int]) -> Place | None:
    """Return the line at which a rank that took another order diverges from a rank that did not.

    If all ranks are in the same lines, they are in different iterations of a loop over items: return that loop.
    """
    others = [rank for rank in everyone if rank not in ranks]
    paths = turn_between(context, ranks[0], next(iter(others), everyone[-1]))
    if paths.alike and paths.reached is None:
        loop = next((loop for loop in loops_around_any(context, paths.alike) if loop.of_items), None)
        return Place(file=loop.file, line=loop.line, function=loop.function) if loop else None
    return place_of(context, ranks[0], paths.reached) if others and paths.in_one_function else None


def _unseen_of_group(context: DiagnosisContext, group: str, ranks: Sequence[int]) -> tuple[OpenQuestion, ...]:
    lost = tuple(rank for rank in ranks if group in context.timelines[rank].lost)
    boards = {rank: context.boards[rank] for rank in ranks if rank in context.boards}
    return _unseen(group, lost, diverged_before=diverged_before_history(group, boards))


def _unseen(group: str, lost: Sequence[int], *, diverged_before: bool) -> tuple[OpenQuestion, ...]:
    """Return why the ranks of the group may have diverged before what is seen; empty if nothing indicates that."""
    if diverged_before:
        return (OpenQuestion(code="diverged_before_history", facts={"group": group or "0"}),)
    if lost:
        return (OpenQuestion(code="recorder_lacks_numbers", facts={"group": group or "0", "ranks": tuple(lost)}),)
    return ()


def _as_they_parted(context: DiagnosisContext, difference: Difference) -> DiagnosisContext:
    """Return the context with each rank's stack of the moment of divergence, if all recorders have it.

    A rank may have moved on since then.
    """
    frames = {rank: event.collective.frames for rank, event in difference.entered if event.collective}
    if len(frames) < len(difference.entered) or not all(frames.values()) or not context.looked:
        return context
    last = context.evidence.snapshots[-1]
    stacks = {
        rank: (Stack(thread="MainThread", tid=None, active=False, frames=recorded, source="recorder"),)
        for rank, recorded in frames.items()
    }
    looked = tuple(replace(one, stacks=stacks.get(one.rank, one.stacks)) for one in last.ranks)
    snapshots = (*context.evidence.snapshots[:-1], replace(last, ranks=looked))
    return replace(context, evidence=replace(context.evidence, snapshots=snapshots))


def _ranks_wait_for_each_other(context: DiagnosisContext) -> bool:
    """Ranks wait only for each other. If the run failed, no rank gave a reason and none was killed."""
    first = context.first_failure
    silent = first is not None and first.status is not None and (first.status > 0 or first.status == -signal.SIGTERM)
    return _ended_by_mutual_wait(context) or (silent and context.evidence.ending is not Ending.DEADLINE)


def _ended_by_mutual_wait(context: DiagnosisContext) -> bool:
    """The run ended because ranks waited for each other: no rank failed on its own, and every root waits for ranks."""
    first = context.first_failure
    if context.evidence.ending is Ending.DEADLINE:
        return False
    if first is not None:
        return first.collateral or first.kind is FailureKind.LEFT
    roots = {root.kind for root in context.roots}
    return context.judgement.status is Status.HANG and bool(roots) and roots <= {WaitKind.COLLECTIVE, WaitKind.GONE}


def _left_before(context: DiagnosisContext, difference: Difference) -> bool:
    """A rank exited with 0 within the step of the difference: it skipped no call, it left."""
    first = context.first_failure
    if first is None or first.kind is not FailureKind.LEFT or first.rank is None or first.rank not in difference.absent:
        return False
    board, step = context.boards.get(first.rank), step_of(difference)
    done = board.steps_s[-1][0] if board and board.steps_s else 0
    return step is not None and 0 < done < step


def _condition_on_rank(context: DiagnosisContext, difference: Difference, branch: Branch) -> Reason:
    """Return the condition on the rank, and its later part or the `with` that decides, if the source shows one."""
    reached_by = difference.ranks if difference.kind is Kind.EXTRA else _others(difference)
    program = context.program
    frames = (frame for rank, _ in difference.entered for frame in own_frames(context, rank))
    decides = next((frame for frame in frames if program.is_later_statement(branch, frame)), None)
    # One rank is inside a `with` statement at whose beginning another rank is.
    inside_with: Facts | None = None
    for rank, _, paths in diverging_pairs(context, difference.everyone):
        if program.opens_block_around(paths.stands, paths.reached):
            decides = paths.reached
            inside_with = {"rank": rank, "line": place_of(context, None, decides)}
            break
    place = Place(file=decides.file, line=decides.line, function=decides.function) if decides else branch.place
    condition: Facts = {"text": branch.text, "leaves": branch.leaves, "line": branch.place, "ranks": reached_by}
    facts: Facts = {"condition": condition, "inside_with": inside_with}
    return Reason(ranks=difference.ranks, facts=facts, place=place)


def _out_of_batches(context: DiagnosisContext) -> Explanation | None:
    """Ranks ran out of batches, and no collective differs."""
    reason = exhausted(context)
    if reason is None:
        return None
    return Explanation(
        cause=Cause.UNEVEN_INPUTS,
        evidence=EvidenceKind.PART,
        facts={**reason.facts, "entered": ()},
        ranks=reason.ranks,
        place=reason.place,
        step=reason.step,
        proof=tuple(path for rank in reason.ranks for path in ledger_proof(context, rank)),
    )


# The finding: its facts, its place, and what it leaves open.


def _explained(
    context: DiagnosisContext,
    difference: Difference,
    reason: Reason,
    cause: Cause,
    positions: RelativePositions,
    *,
    sure: bool,
) -> Explanation:
    ranks = reason.ranks or difference.ranks
    where = difference.where or (difference.or_swapped and _in_order_of_lines(context, difference))
    known = not difference.diverged_before_history and not difference.lost
    sure = known and (sure or (where and difference.who and not difference.symmetric))
    if reason.cause is None:
        facts = _difference_facts(context, difference)
    else:
        facts = {"entered": _entered_facts(context, difference)}
    return Explanation(
        cause=cause,
        evidence=_evidence(context, difference, sure=sure),
        facts={**facts, **reason.facts},
        ranks=ranks,
        place=(reason.place if reason.decides_place else None)
        or _loop_exit(context, difference, positions, ranks)
        or reason.place
        or _place(context, difference, ranks),
        step=reason.step or step_of(difference),
        collective=_reference(difference.expected or difference.entered[0][1]),
        proof=(
            *reason.proof,
            *(path for rank in ranks for path in ledger_proof(context, rank)),
            *flight_proof(context, ranks),
        ),
        parties=difference.everyone,
        left_open=(
            *(() if reason.facts else _alternatives(difference)),
            *_unseen(difference.group, difference.lost, diverged_before=difference.diverged_before_history),
        ),
    )


def _reference(event: Event) -> CollectiveRef | None:
    """Return the collective as a report refers to it, or None if only its stack is known."""
    return None if event.group == UNKNOWN_GROUP else CollectiveRef(group=event.group, seq=event.seq, op=event.op)


def _evidence(context: DiagnosisContext, difference: Difference, *, sure: bool) -> EvidenceKind:
    if sure:
        return EvidenceKind.STACKS if context.stacks_only else EvidenceKind.REPAIRED
    return EvidenceKind.OPEN if difference.symmetric else EvidenceKind.PART


def _difference_facts(context: DiagnosisContext, difference: Difference) -> Facts:
    """Return the facts of a difference that no reason explains."""
    others = tuple(rank for rank, _ in difference.entered if rank not in difference.ranks)
    expected, first = difference.expected, difference.ranks[:1]
    own = difference.event(first[0]) if first else None
    is_repeated = difference.kind is Kind.COUNT and own is not None and own is expected
    return {
        "variant": "repeated" if is_repeated else difference.kind.value,
        "others": others,
        "remaining": _others(difference),
        "absent": difference.absent,
        "own_call": call_facts(context, first[0], own) if own else None,
        "expected_call": call_facts(context, others[0], expected) if expected and others else None,
        "first_call": call_facts(context, *difference.entered[0]),
        "entered": _entered_facts(context, difference),
        "condition": None,
        "inside_with": None,
    }


def _entered_facts(context: DiagnosisContext, difference: Difference) -> tuple[Facts, ...]:
    """Return what the ranks entered, each call once, with its value if the ranks differ in that."""
    entered = ((rank, event, call_facts(context, rank, event)) for rank, event in difference.entered)
    if difference.kind not in _OF_VALUES:
        return ranks_by_facts((rank, facts) for rank, _, facts in entered)
    differs_in = Field(difference.kind.value)
    return ranks_by_facts((rank, {**facts, "value": value(event, differs_in)}) for rank, event, facts in entered)


def _alternatives(difference: Difference) -> tuple[OpenQuestion, ...]:
    """Return what the run leaves open about which rank is wrong."""
    if difference.symmetric:
        return (OpenQuestion(code="all_are_blamed"),)
    others: Fact = _others(difference)
    if difference.who:
        return (OpenQuestion(code="called_in_another_order"),) if difference.or_swapped else ()
    if difference.kind is Kind.EXTRA:
        return (OpenQuestion(code="others_skipped_it", facts={"ranks": others}),)
    if difference.kind is Kind.MISSING:
        return (OpenQuestion(code="only_others_call_it", facts={"ranks": others}),)
    return ()


def _others(difference: Difference) -> tuple[int, ...]:
    return tuple(rank for rank in difference.everyone if rank not in difference.ranks)


def _in_order_of_lines(context: DiagnosisContext, difference: Difference) -> bool:
    """The ranks are in one function, and those that skipped the call are further down: they will not make it later."""
    others = _others(difference)
    paths = turn_between(context, difference.ranks[0], others[0]) if others else None
    if paths is None or paths.reached is None or paths.stands is None or not paths.in_one_function:
        return False
    is_below = paths.reached.line > paths.stands.line
    return is_below and context.program.same_function(paths.reached, paths.stands)


def _loop_exit(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions, ranks: Sequence[int]
) -> Place | None:
    """Return what ends the loop of which the ranks made fewer or more iterations, or the loop itself."""
    loop = next((positions.left[rank] for rank in ranks if rank in positions.left), None)
    left = loop is not None
    if loop is None and difference.kind is Kind.COUNT:
        loop = next(loops_around_any(context, own_frames(context, ranks[0])), None)
    if loop is None:
        return None
    # An exception that stops the loop counts only if the loop has as many iterations on every rank.
    own = origin_of_loop(context.program, Place(file=loop.file, line=loop.line), ()) if loop.stops else None
    line = next((jump.line for jump in (*loop.exits, *loop.skips, *(() if own else loop.stops))), None)
    others = [rank for rank in difference.everyone if rank not in ranks] if left and not loop.exits else []
    origin = next((one for rank in others if (one := _iterations_of(context, loop, rank))), None)
    if origin is not None and line is None:
        return origin.place
    return Place(file=loop.file, line=loop.line if line is None else line, function=loop.function)


def _iterations_of(context: DiagnosisContext, left: Loop, rank: int) -> Origin | None:
    """Return what determines the iterations of the loop, or of the first loop within it that may differ in them."""
    frames, program = own_frames(context, rank), context.program
    for depth, frame in enumerate(frames):
        for loop in reversed(context.program.loops_around(frame)):
            if (loop.file, loop.function) != (left.file, left.function) or left.line <= loop.line <= left.last:
                line = Place(file=loop.file, line=loop.line)
                origin = origin_of_loop(program, line, tuple(reversed(frames[:depth])))
                if origin is not None:
                    return origin
    return None


def _place(context: DiagnosisContext, difference: Difference, ranks: Sequence[int]) -> Place | None:
    """Return where the fix belongs: the branch that leads there, or else the line at which the ranks diverge."""
    if difference.kind in _OF_VALUES and (made := _origin_of_values(context, difference, ranks)):
        return made
    others = _others(difference)
    if others and ranks:
        went, stands = (ranks[0], others[0]) if difference.kind is Kind.EXTRA else (others[0], ranks[0])
        path = _usual_path(context, difference, stands)
        place = turned_off_at(context, stands, path or own_frames(context, went), own=bool(path))
        if place is not None:
            return place
    if difference.kind in (Kind.MISSING, Kind.COUNT) and difference.expected is not None:
        rank = next((rank for rank, event in difference.entered if event is difference.expected), None)
        return event_place(context, rank, difference.expected) if rank is not None else difference.expected.place
    event = difference.event(ranks[0])
    return event_place(context, ranks[0], event) if event else None


def _usual_path(context: DiagnosisContext, difference: Difference, rank: int) -> tuple[Frame, ...]:
    """Return the path by which the rank reached the call in earlier steps, if other ranks reach it by another one.

    The frames are in order from the outside in.
    """
    due = difference.expected
    went = next((rank for rank, event in difference.entered if event is due), None)
    paths = turn_between(context, went, rank) if went is not None and difference.kind is Kind.MISSING else None
    if due is None or paths is None or not paths.alike or paths.in_one_function:
        return ()
    chains = [event.chain for event in context.timelines[rank].events if (event.op, event.place) == (due.op, due.place)]
    if due.chain and due.chain not in chains:
        return tuple(reversed(next(filter(None, reversed(chains)), ())))
    return context.program.path_to_call(own_frames(context, rank), [frame.function for frame in paths.deeper])


def _origin_of_values(context: DiagnosisContext, difference: Difference, ranks: Sequence[int]) -> Place | None:
    """Return what makes the values of a call differ between ranks, or the line that passes them to a helper."""
    event = difference.event(ranks[0]) if ranks else None
    if event is None or not event.called or event.place is None:
        return None
    frames = tuple(reversed(own_frames(context, ranks[0])))
    line = (event.place.file, event.place.line)
    position = next((at for at, frame in enumerate(frames) if (frame.file, frame.line) == line), None)
    chain = event.chain or (() if position is None else frames[position:]) or (event.place,)
    made = origin_of_arguments(context.program, chain)
    if made is None or (not made.of_rank and context.program.same_function(made.place, chain[0])):
        return None
    return made.place


def _as_iteration_count(difference: Difference, positions: RelativePositions) -> Difference:
    """Return a difference in the number of iterations if some ranks have left a loop in which another rank still is."""
    if not positions.left:
        return difference
    event = next((event for rank, event in difference.entered if rank not in positions.left), None)
    ranks = tuple(sorted(positions.left))
    return replace(difference, kind=Kind.COUNT, ranks=ranks, expected=event, who=True, where=False)


def _as_conditional_call(context: DiagnosisContext, difference: Difference) -> Difference:
    """Return a difference in which a call under a condition that only one side met is the call too many."""
    program = context.program
    sides: set[tuple[object, ...]] = set()
    for rank, _, paths in diverging_pairs(context, [rank for rank, _ in difference.entered]):
        event = difference.event(rank)
        if event is not None and paths.reached and paths.stands and paths.in_one_function:
            around = program.condition_around_only(paths.reached, paths.stands)
            sides |= {event.site} if around is not None else set()
    made = tuple(rank for rank, event in difference.entered if {event.site} == sides)
    return replace(difference, kind=Kind.EXTRA, ranks=made) if made else difference


def _under_condition_on_rank(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> tuple[Difference, Branch | None]:
    """Return the condition on the rank around a call, or around a caller's line, with the ranks that never make it.

    A call of every N-th step has iterations of its own. A rank that makes one iteration less has not left the loop if
    the lines of the ranks are in the same iterations of every loop.
    """
    in_the_same_loops = positions.compared and not positions.left
    if difference.kind not in _CALLS or (difference.kind is Kind.COUNT and not in_the_same_loops):
        return difference, None
    for rank, event in difference.entered:
        branch = _branch(context, rank, event)
        if branch is not None:
            made = tuple(other for other, call in difference.entered if call.site == event.site)
            others = tuple(other for other in difference.everyone if other not in made)
            # A rank that left a loop may have left it at its end. A rank above a way out has yet to reach it.
            if branch.leaves and (positions.left or any(_has_yet_to_reach(context, other, branch) for other in others)):
                continue
            if 0 < len(others) < len(made):
                return replace(difference, kind=Kind.MISSING, ranks=others, expected=event), branch
            return replace(difference, kind=Kind.EXTRA, ranks=made, expected=None), branch
    return difference, None


def _has_yet_to_reach(context: DiagnosisContext, rank: int, branch: Branch) -> bool:
    """The rank is before that line of the function, or in a call made before it."""
    frames, board = own_frames(context, rank), context.boards.get(rank)
    if board and frames and [frame.function for frame in board.stepped_from[:1]] == [frames[-1].function]:
        frames += board.stepped_from[1:]  # without a snapshot only the innermost line is known
    file = branch.file.rpartition("/")[2]
    same = (frame for frame in frames if frame.file.rpartition("/")[2] == file and frame.function == branch.function)
    return any(frame.line < branch.line for frame in same)


def _branch(context: DiagnosisContext, rank: int, event: Event) -> Branch | None:
    known_rank = context.rank(rank) if not event.done else None
    callers = [frame for frame in frames_of(context, known_rank) if not is_library(frame.file)] if known_rank else []
    lines: list[Place | Frame] = [event.place] if event.called and event.place else []
    known = (branch for line in [*lines, *callers] for branch in context.program.branches(line))
    return next((branch for branch in known if branch.of_rank), None)
