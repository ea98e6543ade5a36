"""Rules about ranks that make different collective calls.

If two ranks make different calls, either may be wrong. What they did before may show which one. If it does not, the
finding names both ranks, and its cause is at most likely.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from nsa_harness.core.collectives.alignment import Difference
from nsa_harness.core.collectives.alignment import DifferenceKind as Kind
from nsa_harness.core.collectives.call_history import diverged_before_history
from nsa_harness.core.collectives.call_patterns import broke_pattern
from nsa_harness.core.collectives.timeline import UNKNOWN_GROUP, Event, Field, field_value
from nsa_harness.core.collectives.wait_cycles import Link
from nsa_harness.core.diagnosis.call_paths import (
    RelativePositions,
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
    last_call_before_exit,
    last_known_place,
    ledger_proof,
    place_of,
    program_frames,
    rank_frames,
    ranks_by_facts,
)
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.diagnosis.rules.call_places import VALUE_CAUSES, difference_place, loop_exit, other_ranks
from nsa_harness.core.diagnosis.rules.call_reasons import Reason, out_of_batches, possible_reasons, step_of_difference
from nsa_harness.core.evidence.evidence import Ending, Frame, Stack
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import CollectiveRef, Fact, Facts, Place, Status
from nsa_harness.core.source_code.excerpt import Branch
from nsa_harness.core.verdict.verdict import FailureKind, received_other_collective
from nsa_harness.core.verdict.wait import WaitKind

_CALL_KINDS = (Kind.MISSING, Kind.EXTRA, Kind.ORDER, Kind.COUNT)


def calls_differ(context: DiagnosisContext) -> Explanation | None:
    """Explain a hang in which ranks wait for each other because they made different collective calls."""
    difference = context.difference
    if not _ranks_wait_for_each_other(context) or (
        difference is not None and _exited_before_difference(context, difference)
    ):
        return None
    if difference is None:
        return _out_of_batches(context) or _fewer_calls_before_exit(context)
    context = _with_stacks_at_divergence(context, difference)
    difference = context.difference or difference  # the same difference, computed with the new stacks
    positions = relative_positions(context, difference)
    difference, branch = _with_rank_condition(context, difference, positions)
    if branch is not None:
        # The condition explains the difference, so no rank left a loop early.
        positions = replace(positions, left_loops={})
    elif difference.kind in _CALL_KINDS:
        difference = _as_count_difference(difference, positions)
        is_order = context.stacks_only and difference.kind is Kind.ORDER
        difference = _as_extra_call(context, difference) if is_order else difference
    if branch is None:
        reason = next(possible_reasons(context, difference, positions))
    else:
        reason = _rank_condition_reason(context, difference, branch)
    # Where the source is known and shows no condition on the rank, another condition guards the call.
    is_under_rank = branch is not None or not (context.stacks_only or positions.has_source)
    cause = _cause_of(difference, reason, is_under_rank=is_under_rank)
    is_certain = branch is not None and positions.has_source
    return _explain(context, difference, reason, cause, positions, is_certain=is_certain)


def _cause_of(difference: Difference, reason: Reason, *, is_under_rank: bool) -> Cause:
    """Return the cause of a difference in calls. `is_under_rank`: a rank condition guards the call, or may guard it."""
    if difference.kind in VALUE_CAUSES and not (difference.kind is Kind.SHAPE and reason.explains_sizes):
        return VALUE_CAUSES[difference.kind]
    if reason.cause is None and difference.kind is Kind.ORDER:
        return Cause.COLLECTIVE_ORDER_MISMATCH
    cause = reason.cause or Cause.RANK_CONDITIONAL_COLLECTIVE
    is_extra_on_rank0 = difference.kind is Kind.EXTRA and difference.ranks == (0,) and is_under_rank
    is_rank0_only = cause is Cause.RANK_CONDITIONAL_COLLECTIVE and is_extra_on_rank0
    return Cause.RANK0_ONLY_COLLECTIVE if is_rank0_only else cause


def cross_group_deadlock(context: DiagnosisContext) -> Explanation | None:
    """Explain a deadlock in which ranks wait in a cycle, each in a different process group than the next."""
    links = context.cycle if _ended_by_mutual_wait(context) and context.difference is None else ()
    if not links:
        return None
    skipped_calls = [found for link in links if (found := _call_under_rank_condition(context, link))]
    if len(skipped_calls) == 1:
        difference, branch = skipped_calls[0]
        reason = _rank_condition_reason(context, difference, branch)
        cause = _cause_of(difference, reason, is_under_rank=True)
        positions = RelativePositions(left_loops={}, has_source=True)
        # Without its oldest calls, the awaited rank may have made the call before.
        is_certain = all(context.timelines[link.rank].is_complete for link in links)
        return _explain(context, difference, reason, cause, positions, is_certain=is_certain)
    everyone = tuple(sorted(link.rank for link in links))
    odd_ranks = tuple(link.rank for link in links if broke_pattern(context.timelines[link.rank], link.event))
    ranks = tuple(sorted(odd_ranks)) or everyone
    is_part = 0 < len(odd_ranks) < len(everyone)
    # A rank that no longer makes a call first may also have skipped it, unless one line makes the calls of all groups.
    is_one_line = len({link.event.place for link in links}) == 1 and links[0].event.place is not None
    waiting_rank = next((link.rank for link in links if is_part and not is_one_line and link.waits_for in ranks), None)
    open_questions = next(filter(None, (_history_questions(context, link.event.group, everyone) for link in links)), ())
    first = next(link for link in links if link.rank in ranks)
    waits: list[Facts] = [
        {
            "rank": link.rank,
            "call": call_facts(context, link.rank, link.event),
            "waits_for": link.waits_for,
            "never_entered": link.never_entered,
        }
        for link in links
    ]
    return Explanation(
        cause=Cause.CROSS_GROUP_DEADLOCK,
        evidence=EvidenceKind.REPAIRED if is_part and is_one_line and not open_questions else EvidenceKind.PART,
        facts={"waits": waits, "took_another_order": is_part, "waits_in_earlier_call": waiting_rank},
        ranks=ranks,
        place=_order_change_place(context, ranks, everyone) or event_place(context, first.rank, first.event),
        step=first.event.step,
        collective=_collective_ref(first.event),
        parties=everyone,
        proof=flight_proof(context, everyone),
        left_open=open_questions,
    )


def _call_under_rank_condition(context: DiagnosisContext, link: Link) -> tuple[Difference, Branch] | None:
    """Return a call in a cycle as an extra call, and the rank condition that guards it, or None if there is none.

    The awaited rank must have passed the condition; otherwise the result is None too.
    """
    branch = _rank_branch(context, link.rank, link.event)
    frames = program_frames(context, link.waits_for)
    inside = (
        [frame for frame in frames if (frame.file, frame.function) == (branch.file, branch.function)] if branch else []
    )
    awaited = context.timelines[link.waits_for].events
    has_called = any(event.site == link.event.site for event in awaited)
    if branch is None or has_called or not any(_is_behind(context, branch, frame) for frame in inside):
        return None
    entered = {link.rank: link.event, **({link.waits_for: awaited[-1]} if awaited else {})}
    difference = Difference(
        kind=Kind.EXTRA,
        group=link.event.group,
        ranks=(link.rank,),
        expected=None,
        entered_events=tuple(sorted(entered.items())),
        absent=() if awaited else (link.waits_for,),
        place_is_certain=True,
        culprit_is_certain=False,
        is_new_event=True,
    )
    return difference, branch


def _is_behind(context: DiagnosisContext, branch: Branch, frame: Frame) -> bool:
    """Return whether the line of `frame` comes after the whole body of the condition `branch`."""
    is_inside = any(other.line == branch.line for other in context.program.branches(frame) if not other.leaves_block)
    return frame.line > branch.line and not is_inside


def _order_change_place(context: DiagnosisContext, ranks: Sequence[int], everyone: Sequence[int]) -> Place | None:
    """Return the line at which the order of one rank's calls starts to differ from the others', or None if unknown."""
    others = [rank for rank in everyone if rank not in ranks]
    paths = diverging_frames(context, ranks[0], next(iter(others), everyone[-1]))
    if paths.shared and paths.path_frame is None:
        loop = next((loop for loop in loops_around_any(context, paths.shared) if loop.iterates_items), None)
        return Place(file=loop.file, line=loop.line, function=loop.function) if loop else None
    return place_of(context, ranks[0], paths.path_frame) if others and paths.in_one_function else None


def _history_questions(context: DiagnosisContext, group: str, ranks: Sequence[int]) -> tuple[OpenQuestion, ...]:
    """Return an open question if the ranks could have diverged before the first recorded call in `group`."""
    incomplete_ranks = tuple(rank for rank in ranks if group in context.timelines[rank].groups_with_gaps)
    status_files = {rank: context.status_files[rank] for rank in ranks if rank in context.status_files}
    return _history_question(group, incomplete_ranks, diverged_before=diverged_before_history(group, status_files))


def _history_question(
    group: str, incomplete_ranks: Sequence[int], *, diverged_before: bool
) -> tuple[OpenQuestion, ...]:
    """Return an open question if the ranks could have diverged before the first recorded call in `group`."""
    if diverged_before:
        return (OpenQuestion(code="diverged_before_history", facts={"group": group or "0"}),)
    if incomplete_ranks:
        return (
            OpenQuestion(
                code="recorder_lacks_numbers", facts={"group": group or "0", "ranks": tuple(incomplete_ranks)}
            ),
        )
    return ()


def _with_stacks_at_divergence(context: DiagnosisContext, difference: Difference) -> DiagnosisContext:
    """Return the context with the stacks recorded at the differing calls, or unchanged if one of them is unknown."""
    frames = {
        rank: (event.collective.frames if event.collective else ()) or event.chain
        for rank, event in difference.entered_events
    }
    if context.stacks_only or not all(frames.values()) or not context.last_snapshot:
        return context
    last_snapshot = context.evidence.snapshots[-1]
    stacks = {
        rank: (Stack(thread="MainThread", tid=None, active=False, frames=recorded_frames, source="recorder"),)
        for rank, recorded_frames in frames.items()
    }
    ranks = tuple(replace(rank, stacks=stacks.get(rank.rank, rank.stacks)) for rank in last_snapshot.ranks)
    snapshots = (*context.evidence.snapshots[:-1], replace(last_snapshot, ranks=ranks))
    return replace(context, evidence=replace(context.evidence, snapshots=snapshots))


def _ranks_wait_for_each_other(context: DiagnosisContext) -> bool:
    """Return whether the run ended with ranks waiting for each other."""
    first = context.first_failure
    ended_silently = (
        first is not None and first.status is not None and (first.status > 0 or first.status == -signal.SIGTERM)
    )
    return _ended_by_mutual_wait(context) or (ended_silently and context.evidence.ending is not Ending.DEADLINE)


def _ended_by_mutual_wait(context: DiagnosisContext) -> bool:
    """Return whether the run hangs in collectives and no rank failed on its own."""
    first = context.first_failure
    if context.evidence.ending is Ending.DEADLINE:
        return False
    if first is not None:
        return first.is_collateral or first.kind is FailureKind.LEFT
    roots = {root.kind for root in context.roots}
    return context.judgement.status is Status.HANG and bool(roots) and roots <= {WaitKind.COLLECTIVE, WaitKind.GONE}


def _exited_before_difference(context: DiagnosisContext, difference: Difference) -> bool:
    """Return whether a rank exited with code 0 in an earlier step, which means that it skipped no call."""
    first = context.first_failure
    if first is None or first.kind is not FailureKind.LEFT or first.rank is None or first.rank not in difference.absent:
        return False
    status_file, step = context.status_files.get(first.rank), step_of_difference(difference)
    steps_done = status_file.steps_s[-1][0] if status_file and status_file.steps_s else 0
    return step is not None and 0 < steps_done < step


def _rank_condition_reason(context: DiagnosisContext, difference: Difference, branch: Branch) -> Reason:
    """Return the reason for a call that only some ranks make because `branch` depends on the rank number."""
    callers = difference.ranks if difference.kind is Kind.EXTRA else other_ranks(difference)
    program = context.program
    frames = (frame for rank, _ in difference.entered_events for frame in program_frames(context, rank))
    deciding_frame = next((frame for frame in frames if program.is_later_statement(branch, frame)), None)
    # Search for two ranks of which one is inside a `with` statement and the other is still entering it.
    inside_with: Facts | None = None
    for rank, _, paths in diverging_pairs(context, difference.all_ranks):
        if program.opens_block_around(paths.stack_frame, paths.path_frame):
            deciding_frame = paths.path_frame
            inside_with = {"rank": rank, "line": place_of(context, None, deciding_frame)}
            break
    place = (
        Place(file=deciding_frame.file, line=deciding_frame.line, function=deciding_frame.function)
        if deciding_frame
        else branch.place
    )
    condition: Facts = {"text": branch.text, "leaves": branch.leaves_block, "line": branch.place, "ranks": callers}
    facts: Facts = {"condition": condition, "inside_with": inside_with}
    return Reason(ranks=difference.ranks, facts=facts, place=place)


def _out_of_batches(context: DiagnosisContext) -> Explanation | None:
    """Explain a hang in which some ranks ran out of batches before the others."""
    reason = out_of_batches(context)
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


def _fewer_calls_before_exit(context: DiagnosisContext) -> Explanation | None:
    """Explain a failure in which a rank left a loop, and exited, after fewer calls than the others made in the loop."""
    first = context.first_failure
    if first is None or first.kind is not FailureKind.LEFT or first.rank is None:
        return None
    late = next((difference for difference in context.differences if first.rank in difference.absent), None)
    expected = late.expected if late else None
    left_at = last_call_before_exit(context, first.rank) or last_known_place(context, first.rank)
    own_events = context.timelines[first.rank].events if first.rank in context.timelines else ()
    if late is None or expected is None or left_at is None or all(event.site != expected.site for event in own_events):
        return None
    loops = [loop for frame in expected.chain for loop in context.program.loops_left(inside=frame, outside=left_at)]
    if not loops:
        return None
    difference = replace(late, kind=Kind.COUNT, ranks=(first.rank,), place_is_certain=False)
    positions = RelativePositions(left_loops={first.rank: loops[-1]}, has_source=True)
    reason = Reason(ranks=(first.rank,))
    cause = _cause_of(difference, reason, is_under_rank=False)
    return _explain(context, difference, reason, cause, positions, is_certain=False)


def calls_of_two_threads(context: DiagnosisContext) -> Explanation | None:
    """Explain an abort by gloo if a thread of the rank made a collective while its main thread was in a backward pass.

    DDP and FSDP make collectives in a backward pass. The order in which two threads make theirs is left to chance, so
    the ranks match calls that do not belong together.
    """
    for rank in context.evidence.ranks:
        status_file = rank.status_file
        if status_file is None or not received_other_collective(rank):
            continue
        main = [event for event in status_file.events if event.tid == status_file.pid]
        own = [call for call in status_file.calls if call.left_s is None and call.tid not in (None, status_file.pid)]
        if own and main and main[0].kind == "backward":  # its latest event
            call = own[-1]
            return Explanation(
                cause=Cause.COLLECTIVE_ORDER_MISMATCH,
                evidence=EvidenceKind.PART,
                facts={
                    "variant": "two_threads",
                    "rank": rank.rank,
                    "own_call": {"op": call.op, "number": call.number, "group": call.group, "line": call.place},
                    "module": main[0].name,
                },
                ranks=_ranks_with_thread_calls(context, call.place),
                place=call.place,
                step=call.step,
                proof=tuple(ledger_proof(context, rank.rank)),
            )
    return None


def _ranks_with_thread_calls(context: DiagnosisContext, place: Place | None) -> tuple[int, ...]:
    """Return the ranks that made a call from this line in another thread than the main thread."""
    return tuple(
        rank
        for rank, status_file in sorted(context.status_files.items())
        if any(call.place == place and call.tid not in (None, status_file.pid) for call in status_file.calls)
    )


# The functions below build the explanation: its facts, its place and its open questions.


def _explain(
    context: DiagnosisContext,
    difference: Difference,
    reason: Reason,
    cause: Cause,
    positions: RelativePositions,
    *,
    is_certain: bool,
) -> Explanation:
    """Create the explanation for a difference in collective calls from its reason."""
    ranks = reason.ranks or difference.ranks
    is_located = difference.place_is_certain or (
        difference.may_be_swapped and _is_skipper_below_call(context, difference)
    )
    is_complete = not difference.diverged_before_history and not difference.ranks_with_gaps
    is_certain = is_complete and (
        is_certain or (is_located and difference.culprit_is_certain and not difference.is_symmetric)
    )
    entered: Facts = {"entered": _call_facts_by_rank(context, difference)}
    facts = _difference_facts(context, difference) if reason.cause is None else entered
    return Explanation(
        cause=cause,
        evidence=_evidence(context, difference, is_certain=is_certain),
        facts={**facts, **reason.facts},
        ranks=ranks,
        place=(reason.place if reason.decides_place else None)
        or loop_exit(context, difference, positions, ranks)
        or reason.place
        or difference_place(context, difference, ranks),
        step=reason.step or step_of_difference(difference),
        collective=_collective_ref(_call_at_fault(difference, ranks)),
        proof=(
            *reason.proof,
            *(path for rank in ranks for path in ledger_proof(context, rank)),
            *flight_proof(context, ranks),
        ),
        parties=difference.all_ranks,
        left_open=(
            *(() if reason.facts else _other_readings(difference)),
            *_history_question(
                difference.group, difference.ranks_with_gaps, diverged_before=difference.diverged_before_history
            ),
        ),
    )


def _call_at_fault(difference: Difference, ranks: Sequence[int]) -> Event:
    """Return the call that the ranks at fault wrongly made or skipped."""
    own_event = difference.event(ranks[0]) if ranks else None
    first_event = difference.entered_events[0][1]
    if difference.kind in (Kind.EXTRA, Kind.ORDER):
        return own_event or difference.expected or first_event
    return difference.expected or first_event


def _collective_ref(event: Event) -> CollectiveRef | None:
    return None if event.group == UNKNOWN_GROUP else CollectiveRef(group=event.group, seq=event.seq, op=event.op)


def _evidence(context: DiagnosisContext, difference: Difference, *, is_certain: bool) -> EvidenceKind:
    """Return the kind of evidence that the calls differ. `is_certain`: both the line and the ranks at fault are."""
    if is_certain:
        return EvidenceKind.STACKS if context.stacks_only else EvidenceKind.REPAIRED
    return EvidenceKind.OPEN if difference.is_symmetric else EvidenceKind.PART


def _difference_facts(context: DiagnosisContext, difference: Difference) -> Facts:
    """Return facts about a difference in collective calls for which no reason was found."""
    others = tuple(rank for rank, _ in difference.entered_events if rank not in difference.ranks)
    expected, first = difference.expected, difference.ranks[:1]
    own_event = difference.event(first[0]) if first else None
    is_ddp = expected is not None and not expected.from_python and expected.op.startswith("all_reduce")
    return {
        **({"reduces_gradients": is_ddp} if difference.kind is Kind.COUNT else {}),
        "variant": "repeated" if _is_repeated(difference) else difference.kind.value,
        "others": others,
        "remaining": other_ranks(difference),
        "absent": difference.absent,
        "own_call": call_facts(context, first[0], own_event) if own_event else None,
        "expected_call": call_facts(context, others[0], expected) if expected and others else None,
        "first_call": call_facts(context, *difference.entered_events[0]),
        "entered": _call_facts_by_rank(context, difference),
        "counts": _counts_of_call(context, difference),
        "condition": None,
        "inside_with": None,
    }


def _counts_of_call(context: DiagnosisContext, difference: Difference) -> tuple[Facts, ...]:
    """Return how often each rank made the expected call in the whole run, or nothing if calls are missing."""
    timelines = [context.timelines[rank] for rank in difference.all_ranks if rank in context.timelines]
    if difference.expected is None or not all(timeline.is_complete for timeline in timelines):
        return ()
    site = difference.expected.site
    counts = ((timeline.rank, sum(event.site == site for event in timeline.events)) for timeline in timelines)
    return ranks_by_facts((rank, {"count": count}) for rank, count in counts)


def _is_repeated(difference: Difference) -> bool:
    """Return whether the ranks at fault made one call more often than in earlier iterations."""
    own_event = difference.event(difference.ranks[0]) if difference.ranks else None
    return difference.kind is Kind.COUNT and own_event is not None and own_event is difference.expected


def _call_facts_by_rank(context: DiagnosisContext, difference: Difference) -> tuple[Facts, ...]:
    """Return facts about each differing call and its ranks, with the `value` of a differing size, dtype or root."""
    calls = ((rank, event, call_facts(context, rank, event)) for rank, event in difference.entered_events)
    if difference.kind not in VALUE_CAUSES:
        return ranks_by_facts((rank, facts) for rank, _, facts in calls)
    differs_in = Field(difference.kind.value)
    return ranks_by_facts((rank, {**facts, "value": field_value(event, differs_in)}) for rank, event, facts in calls)


def _other_readings(difference: Difference) -> tuple[OpenQuestion, ...]:
    """Return open questions if the ranks that are not blamed could be at fault instead."""
    if difference.is_symmetric:
        return (OpenQuestion(code="all_are_blamed"),)
    others: Fact = other_ranks(difference)
    if difference.culprit_is_certain:
        return (OpenQuestion(code="called_in_another_order"),) if difference.may_be_swapped else ()
    if difference.kind is Kind.EXTRA:
        return (OpenQuestion(code="others_skipped_it", facts={"ranks": others}),)
    if difference.kind is Kind.MISSING:
        return (OpenQuestion(code="only_others_call_it", facts={"ranks": others}),)
    return ()


def _is_skipper_below_call(context: DiagnosisContext, difference: Difference) -> bool:
    """Return whether the rank that skipped a call is already below the call's line in the same function."""
    others = other_ranks(difference)
    paths = diverging_frames(context, difference.ranks[0], others[0]) if others else None
    if paths is None or paths.path_frame is None or paths.stack_frame is None or not paths.in_one_function:
        return False
    is_below = paths.path_frame.line > paths.stack_frame.line
    return is_below and context.program.same_function(paths.path_frame, paths.stack_frame)


def _as_count_difference(difference: Difference, positions: RelativePositions) -> Difference:
    """Return the difference, as one in iteration counts if some ranks left a loop that others are still in."""
    if not positions.left_loops:
        # The pattern of the calls looks like the end of a loop, but the source shows that every rank is still in it.
        is_in_loop = difference.kind is Kind.COUNT and positions.has_source and not _is_repeated(difference)
        return replace(difference, kind=Kind.EXTRA) if is_in_loop else difference
    event = next((event for rank, event in difference.entered_events if rank not in positions.left_loops), None)
    ranks = tuple(sorted(positions.left_loops))
    return replace(
        difference, kind=Kind.COUNT, ranks=ranks, expected=event, culprit_is_certain=True, place_is_certain=False
    )


def _as_extra_call(context: DiagnosisContext, difference: Difference) -> Difference:
    """Return the difference, as an extra call if only one of the two differing calls depends on a condition."""
    program = context.program
    sides: set[tuple[object, ...]] = set()
    for rank, _, paths in diverging_pairs(context, [rank for rank, _ in difference.entered_events]):
        event = difference.event(rank)
        if event is not None and paths.path_frame and paths.stack_frame and paths.in_one_function:
            condition = program.condition_around_only(paths.path_frame, paths.stack_frame)
            sides |= {event.site} if condition is not None else set()
    callers = tuple(rank for rank, event in difference.entered_events if {event.site} == sides)
    return replace(difference, kind=Kind.EXTRA, ranks=callers) if callers else difference


def _with_rank_condition(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> tuple[Difference, Branch | None]:
    """Look for a condition on the rank number that explains the difference in collective calls."""
    same_loops = positions.has_source and not positions.left_loops
    if difference.kind not in _CALL_KINDS or (difference.kind is Kind.COUNT and not same_loops):
        return difference, None
    for rank, event in difference.entered_events:
        branch = _rank_branch(context, rank, event)
        if branch is not None:
            callers = tuple(other for other, call in difference.entered_events if call.site == event.site)
            others = tuple(other for other in difference.all_ranks if other not in callers)
            other_places = [call.place for other, call in difference.entered_events if other in others]
            if any(
                place and event.place and context.program.chooses_between(branch, event.place, place)
                for place in other_places
            ):
                continue  # it decides which of two calls a rank makes, not whether a rank makes one
            # A branch that leaves a loop does not count if a rank has left the loop or is still above the branch.
            if branch.leaves_block and (
                positions.left_loops or any(_is_above(context, other, branch) for other in others)
            ):
                continue
            if 0 < len(others) < len(callers):
                return replace(difference, kind=Kind.MISSING, ranks=others, expected=event), branch
            return replace(difference, kind=Kind.EXTRA, ranks=callers, expected=None), branch
    return difference, None


def _is_above(context: DiagnosisContext, rank: int, branch: Branch) -> bool:
    """Return whether the rank is still above the condition `branch` in the same function."""
    frames, status_file = program_frames(context, rank), context.status_files.get(rank)
    if (
        status_file
        and frames
        and [frame.function for frame in status_file.optimizer_chain[:1]] == [frames[-1].function]
    ):
        frames += status_file.optimizer_chain[
            1:
        ]  # a heartbeat has only the innermost line, so add the frames that lead to `optimizer.step`
    file = branch.file.rpartition("/")[2]
    inside = (frame for frame in frames if frame.file.rpartition("/")[2] == file and frame.function == branch.function)
    return any(frame.line < branch.line for frame in inside)


def _rank_branch(context: DiagnosisContext, rank: int, event: Event) -> Branch | None:
    """Return the innermost condition on the rank around a call, or its callers if it is still open, or None."""
    known_rank = context.rank(rank) if not event.is_done else None
    callers = [frame for frame in rank_frames(context, known_rank) if not is_library(frame.file)] if known_rank else []
    lines: list[Place | Frame] = [event.place] if event.from_python and event.place else []
    branches = (branch for line in [*lines, *callers] for branch in context.program.branches(line))
    return next((branch for branch in branches if branch.reads_rank), None)
