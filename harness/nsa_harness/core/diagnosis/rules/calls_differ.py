"""Rules about ranks whose collectives differ: the first difference, the reason that came before it, and their cause.

If two ranks differ in one call, either may be wrong. What they did before may show which one. If it does not, the
finding names both and is at most likely.
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
    branch_that_skipped_call,
    diverging_frames,
    diverging_pairs,
    loops_around_any,
    relative_positions,
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
    if not _ranks_wait_for_each_other(context) or (difference is not None and _exited_within_step(context, difference)):
        return None
    if difference is None:
        return _out_of_batches(context)
    context = _with_stacks_at_divergence(context, difference)
    difference = context.difference or difference  # the same difference, with the events of these timelines
    positions = relative_positions(context, difference)
    difference, branch = _under_condition_on_rank(context, difference, positions)
    if branch is not None:
        positions = replace(positions, left={})  # the condition explains the call, so no rank left a loop
    elif difference.kind in _CALLS:
        difference = _as_iteration_count(difference, positions)
        is_order = context.stacks_only and difference.kind is Kind.ORDER
        difference = _as_conditional_call(context, difference) if is_order else difference
    if branch is None:
        reason = next(possible_reasons(context, difference, positions))
    else:
        reason = _condition_on_rank(context, difference, branch)
    by_calls = branch is not None or not context.stacks_only
    cause = _cause(difference, reason, by_calls=by_calls)
    sure = branch is not None and positions.compared
    return _explain(context, difference, reason, cause, positions, sure=sure)


def _cause(difference: Difference, reason: Reason, *, by_calls: bool) -> Cause:
    """Return the cause that follows from the difference and its reason. `by_calls`: more than stacks show the calls."""
    if difference.kind in _OF_VALUES and not (difference.kind is Kind.SHAPE and reason.explains_sizes):
        return _OF_VALUES[difference.kind]
    if reason.cause is None and difference.kind is Kind.ORDER:
        return Cause.COLLECTIVE_ORDER_MISMATCH
    cause = reason.cause or Cause.RANK_CONDITIONAL_COLLECTIVE
    is_extra_on_rank0 = difference.kind is Kind.EXTRA and difference.ranks == (0,) and by_calls
    is_rank0_only = cause is Cause.RANK_CONDITIONAL_COLLECTIVE and is_extra_on_rank0
    return Cause.RANK0_ONLY_COLLECTIVE if is_rank0_only else cause


def cross_group_deadlock(context: DiagnosisContext) -> Explanation | None:
    """Ranks wait for each other in a cycle across groups: each waits for a rank that has not reached its call yet."""
    ring = context.cycle if _ended_by_mutual_wait(context) and context.difference is None else ()
    if not ring:
        return None
    everyone = tuple(sorted(link.rank for link in ring))
    other = tuple(link.rank for link in ring if broke_pattern(context.timelines[link.rank], link.event))
    ranks = tuple(sorted(other)) or everyone
    is_part = 0 < len(other) < len(everyone)
    unseen = next(filter(None, (_unseen_history_of(context, link.event.group, everyone) for link in ring)), ())
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
        evidence=EvidenceKind.REPAIRED if is_part and not unseen else EvidenceKind.PART,
        facts={"waits": waits, "took_another_order": is_part},
        ranks=ranks,
        place=_place_of_other_order(context, ranks, everyone) or event_place(context, first.rank, first.event),
        step=first.event.step,
        collective=_reference(first.event),
        parties=everyone,
        proof=flight_proof(context, everyone),
        left_open=unseen,
    )


def _place_of_other_order(context: DiagnosisContext, ranks: Sequence[int], everyone: Sequence[int]) -> Place | None:
    """Return the line at which a rank that used another order diverges from a rank that kept the usual order.

    If all ranks are on the same lines, they are in different iterations of a loop over items: return that loop.
    """
    others = [rank for rank in everyone if rank not in ranks]
    paths = diverging_frames(context, ranks[0], next(iter(others), everyone[-1]))
    if paths.shared and paths.path_frame is None:
        loop = next((loop for loop in loops_around_any(context, paths.shared) if loop.of_items), None)
        return Place(file=loop.file, line=loop.line, function=loop.function) if loop else None
    return place_of(context, ranks[0], paths.path_frame) if others and paths.in_one_function else None


def _unseen_history_of(context: DiagnosisContext, group: str, ranks: Sequence[int]) -> tuple[OpenQuestion, ...]:
    lost = tuple(rank for rank in ranks if group in context.timelines[rank].lost)
    boards = {rank: context.boards[rank] for rank in ranks if rank in context.boards}
    return _unseen_history(group, lost, diverged_before=diverged_before_history(group, boards))


def _unseen_history(group: str, lost: Sequence[int], *, diverged_before: bool) -> tuple[OpenQuestion, ...]:
    """Return the open question whether the ranks diverged before the recorded calls, if they may have."""
    if diverged_before:
        return (OpenQuestion(code="diverged_before_history", facts={"group": group or "0"}),)
    if lost:
        return (OpenQuestion(code="recorder_lacks_numbers", facts={"group": group or "0", "ranks": tuple(lost)}),)
    return ()


def _with_stacks_at_divergence(context: DiagnosisContext, difference: Difference) -> DiagnosisContext:
    """Return the context with the stacks that the flight recorders saved at the differing calls, if all have one.

    The stacks of the last snapshot may be later than the difference.
    """
    frames = {rank: event.collective.frames for rank, event in difference.entered if event.collective}
    if len(frames) < len(difference.entered) or not all(frames.values()) or not context.last_snapshot:
        return context
    last = context.evidence.snapshots[-1]
    stacks = {
        rank: (Stack(thread="MainThread", tid=None, active=False, frames=recorded, source="recorder"),)
        for rank, recorded in frames.items()
    }
    ranks = tuple(replace(rank, stacks=stacks.get(rank.rank, rank.stacks)) for rank in last.ranks)
    snapshots = (*context.evidence.snapshots[:-1], replace(last, ranks=ranks))
    return replace(context, evidence=replace(context.evidence, snapshots=snapshots))


def _ranks_wait_for_each_other(context: DiagnosisContext) -> bool:
    """Return whether ranks wait only for each other, or the run failed without an exception, a crash or SIGKILL."""
    first = context.first_failure
    silent = first is not None and first.status is not None and (first.status > 0 or first.status == -signal.SIGTERM)
    return _ended_by_mutual_wait(context) or (silent and context.evidence.ending is not Ending.DEADLINE)


def _ended_by_mutual_wait(context: DiagnosisContext) -> bool:
    """Return whether a mutual wait ended the run: no rank failed on its own, and every root waits for ranks."""
    first = context.first_failure
    if context.evidence.ending is Ending.DEADLINE:
        return False
    if first is not None:
        return first.collateral or first.kind is FailureKind.LEFT
    roots = {root.kind for root in context.roots}
    return context.judgement.status is Status.HANG and bool(roots) and roots <= {WaitKind.COLLECTIVE, WaitKind.GONE}


def _exited_within_step(context: DiagnosisContext, difference: Difference) -> bool:
    """Return whether a rank exited with code 0 before the step of the difference: then it skipped no call."""
    first = context.first_failure
    if first is None or first.kind is not FailureKind.LEFT or first.rank is None or first.rank not in difference.absent:
        return False
    board, step = context.boards.get(first.rank), step_of(difference)
    done = board.steps_s[-1][0] if board and board.steps_s else 0
    return step is not None and 0 < done < step


def _condition_on_rank(context: DiagnosisContext, difference: Difference, branch: Branch) -> Reason:
    """Return the reason that a condition on the rank guards the call.

    Its place is the later statement of the condition or the `with` statement that decides, if the source shows one.
    """
    reached_by = difference.ranks if difference.kind is Kind.EXTRA else _others(difference)
    program = context.program
    frames = (frame for rank, _ in difference.entered for frame in own_frames(context, rank))
    decides = next((frame for frame in frames if program.is_later_statement(branch, frame)), None)
    # One rank is inside a `with` statement, and another rank is at the beginning of this statement.
    inside_with: Facts | None = None
    for rank, _, paths in diverging_pairs(context, difference.everyone):
        if program.opens_block_around(paths.stack_frame, paths.path_frame):
            decides = paths.path_frame
            inside_with = {"rank": rank, "line": place_of(context, None, decides)}
            break
    place = Place(file=decides.file, line=decides.line, function=decides.function) if decides else branch.place
    condition: Facts = {"text": branch.text, "leaves": branch.leaves, "line": branch.place, "ranks": reached_by}
    facts: Facts = {"condition": condition, "inside_with": inside_with}
    return Reason(ranks=difference.ranks, facts=facts, place=place)


def _out_of_batches(context: DiagnosisContext) -> Explanation | None:
    """Some ranks ran out of batches, and no collective differs."""
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


# The functions below build the explanation: its facts, its place, and the questions that it leaves open.


def _explain(
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
    is_complete = not difference.diverged_before_history and not difference.lost
    sure = is_complete and (sure or (where and difference.who and not difference.symmetric))
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
            *_unseen_history(difference.group, difference.lost, diverged_before=difference.diverged_before_history),
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
    """Return the facts of a difference whose reason is unknown."""
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
    """Return each entered call once, with its ranks, and with its size, dtype or root if the ranks differ there."""
    entered = ((rank, event, call_facts(context, rank, event)) for rank, event in difference.entered)
    if difference.kind not in _OF_VALUES:
        return ranks_by_facts((rank, facts) for rank, _, facts in entered)
    differs_in = Field(difference.kind.value)
    return ranks_by_facts((rank, {**facts, "value": value(event, differs_in)}) for rank, event, facts in entered)


def _alternatives(difference: Difference) -> tuple[OpenQuestion, ...]:
    """Return the open questions about which rank is wrong."""
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
    """Return whether the rank that skipped the call is already below it in the same function."""
    others = _others(difference)
    paths = diverging_frames(context, difference.ranks[0], others[0]) if others else None
    if paths is None or paths.path_frame is None or paths.stack_frame is None or not paths.in_one_function:
        return False
    is_below = paths.path_frame.line > paths.stack_frame.line
    return is_below and context.program.same_function(paths.path_frame, paths.stack_frame)


def _loop_exit(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions, ranks: Sequence[int]
) -> Place | None:
    """Return the line that ends the loop in which the ranks made fewer or more iterations, or the loop's own line."""
    loop = next((positions.left[rank] for rank in ranks if rank in positions.left), None)
    left = loop is not None
    if loop is None and difference.kind is Kind.COUNT:
        loop = next(loops_around_any(context, own_frames(context, ranks[0])), None)
    if loop is None:
        return None
    # An exception that stops the loop counts only if nothing else can give the ranks different numbers of iterations.
    own = origin_of_loop(context.program, Place(file=loop.file, line=loop.line), ()) if loop.stops else None
    line = next((jump.line for jump in (*loop.exits, *loop.skips, *(() if own else loop.stops))), None)
    others = [rank for rank in difference.everyone if rank not in ranks] if left and not loop.exits else []
    origin = next((origin for rank in others if (origin := _iterations_of(context, loop, rank))), None)
    if origin is not None and line is None:
        return origin.place
    return Place(file=loop.file, line=loop.line if line is None else line, function=loop.function)


def _iterations_of(context: DiagnosisContext, left: Loop, rank: int) -> Origin | None:
    """Return the origin of the number of iterations of `left`, or of the first loop within it that may differ there."""
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
    """Return where the fix belongs: the branch that leads to the difference, else the line where the ranks diverge."""
    if difference.kind in _OF_VALUES and (made := _origin_of_values(context, difference, ranks)):
        return made
    others = _others(difference)
    if others and ranks:
        caller, skipper = (ranks[0], others[0]) if difference.kind is Kind.EXTRA else (others[0], ranks[0])
        path = _usual_path(context, difference, skipper)
        place = branch_that_skipped_call(context, skipper, path or own_frames(context, caller), own=bool(path))
        if place is not None:
            return place
    if difference.kind in (Kind.MISSING, Kind.COUNT) and difference.expected is not None:
        rank = next((rank for rank, event in difference.entered if event is difference.expected), None)
        return event_place(context, rank, difference.expected) if rank is not None else difference.expected.place
    event = difference.event(ranks[0])
    return event_place(context, ranks[0], event) if event else None


def _usual_path(context: DiagnosisContext, difference: Difference, rank: int) -> tuple[Frame, ...]:
    """Return the path by which the rank called the missing collective before, if other ranks call it by another path.

    The frames are outermost first; the result is empty if no such path is known.
    """
    due = difference.expected
    went = next((rank for rank, event in difference.entered if event is due), None)
    paths = diverging_frames(context, went, rank) if went is not None and difference.kind is Kind.MISSING else None
    if due is None or paths is None or not paths.shared or paths.in_one_function:
        return ()
    chains = [event.chain for event in context.timelines[rank].events if (event.op, event.place) == (due.op, due.place)]
    if due.chain and due.chain not in chains:
        return tuple(reversed(next(filter(None, reversed(chains)), ())))
    return context.program.path_to_call(own_frames(context, rank), [frame.function for frame in paths.deeper])


def _origin_of_values(context: DiagnosisContext, difference: Difference, ranks: Sequence[int]) -> Place | None:
    """Return the line that makes the arguments of a call differ between ranks, or that passes them to a helper."""
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
    """Turn the difference into one of iteration counts if some ranks left a loop in which another rank still is."""
    if not positions.left:
        return difference
    event = next((event for rank, event in difference.entered if rank not in positions.left), None)
    ranks = tuple(sorted(positions.left))
    return replace(difference, kind=Kind.COUNT, ranks=ranks, expected=event, who=True, where=False)


def _as_conditional_call(context: DiagnosisContext, difference: Difference) -> Difference:
    """Turn the difference into an extra call if one side's call is under a condition that only this side met."""
    program = context.program
    sides: set[tuple[object, ...]] = set()
    for rank, _, paths in diverging_pairs(context, [rank for rank, _ in difference.entered]):
        event = difference.event(rank)
        if event is not None and paths.path_frame and paths.stack_frame and paths.in_one_function:
            around = program.condition_around_only(paths.path_frame, paths.stack_frame)
            sides |= {event.site} if around is not None else set()
    made = tuple(rank for rank, event in difference.entered if {event.site} == sides)
    return replace(difference, kind=Kind.EXTRA, ranks=made) if made else difference


def _under_condition_on_rank(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> tuple[Difference, Branch | None]:
    """Return the condition on the rank that guards a differing call or a caller's line, and the adapted difference.

    The adapted difference names the ranks on the smaller side. A call that happens only in some steps changes the
    iteration count too, so a COUNT difference is considered if no rank has left a loop.
    """
    in_the_same_loops = positions.compared and not positions.left
    if difference.kind not in _CALLS or (difference.kind is Kind.COUNT and not in_the_same_loops):
        return difference, None
    for rank, event in difference.entered:
        branch = _branch(context, rank, event)
        if branch is not None:
            made = tuple(other for other, call in difference.entered if call.site == event.site)
            others = tuple(other for other in difference.everyone if other not in made)
            # A rank past a loop may have left it normally, and a rank above the branch has not reached it yet.
            if branch.leaves and (positions.left or any(_is_above(context, other, branch) for other in others)):
                continue
            if 0 < len(others) < len(made):
                return replace(difference, kind=Kind.MISSING, ranks=others, expected=event), branch
            return replace(difference, kind=Kind.EXTRA, ranks=made, expected=None), branch
    return difference, None


def _is_above(context: DiagnosisContext, rank: int, branch: Branch) -> bool:
    """Return whether the rank, or a call in its stack, is above the branch in the branch's function."""
    frames, board = own_frames(context, rank), context.boards.get(rank)
    if board and frames and [frame.function for frame in board.optimizer_chain[:1]] == [frames[-1].function]:
        frames += board.optimizer_chain[1:]  # the heartbeat shows only the innermost line: add the callers of the step
    file = branch.file.rpartition("/")[2]
    inside = (frame for frame in frames if frame.file.rpartition("/")[2] == file and frame.function == branch.function)
    return any(frame.line < branch.line for frame in inside)


def _branch(context: DiagnosisContext, rank: int, event: Event) -> Branch | None:
    """Return the innermost branch on the rank around the call, or around the callers of a call that is still open."""
    known_rank = context.rank(rank) if not event.done else None
    callers = [frame for frame in frames_of(context, known_rank) if not is_library(frame.file)] if known_rank else []
    lines: list[Place | Frame] = [event.place] if event.called and event.place else []
    branches = (branch for line in [*lines, *callers] for branch in context.program.branches(line))
    return next((branch for branch in branches if branch.of_rank), None)
