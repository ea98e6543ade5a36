"""Reasons why ranks differ in a collective: what the ranks that broke their call pattern did just before."""

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
    """What some ranks did before the difference, and the cause that it makes."""

    cause: Cause | None = None  # of a difference in the calls; None: no reason is known
    ranks: tuple[int, ...]
    facts: Facts = field(default_factory=dict)
    place: Place | None = None
    decides_place: bool = False  # what was done there made the difference, wherever it showed
    explains_sizes: bool = False  # other modules have other buckets or shards
    step: int | None = None
    proof: tuple[str, ...] = ()  # in addition to the calls of these ranks


def possible_reasons(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> Iterator[Reason]:
    """Yield the reasons that the run shows, those that explain most first. The last one is that no reason is known."""
    questions: tuple[Callable[[], Reason | None], ...] = (
        lambda: _dropped_batch(context),
        lambda: _caught_exception(context, difference),
        lambda: exhausted(context, positions),
        lambda: _batches_per_step(context),
        lambda: _other_modules(context, difference),
        lambda: _fewer_collectives(context, difference),
        lambda: _skipped_iteration(context, difference, positions),
    )
    yield from (reason for ask in questions if (reason := ask()) is not None)
    yield Reason(ranks=difference.ranks)


def _dropped_batch(context: DiagnosisContext) -> Reason | None:
    """A rank began again within a step, and reached its end one batch before the others."""
    dropped = abandoned_batch(context.boards)
    if dropped is None or context.step_difference is not None:
        return None
    caught = next(
        (one for one in context.boards[dropped.rank].caught if dropped.step in (one.step, one.last_step)), None
    )
    jumps = next((some for other in dropped.others if (some := _innermost_jumps(context, other))), [])
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
            "printed": "" if caught else _printed(context, dropped.rank),
        },
        place=caught.place if caught else jump,
        decides_place=True,
        step=dropped.step,
    )


def _innermost_jumps(context: DiagnosisContext, rank: int) -> list[Branch]:
    """Return what may start the next iteration of the loop before the line in which the rank is."""
    jumps = (jumps_before(context, frame) for frame in reversed(own_frames(context, rank)))
    return next(filter(None, jumps), [])


def _caught_exception(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """One side only caught an exception, in the step of the difference, and not from the differing call itself."""
    caught = {rank: board.caught for rank, board in context.boards.items() if rank in difference.everyone}
    step = step_of(difference)
    for rank, own in caught.items():
        event = difference.event(rank)
        others = {one.type for other, some in caught.items() if other != rank for one in some}
        new = (one for one in own if one.type not in others and not (event and one.place == event.place))
        new = (one for one in new if step in _steps_of(one))
        first = next((one for one in new if _decides_calls(context, difference, rank, one)), None)
        if first is not None:
            caught_at = first.handled or _handler(context, rank)
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
    """The exception ended a forward pass, or its handler is on the path to a call of the difference.

    Many helpers catch an exception and go on. That changes no call.
    """
    if caught.left_forward or caught.handled is None:
        return caught.left_forward
    events = [event for event in (difference.expected, difference.event(rank)) if event is not None]
    paths = [*own_frames(context, rank), *(frame for event in events for frame in event.chain)]
    handler = (caught.handled.file, (caught.handled.function or "").rpartition(".")[2])
    return any((frame.file, frame.function.rpartition(".")[2]) == handler for frame in paths)


def _steps_of(caught: CaughtException) -> tuple[int, ...]:
    """Return the steps in which it may have been raised. The step that is not counted yet is the next one."""
    last = caught.step if caught.last_step is None else caught.last_step
    return (caught.step, caught.step + 1, last, last + 1)


def _handler(context: DiagnosisContext, rank: int) -> Place | None:
    """Return the nearest `except` to the line in which the rank is."""
    frames = reversed(own_frames(context, rank))
    known = (handler for frame in frames for handler in context.program.handlers(frame))
    return next((handler.place for handler in known), None)


def _printed(context: DiagnosisContext, rank: int) -> str:
    """Return the last line of the rank's stderr that looks like an error or a skipped batch."""
    known = context.rank(rank)
    lines = [line for line in known.error_lines if _ERROR.search(line)] if known else []
    return lines[-1] if lines else ""


def exhausted(context: DiagnosisContext, positions: RelativePositions | None = None) -> Reason | None:
    """Some ranks ran out of batches, and left a loop over items in which others still are, if the source shows it."""
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
    """All ranks reduce equally often in a step, but take different numbers of batches for it."""
    pace = other_pace(context.boards)
    if pace is None:
        return None
    events = ranks_by_facts((rank, {"events": count}) for rank, count in pace.marks)
    facts: Facts = {"variant": "batches_per_step", "events_in_step": events}
    return Reason(cause=Cause.NO_SYNC_MISMATCH, ranks=pace.ranks, facts=facts)


def _other_modules(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """DDP or FSDP made the calls, and one side took or skipped a branch of the model."""
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
    """In one step a rank entered fewer collectives, and never made up for it."""
    less = context.step_difference
    if less is None:
        return _left_backward(context, difference)
    ranks = _differing_ranks(less)
    reduces = less.op in _REDUCTIONS and not less.called and less.alone
    fewer = bool(less.without_gradients)
    of_reductions = Cause.RANK_CONDITIONAL_UNUSED_PARAMS if fewer else Cause.NO_SYNC_MISMATCH
    # The line of another call shows nothing about the collectives that DDP or FSDP enter.
    shows = (event_place(context, rank, event) for rank, event in difference.entered if not (reduces and event.called))
    return Reason(
        cause=of_reductions if reduces else Cause.RANK_CONDITIONAL_COLLECTIVE,
        ranks=ranks,
        facts={
            "variant": "fewer_collectives",
            "is_reduction": reduces,
            "op": less.op,
            "group": less.group,
            "counts": ranks_by_facts((rank, {"count": count}) for rank, count in less.counts),
            "fewer_gradients": fewer,
        },
        place=_skipping_branch(context, less, ranks) or next((place for place in shows if place is not None), None),
        step=less.step,
        proof=("step_ledger.txt",),
    )


def _differing_ranks(less: StepDifference) -> tuple[int, ...]:
    """Return the ranks that differ from the majority. Without a majority, those that entered fewer collectives."""
    fewer = minority(dict(less.counts))
    return fewer if len(fewer) < len(less.counts) else less.behind


def _skipping_branch(context: DiagnosisContext, less: StepDifference, ranks: Sequence[int]) -> Place | None:
    """Return what decides, on the path to the last such call of that step, whether another one follows."""
    events = context.timelines[ranks[0]].events if ranks and less.called else ()
    last = [event for event in events if (event.step, event.op, event.group) == (less.step, less.op, less.group)][-1:]
    known = (context.program.deciding_branch(frame, None) for event in last for frame in event.chain)
    return next((branch.place for branch in known if branch is not None and branch.varies), None)


def _left_backward(context: DiagnosisContext, difference: Difference) -> Reason | None:
    """Some ranks finished backward while others still wait in it for gradients.

    DDP reduces what every parameter has given. A rank that leaves earlier skipped a part of the model or all of it.
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
    """Return how many training events preceded this call in earlier steps; None if the rank never made it."""
    line = context.timelines[rank].events
    same = (call.position for call in line if call.site == event.site and (call.step or 0) < (event.step or 0))
    return min((at for at in same if at is not None), default=None)


def _skipped_iteration(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions
) -> Reason | None:
    """A rank is behind a loop of which only an `except` skips an iteration."""
    rank = next((rank for rank in difference.ranks if rank in positions.left and not positions.left[rank].exits), None)
    if rank is None or not positions.left[rank].skips:
        return None
    place = positions.left[rank].skips[0].place
    facts: Facts = {"variant": "skipped_iteration", "skipped_at": place, "printed": _printed(context, rank)}
    return Reason(cause=Cause.SWALLOWED_EXCEPTION, ranks=difference.ranks, facts=facts, place=place, decides_place=True)


def step_of(difference: Difference) -> int | None:
    """Return the step in which the ranks diverge, if any event has one."""
    by_others_first = sorted(difference.entered, key=lambda one: one[0] in difference.ranks)
    events = [difference.expected, *(event for _, event in by_others_first)]
    return next((event.step for event in events if event is not None and event.step is not None), None)
