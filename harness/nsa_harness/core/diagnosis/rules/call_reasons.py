"""Reasons why ranks differ in a collective: what the ranks that broke their call pattern did shortly before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nsa_harness.core.collectives.alignment import Difference, minority
from nsa_harness.core.collectives.reasons import (
    StepDifference,
    abandoned_batch,
    diverging_modules,
    first_out_of_batches,
    other_pace,
    others_got_more_batches,
)
from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.call_paths import RelativePositions, in_backward, jumps_before
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import DiagnosisContext, event_place, own_frames, ranks_by_facts
from nsa_harness.core.evidence.evidence import CaughtException, ModuleCall, StatusFile
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.source_code.excerpt import Branch

_ERROR = re.compile(r"error|exception|warn|skip", re.IGNORECASE)
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"})


@dataclass(frozen=True, kw_only=True)
class Reason:
    """What some ranks did before the difference, and the cause that follows from it."""

    cause: Cause | None = None  # None: no reason is known
    ranks: tuple[int, ...]
    facts: Facts = field(default_factory=dict)
    place: Place | None = None
    decides_place: bool = False  # report `place` even if the ranks differ at another line
    explains_sizes: bool = False  # different modules have different buckets or shards, and so other sizes
    step: int | None = None
    proof: tuple[str, ...] = ()  # in addition to the calls of these ranks


def possible_reasons(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> Iterator[Reason]:
    """Yield the reasons that the run shows, the strongest first. The last item means that no reason is known."""
    finders: tuple[Callable[[], Reason | None], ...] = (
        lambda: _dropped_batch(context),
        lambda: _caught_exception(context, difference),
        lambda: exhausted(context, positions),
        lambda: _batches_per_step(context),
        lambda: _other_modules(context, difference),
        lambda: _fewer_collectives(context, difference),
        lambda: _skipped_iteration(context, difference, positions),
    )
    yield from (reason for find in finders if (reason := find()) is not None)
    yield Reason(ranks=difference.ranks)


def _dropped_batch(context: DiagnosisContext) -> Reason | None:
    """A rank dropped the batch of a step and started another, so it reached the end one batch before the others."""
    dropped = abandoned_batch(context.boards)
    if dropped is None or context.step_difference is not None:
        return None
    caught = next(
        (
            exception
            for exception in context.boards[dropped.rank].caught_exceptions
            if dropped.step in (exception.step, exception.last_step)
        ),
        None,
    )
    jumps = next((found_jumps for other in dropped.others if (found_jumps := _innermost_jumps(context, other))), [])
    handled = bool(jumps) and all(jump.catches for jump in jumps)
    jump = jumps[-1].place if jumps else None
    return Reason(
        cause=Cause.SWALLOWED_EXCEPTION if caught or handled else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=(dropped.rank,),
        facts={
            "variant": "dropped_batch",
            "others": dropped.others,
            "events": dropped.marks,
            "usual_events": dropped.usual,
            "exception": {"type": caught.type, "line": caught.place} if caught else None,
            "caught_at": jump if handled else None,
            "printed": "" if caught else _last_error_line(context, dropped.rank),
        },
        place=caught.place if caught else jump,
        decides_place=True,
        step=dropped.step,
    )


def _innermost_jumps(context: DiagnosisContext, rank: int) -> list[Branch]:
    """Return the branches that may start the next iteration of the innermost loop before the rank's line."""
    jumps = (jumps_before(context, frame) for frame in reversed(own_frames(context, rank)))
    return next(filter(None, jumps), [])


def _caught_exception(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """A rank caught an exception that no other rank caught, in the step of the difference and not from that call."""
    caught = {rank: board.caught_exceptions for rank, board in context.boards.items() if rank in difference.everyone}
    step = step_of(difference)
    for rank, own in caught.items():
        event = difference.event(rank)
        others = {exception.type for other, exceptions in caught.items() if other != rank for exception in exceptions}
        new = (
            exception
            for exception in own
            if exception.type not in others and not (event and exception.place == event.place)
        )
        new = (exception for exception in new if step in _steps_of(exception))
        first = next((exception for exception in new if _decides_calls(context, difference, rank, exception)), None)
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


def _decides_calls(context: DiagnosisContext, difference: Difference, rank: int, caught: CaughtException) -> bool:
    """Return whether the exception ended a forward pass, or its handler is on the path to a differing call.

    Many helper functions catch an exception and continue. That changes no call.
    """
    if caught.left_forward or caught.caught_at is None:
        return caught.left_forward
    events = [event for event in (difference.expected, difference.event(rank)) if event is not None]
    paths = [*own_frames(context, rank), *(frame for event in events for frame in event.chain)]
    handler = (caught.caught_at.file, (caught.caught_at.function or "").rpartition(".")[2])
    return any((frame.file, frame.function.rpartition(".")[2]) == handler for frame in paths)


def _steps_of(caught: CaughtException) -> tuple[int, ...]:
    """Return the steps in which the exception may have been raised. Each number may be one too low."""
    last = caught.step if caught.last_step is None else caught.last_step
    return (caught.step, caught.step + 1, last, last + 1)


def _enclosing_handler(context: DiagnosisContext, rank: int) -> Place | None:
    """Return the innermost `except` clause around the rank's line or around a caller's line, or None."""
    frames = reversed(own_frames(context, rank))
    handlers = (handler for frame in frames for handler in context.program.handlers(frame))
    return next((handler.place for handler in handlers), None)


def _last_error_line(context: DiagnosisContext, rank: int) -> str:
    """Return the last line of the rank's stderr that looks like an error or a skipped batch, or ""."""
    evidence = context.rank(rank)
    lines = [line for line in evidence.error_lines if _ERROR.search(line)] if evidence else []
    return lines[-1] if lines else ""


def exhausted(context: DiagnosisContext, positions: RelativePositions | None = None) -> Reason | None:
    """Some ranks ran out of batches before the others. If the source is known, they also left a loop over items."""
    finished, difference = first_out_of_batches(context.boards), context.step_difference
    if (
        finished is None
        or (difference is not None and difference.step <= finished.step)
        or not others_got_more_batches(context.boards, finished)
    ):
        return None
    left = positions.left if positions and positions.compared else None
    if left is not None and not all(rank in left and left[rank].of_items for rank in finished.ranks):
        return None
    inside = finished.inside
    return Reason(
        cause=Cause.UNEVEN_INPUTS,
        ranks=finished.ranks,
        facts={
            "variant": "out_of_batches",
            "others": finished.others,
            "last_step": finished.step,
            "instead": {"op": inside.op, "line": inside.place} if inside else None,
        },
        place=inside.place if inside else None,
        step=finished.step + 1,
        proof=("step_ledger.txt",),
    )


def _batches_per_step(context: DiagnosisContext) -> Reason | None:
    """All ranks reduce gradients equally often in a step, but use different numbers of batches for it."""
    pace = other_pace(context.boards)
    if pace is None:
        return None
    events = ranks_by_facts((rank, {"events": count}) for rank, count in pace.marks)
    facts: Facts = {"variant": "batches_per_step", "events_in_step": events}
    return Reason(cause=Cause.NO_SYNC_MISMATCH, ranks=pace.ranks, facts=facts)


def _other_modules(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """DDP or FSDP made the differing calls, and some ranks ran other modules of the model than the rest."""
    below = [event for _, event in difference.entered if not event.called]
    boards = {rank: context.boards[rank] for rank in difference.everyone if rank in context.boards}
    if not below or len(boards) < len(difference.everyone) or any(map(_evaluates, boards.values())):
        return None
    modules = diverging_modules(boards)
    if modules is None:
        return None
    turning = modules.entered if modules.is_extra else modules.expected
    decides = context.program.guard(turning.place) if turning.place else None
    reduces = all(event.op in _REDUCTIONS for event in below)
    others = tuple(rank for rank in difference.everyone if rank not in modules.ranks)
    extra_or_other = "extra_module" if modules.is_extra else "other_module"
    variant = "skipped_module" if modules.skipped else extra_or_other
    return Reason(
        cause=Cause.RANK_CONDITIONAL_UNUSED_PARAMS if reduces else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=modules.ranks,
        facts={
            "variant": variant if modules.ranks != difference.everyone else "modules_differ",
            "others": others,
            "expected_module": _module_facts(modules.expected),
            "entered_module": _module_facts(modules.entered),
            "branch": decides.text if decides else "",
        },
        place=decides.place if decides else turning.place,
        decides_place=True,
        explains_sizes=True,
        step=modules.step,
    )


def _module_facts(module: ModuleCall) -> Facts:
    return {"name": module.name, "line": module.place}


def _fewer_collectives(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Some ranks entered fewer collectives than the others in one step, and did not enter them later."""
    counted = context.step_difference
    if counted is None:
        return _finished_backward_early(context, difference)
    ranks = _ranks_with_other_count(counted)
    is_reduction = counted.op in _REDUCTIONS and not counted.called and counted.alone
    fewer_gradients = bool(counted.without_gradients)
    of_reductions = Cause.RANK_CONDITIONAL_UNUSED_PARAMS if fewer_gradients else Cause.NO_SYNC_MISMATCH
    # The line of another call shows nothing about the collectives that DDP or FSDP enter.
    shows = (
        event_place(context, rank, event) for rank, event in difference.entered if not (is_reduction and event.called)
    )
    return Reason(
        cause=of_reductions if is_reduction else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=ranks,
        facts={
            "variant": "fewer_collectives",
            "is_reduction": is_reduction,
            "op": counted.op,
            "group": counted.group,
            "counts": ranks_by_facts((rank, {"count": count}) for rank, count in counted.counts),
            "fewer_gradients": fewer_gradients,
        },
        place=_skipping_branch(context, counted, ranks) or next((place for place in shows if place is not None), None),
        step=counted.step,
        proof=("step_ledger.txt",),
    )


def _ranks_with_other_count(counted: StepDifference) -> tuple[int, ...]:
    """Return the ranks whose number of collectives differs from that of the majority.

    If no number has a majority, return the ranks that entered fewer than others.
    """
    others = minority(dict(counted.counts))
    has_majority = len(others) < len(counted.counts)
    return others if has_majority else counted.behind


def _skipping_branch(context: DiagnosisContext, counted: StepDifference, ranks: Sequence[int]) -> Place | None:
    """Return the branch on the path to the last such call of the step that decides whether another call follows."""
    events = context.timelines[ranks[0]].events if ranks and counted.called else ()
    last = [
        event for event in events if (event.step, event.op, event.group) == (counted.step, counted.op, counted.group)
    ][-1:]
    branches = (context.program.deciding_branch(frame, None) for event in last for frame in event.chain)
    return next((branch.place for branch in branches if branch is not None and branch.varies), None)


def _finished_backward_early(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Some ranks finished backward while others still wait in it for gradients.

    DDP waits in backward until every parameter has a gradient. A rank that finishes earlier skipped a part of the
    model, or synchronized no gradients at all.
    """
    left = [(rank, event) for rank, event in difference.entered if event.called]
    if any(_evaluates(context.boards.get(rank)) for rank, _ in left):
        return None  # its last pass was an evaluation, which has no backward
    inside = [rank for rank, event in difference.entered if not event.called and in_backward(context.boards.get(rank))]
    if not left or not inside or len(left) + len(inside) < len(difference.entered):
        return None
    step = context.boards[inside[0]].step
    usual = [_usual_position(context, rank, event) for rank, event in left]
    if any(event.step != step for _, event in left) or None in usual:
        return None
    skipped_part = all((event.position or 0) < (at or 0) for (_, event), at in zip(left, usual, strict=True))
    _, first = left[0]
    return Reason(
        cause=Cause.RANK_CONDITIONAL_UNUSED_PARAMS if skipped_part else Cause.NO_SYNC_MISMATCH,
        ranks=tuple(rank for rank, _ in left),
        facts={
            "variant": "left_backward",
            "entered_op": first.op,
            "entered_line": first.place,
            "waiting": inside,
            "skipped_part": skipped_part,
        },
        place=event_place(context, inside[0], dict(difference.entered)[inside[0]]),
        step=step,
    )


def _evaluates(board: StatusFile | None) -> bool:
    return board is not None and board.mode is not None and not board.mode.gradients


def _usual_position(context: DiagnosisContext, rank: int, event: Event) -> int | None:
    """Return the smallest number of training events that preceded this call in an earlier step of the rank.

    Fewer events before the call of this step mean that the rank skipped a part of the model. None: the rank never made
    the call before.
    """
    earlier = (call for call in context.timelines[rank].events if (call.step or 0) < (event.step or 0))
    positions = (call.position for call in earlier if call.site == event.site)
    return min((position for position in positions if position is not None), default=None)


def _skipped_iteration(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> Reason | None:
    """A rank left a loop whose only way to skip an iteration is an `except` clause."""
    rank = next((rank for rank in difference.ranks if rank in positions.left and not positions.left[rank].exits), None)
    if rank is None or not positions.left[rank].skips:
        return None
    place = positions.left[rank].skips[0].place
    facts: Facts = {"variant": "skipped_iteration", "skipped_at": place, "printed": _last_error_line(context, rank)}
    return Reason(cause=Cause.SWALLOWED_EXCEPTION, ranks=difference.ranks, facts=facts, place=place, decides_place=True)


def step_of(difference: Difference) -> int | None:
    """Return the step in which the ranks diverge, if any event has one."""
    by_others_first = sorted(difference.entered, key=lambda entry: entry[0] in difference.ranks)
    events = [difference.expected, *(event for _, event in by_others_first)]
    return next((event.step for event in events if event is not None and event.step is not None), None)
