"""Reasons why ranks make different collective calls, based on what the ranks at fault did shortly before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nsa_harness.core.collectives.alignment import Difference, DifferenceKind, minority
from nsa_harness.core.collectives.reasons import (
    StepDifference,
    abandoned_batch,
    module_difference,
    others_got_more_batches,
    pace_difference,
    ranks_out_of_batches,
)
from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.call_paths import RelativePositions, in_backward, jumps_before
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import DiagnosisContext, event_place, program_frames, ranks_by_facts
from nsa_harness.core.evidence.evidence import CaughtException, ModuleCall, StatusFile
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.source_code.excerpt import Branch, Loop

_ERROR_LINE = re.compile(r"error|exception|warn|skip", re.IGNORECASE)
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"})


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason why collective calls differ between ranks, and the cause that follows from this reason."""

    cause: Cause | None = None  # cause that follows from the reason; None: the reason is unknown
    ranks: tuple[int, ...]
    facts: Facts = field(default_factory=dict)
    place: Place | None = None
    decides_place: bool = False  # report `place` even if the ranks diverge on another line
    explains_sizes: bool = False  # the reason also explains different tensor sizes, as different modules do
    step: int | None = None
    proof: tuple[str, ...] = ()  # files that show the reason, in addition to the call lists of `ranks`


def possible_reasons(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> Iterator[Reason]:
    """Yield the possible reasons why the calls differ, the strongest first, and last the unknown reason."""
    finders: tuple[Callable[[], Reason | None], ...] = (
        lambda: _dropped_batch(context),
        lambda: _caught_exception(context, difference),
        lambda: out_of_batches(context, positions),
        lambda: _different_batch_counts(context),
        lambda: _different_modules(context, difference),
        lambda: _fewer_collectives(context, difference),
        lambda: _skipped_iteration(context, difference, positions),
    )
    yield from (reason for find in finders if (reason := find()) is not None)
    yield Reason(ranks=difference.ranks)


def _dropped_batch(context: DiagnosisContext) -> Reason | None:
    """Return a Reason if a rank dropped a batch, so that it reaches the end of its data one batch before the others."""
    batch = abandoned_batch(context.status_files)
    if batch is None or context.step_difference is not None:
        return None
    exception = next(
        (
            exception
            for exception in context.status_files[batch.rank].caught_exceptions
            if batch.step in (exception.step, exception.last_step)
        ),
        None,
    )
    jumps = next((loop_jumps for other in batch.others if (loop_jumps := _loop_jumps(context, other))), [])
    is_handled = bool(jumps) and all(jump.is_handler for jump in jumps)
    jump = jumps[-1].place if jumps else None
    return Reason(
        cause=Cause.SWALLOWED_EXCEPTION if exception or is_handled else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=(batch.rank,),
        facts={
            "variant": "dropped_batch",
            "others": batch.others,
            "events": batch.event_count,
            "usual_events": batch.usual_count,
            "steps_done": steps[-1][0] if (steps := context.status_files[batch.rank].steps_s) else None,
            "exception": {"type": exception.type, "line": exception.place} if exception else None,
            "caught_at": jump if is_handled else None,
            "printed": "" if exception else _last_error_line(context, batch.rank),
        },
        place=exception.place if exception else jump,
        decides_place=True,
        step=batch.step,
    )


def _loop_jumps(context: DiagnosisContext, rank: int) -> list[Branch]:
    """Return the branches that could make the rank leave its innermost loop or skip to the next iteration."""
    jumps = (jumps_before(context, frame) for frame in reversed(program_frames(context, rank)))
    return next(filter(None, jumps), [])


def _caught_exception(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Return a Reason if only one rank caught an exception in the differing step, not raised by the call itself."""
    exceptions_by_rank = {
        rank: status_file.caught_exceptions
        for rank, status_file in context.status_files.items()
        if rank in difference.all_ranks
    }
    step = step_of_difference(difference)
    for rank, own_exceptions in exceptions_by_rank.items():
        event = difference.event(rank)
        others = {
            exception.type
            for other, exceptions in exceptions_by_rank.items()
            if other != rank
            for exception in exceptions
        }
        candidates = (
            exception
            for exception in own_exceptions
            if exception.type not in others and not (event and exception.place == event.place)
        )
        candidates = (exception for exception in candidates if step in _possible_steps(exception))
        first = next(
            (exception for exception in candidates if _decides_calls(context, difference, rank, exception)), None
        )
        if first is not None:
            caught_at = first.caught_at or _enclosing_handler(context, rank)
            return Reason(
                cause=Cause.SWALLOWED_EXCEPTION,
                ranks=(rank,),
                facts={
                    "variant": "caught_exception",
                    "exception": {"type": first.type, "line": first.place, "step": first.step},
                    "caught_at": caught_at,
                },
                place=caught_at or first.place,
                decides_place=True,
                step=first.step,
            )
    return None


def _decides_calls(context: DiagnosisContext, difference: Difference, rank: int, exception: CaughtException) -> bool:
    """Return whether the exception ended a forward pass, or its handler's function leads to a differing call."""
    if exception.left_forward or exception.caught_at is None:
        return exception.left_forward
    events = [event for event in (difference.expected, difference.event(rank)) if event is not None]
    paths = [*program_frames(context, rank), *(frame for event in events for frame in event.chain)]
    handler = (exception.caught_at.file, (exception.caught_at.function or "").rpartition(".")[2])
    return any((frame.file, frame.function.rpartition(".")[2]) == handler for frame in paths)


def _possible_steps(exception: CaughtException) -> tuple[int, ...]:
    """Return the training steps in which the exception could have been raised."""
    last = exception.step if exception.last_step is None else exception.last_step
    return (exception.step, exception.step + 1, last, last + 1)


def _enclosing_handler(context: DiagnosisContext, rank: int) -> Place | None:
    """Return the innermost `except` clause around the rank's current line, or None if there is none."""
    frames = reversed(program_frames(context, rank))
    handlers = (handler for frame in frames for handler in context.program.handlers(frame))
    return next((handler.place for handler in handlers), None)


def _last_error_line(context: DiagnosisContext, rank: int) -> str:
    """Return the last line of the rank's stderr that looks like an error or a warning, or "" if there is none."""
    evidence = context.rank(rank)
    lines = [line for line in evidence.error_lines if _ERROR_LINE.search(line)] if evidence else []
    return lines[-1] if lines else ""


def out_of_batches(context: DiagnosisContext, positions: RelativePositions | None = None) -> Reason | None:
    """Return a Reason if some ranks ran out of batches before the others, otherwise None.

    If `positions` is given and the source code is known, these ranks must also have left a loop over items.
    """
    shortage, difference = ranks_out_of_batches(context.status_files), context.step_difference
    if (
        shortage is None
        or (difference is not None and difference.step <= shortage.step)
        or not others_got_more_batches(context.status_files, shortage)
    ):
        return None
    inner_loop = None
    if positions is not None and positions.has_source:
        left_loops = [positions.left_loops.get(rank) for rank in shortage.ranks]
        item_loops = [loop and _item_loop(context, loop, shortage.others) for loop in left_loops]
        if None in item_loops:
            return None
        # Of several loops that a rank left, the one over its batches shows where it ran out of them.
        inner_loop = next((loop for loop in item_loops if loop not in left_loops), None)
    open_call = shortage.open_call
    return Reason(
        cause=Cause.UNEVEN_INPUTS,
        ranks=shortage.ranks,
        facts={
            "variant": "out_of_batches",
            "others": shortage.others,
            "last_step": shortage.step,
            "instead": {"op": open_call.op, "line": open_call.place} if open_call else None,
        },
        place=inner_loop.place if inner_loop else open_call.place if open_call else None,
        decides_place=inner_loop is not None,
        step=shortage.step + 1,
        proof=("step_ledger.txt",),
    )


def _item_loop(context: DiagnosisContext, left_loop: Loop, others: Sequence[int]) -> Loop | None:
    """Return the loop over items that `others` are still in: `left_loop`, or one in a function called inside it."""
    if left_loop.iterates_items:
        return left_loop
    stacks = [program_frames(context, rank) for rank in others]
    below = (
        frame
        for frames in stacks
        for at, frame in enumerate(frames)
        if any(left_loop.contains(outer) for outer in frames[:at])
    )
    loops = (loop for frame in below for loop in context.program.loops_around(frame))
    return next((loop for loop in loops if loop.iterates_items), None)


def _different_batch_counts(context: DiagnosisContext) -> Reason | None:
    """Return a Reason if ranks use different numbers of batches per gradient reduction, otherwise None."""
    pace = pace_difference(context.status_files)
    if pace is None:
        return None
    events = ranks_by_facts((rank, {"events": count}) for rank, count in pace.events_per_step)
    facts: Facts = {"variant": "batches_per_step", "events_in_step": events}
    return Reason(cause=Cause.NO_SYNC_MISMATCH, ranks=pace.ranks, facts=facts)


def _different_modules(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Return a Reason for calls of DDP or FSDP if some ranks ran different modules than the rest, otherwise None."""
    automatic_events = [event for _, event in difference.entered_events if not event.from_python]
    status_files = {rank: context.status_files[rank] for rank in difference.all_ranks if rank in context.status_files}
    if (
        not automatic_events
        or len(status_files) < len(difference.all_ranks)
        or any(map(_is_evaluating, status_files.values()))
    ):
        return None
    modules = module_difference(status_files)
    if modules is None:
        return None
    diverging_call = modules.actual if modules.is_extra else modules.expected
    branch = context.program.guard(diverging_call.place) if diverging_call.place else None
    is_reduction = all(event.op in _REDUCTIONS for event in automatic_events)
    others = tuple(rank for rank in difference.all_ranks if rank not in modules.ranks)
    extra_or_other = "extra_module" if modules.is_extra else "other_module"
    variant = "skipped_module" if modules.is_skip else extra_or_other
    return Reason(
        cause=Cause.RANK_CONDITIONAL_UNUSED_PARAMS if is_reduction else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=modules.ranks,
        facts={
            "variant": variant if modules.ranks != difference.all_ranks else "modules_differ",
            "others": others,
            "expected_module": _module_facts(modules.expected),
            "entered_module": _module_facts(modules.actual),
            "branch": branch.text if branch else "",
        },
        place=branch.place if branch else diverging_call.place,
        decides_place=True,
        explains_sizes=True,
        step=modules.step,
    )


def _module_facts(module: ModuleCall) -> Facts:
    return {"name": module.name, "line": module.place}


def _fewer_collectives(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Return a Reason if ranks called different numbers of collectives in one step, otherwise None."""
    step_difference = context.step_difference
    if step_difference is None:
        return _finished_backward_early(context, difference)
    ranks = _ranks_outside_majority(step_difference)
    is_reduction = (
        step_difference.op in _REDUCTIONS and not step_difference.from_python and step_difference.is_only_difference
    )
    fewer_gradients = bool(step_difference.without_gradients)
    reduction_cause = Cause.RANK_CONDITIONAL_UNUSED_PARAMS if fewer_gradients else Cause.NO_SYNC_MISMATCH
    # If DDP or FSDP made the missing collectives, the line of another call does not show where they are missing.
    places = (
        event_place(context, rank, event)
        for rank, event in difference.entered_events
        if not (is_reduction and event.from_python)
    )
    return Reason(
        cause=reduction_cause if is_reduction else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=ranks,
        facts={
            "variant": "fewer_collectives",
            "is_reduction": is_reduction,
            "op": step_difference.op,
            "group": step_difference.group,
            "counts": ranks_by_facts((rank, {"count": count}) for rank, count in step_difference.counts),
            "fewer_gradients": fewer_gradients,
        },
        place=_skipping_branch(context, step_difference, ranks)
        or next((place for place in places if place is not None), None),
        step=step_difference.step,
        proof=("step_ledger.txt",),
    )


def _ranks_outside_majority(step_difference: StepDifference) -> tuple[int, ...]:
    """Return the ranks whose number of collectives in a step is not the majority's, or else those with fewer."""
    others = minority(dict(step_difference.counts))
    has_majority = len(others) < len(step_difference.counts)
    return others if has_majority else step_difference.behind


def _skipping_branch(context: DiagnosisContext, step_difference: StepDifference, ranks: Sequence[int]) -> Place | None:
    """Return the branch that could make a rank skip the counted call, or None if the source shows none."""
    events = context.timelines[ranks[0]].events if ranks and step_difference.from_python else ()
    last = [
        event
        for event in events
        if (event.step, event.op, event.group) == (step_difference.step, step_difference.op, step_difference.group)
    ][-1:]
    branches = (context.program.deciding_branch(frame, None) for event in last for frame in event.chain)
    return next((branch.place for branch in branches if branch is not None and branch.may_differ), None)


def _finished_backward_early(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Return a Reason if some ranks finished their backward pass while others still wait in theirs, otherwise None.

    DDP waits in backward until every parameter has a gradient. A rank that finishes earlier skipped a part of the model
    or did not synchronize gradients at all.
    """
    finished_entries = [(rank, event) for rank, event in difference.entered_events if event.from_python]
    if any(_is_evaluating(context.status_files.get(rank)) for rank, _ in finished_entries):
        return None  # an evaluation has no backward pass
    waiting_ranks = [
        rank
        for rank, event in difference.entered_events
        if not event.from_python and in_backward(context.status_files.get(rank))
    ]
    if (
        not finished_entries
        or not waiting_ranks
        or len(finished_entries) + len(waiting_ranks) < len(difference.entered_events)
    ):
        return None
    step = context.status_files[waiting_ranks[0]].step
    usual_positions = [_earliest_position(context, rank, event) for rank, event in finished_entries]
    if any(event.step != step for _, event in finished_entries) or None in usual_positions:
        return None
    skipped_part = all(
        (event.position or 0) < (at or 0) for (_, event), at in zip(finished_entries, usual_positions, strict=True)
    )
    _, first = finished_entries[0]
    return Reason(
        cause=Cause.RANK_CONDITIONAL_UNUSED_PARAMS if skipped_part else Cause.NO_SYNC_MISMATCH,
        ranks=tuple(rank for rank, _ in finished_entries),
        facts={
            "variant": "left_backward",
            "entered_op": first.op,
            "entered_line": first.place,
            "waiting": waiting_ranks,
            "skipped_part": skipped_part,
        },
        place=event_place(context, waiting_ranks[0], dict(difference.entered_events)[waiting_ranks[0]]),
        step=step,
    )


def _is_evaluating(status_file: StatusFile | None) -> bool:
    return status_file is not None and status_file.mode is not None and not status_file.mode.gradients


def _earliest_position(context: DiagnosisContext, rank: int, event: Event) -> int | None:
    """Return the minimal number of training events before a call in any earlier step, or None if unknown."""
    earlier_calls = (call for call in context.timelines[rank].events if (call.step or 0) < (event.step or 0))
    positions = (call.position for call in earlier_calls if call.site == event.site)
    return min((position for position in positions if position is not None), default=None)


def _skipped_iteration(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> Reason | None:
    """Return a Reason if an `except` clause could have made a rank skip a loop iteration, otherwise None."""
    rank = next(
        (rank for rank in difference.ranks if rank in positions.left_loops and not positions.left_loops[rank].exits),
        None,
    )
    if rank is None or not positions.left_loops[rank].skips:
        return None
    place = positions.left_loops[rank].skips[0].place
    facts: Facts = {"variant": "skipped_iteration", "skipped_at": place, "printed": _last_error_line(context, rank)}
    return Reason(cause=Cause.SWALLOWED_EXCEPTION, ranks=difference.ranks, facts=facts, place=place, decides_place=True)


def step_of_difference(difference: Difference) -> int | None:
    """Return the training step in which the ranks' calls diverge, or None if it is unknown."""
    # An additional call is in the step of its own rank; a missing one in the step of the ranks that made it.
    is_extra = difference.kind is DifferenceKind.EXTRA
    entries = sorted(difference.entered_events, key=lambda entry: (entry[0] in difference.ranks) is not is_extra)
    events = [None if is_extra else difference.expected, *(event for _, event in entries)]
    return next((event.step for event in events if event is not None and event.step is not None), None)
