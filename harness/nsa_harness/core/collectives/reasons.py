"""Find out why ranks made different calls, by comparing their batches, steps, modules and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness import protocol
from nsa_harness.core.collectives.alignment import minority
from nsa_harness.core.evidence.evidence import Call, ModuleCall, StatusFile, StepRow
from nsa_harness.core.evidence.steps import by_step
from nsa_harness.core.verdict.group_waits import TRANSFERS

# The identity of a call: operation, process group, file and line.
Key = tuple[str, str, str | None, int | None]
LOCAL_CALLS = frozenset({"destroy_process_group"})  # calls that do not wait for another rank
_FETCH = "fetch"  # name of the event when a batch is requested; another event follows when the batch has arrived


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """The first optimizer step in which some ranks called fewer collectives than the others, and never caught up."""

    step: int
    group: str
    op: str  # the collective with the largest difference
    from_python: bool  # the program called it; False if DDP or FSDP called it below Python
    is_only_difference: bool  # no other kind of collective of the group differs in that step
    counts: tuple[tuple[int, int], ...]  # (rank, number of times that it entered `op` in that step)
    behind: tuple[int, ...]  # the ranks that entered fewer collectives
    without_gradients: tuple[int, ...]  # the ranks of `behind` with fewer gradients than another rank


@dataclass(frozen=True, kw_only=True)
class OutOfBatches:
    """The ranks that ran out of batches while other ranks still had batches left."""

    ranks: tuple[int, ...]  # the ranks without another batch
    others: tuple[int, ...]  # the ranks that got another batch
    step: int  # the last step that `ranks` finished
    open_call: Call | None  # the call that one of `ranks` is blocked in; None if none of them is in a call


def first_step_of_difference(ledgers: Mapping[int, Sequence[StepRow]]) -> StepDifference | None:
    """Return the first step in which some ranks fell behind in collectives and never caught up, or None if there is
    none.

    Only steps that every rank has finished and recorded completely are compared, and only ranks that entered the group
    at all.
    """
    rows_of = {rank: _finished_rows(rows) for rank, rows in ledgers.items() if _finished_rows(rows)}
    common_steps = sorted(set.intersection(*(set(rows) for rows in rows_of.values()))) if len(rows_of) > 1 else []
    groups = sorted({tally.group for rows in rows_of.values() for step in common_steps for tally in rows[step].tallies})
    differences = [difference for group in groups if (difference := _difference(rows_of, common_steps, group))]
    return min(differences, key=lambda difference: (difference.step, difference.group), default=None)


def ranks_out_of_batches(status_files: Mapping[int, StatusFile]) -> OutOfBatches | None:
    """Return the ranks that ran out of batches while others still had batches left, or None if there are none."""
    last_step = {rank: status_file.steps_s[-1][0] for rank, status_file in status_files.items() if status_file.steps_s}
    step = min(last_step.values(), default=0)
    ranks = tuple(
        rank for rank in sorted(last_step) if last_step[rank] == step and _is_out_of_batches(status_files[rank])
    )
    others = tuple(
        rank for rank in sorted(last_step) if last_step[rank] > step or _trains(status_files[rank], step + 1)
    )
    if not ranks or not others:
        return None
    open_calls = (call for rank in ranks for call in status_files[rank].calls[-1:] if call.left_s is None)
    return OutOfBatches(ranks=ranks, others=others, step=step, open_call=next(open_calls, None))


def others_got_more_batches(status_files: Mapping[int, StatusFile], out_of_batches: OutOfBatches) -> bool:
    """Return whether the exhausted DataLoader yielded more batches on another rank.

    If it did not, it is not the loader of the training, but of an evaluation. True if no rank's DataLoaders are known.
    """
    exhausted = [
        loader for rank in out_of_batches.ranks for loader in status_files[rank].loaders if loader.is_exhausted
    ]
    batches_of_others = {
        (loader.number, loader.iterators, loader.chain): loader.batches
        for rank in out_of_batches.others
        for loader in status_files[rank].loaders
    }
    if not exhausted or not batches_of_others:
        return True
    return any(
        batches_of_others.get((loader.number, loader.iterators, loader.chain), 0) > loader.batches
        for loader in exhausted
    )


def last_common_call(status_files: Mapping[int, StatusFile]) -> Call | None:
    """Return the latest call that every rank has finished, as recorded by the lowest rank, or None if there is none."""
    ledgers = [_ledger(status_file) for _, status_file in sorted(status_files.items())]
    if len(ledgers) < 2:
        return None
    common_calls = []
    for key in set.intersection(*(set(ledger) for ledger in ledgers)):
        if not all(_has_all_calls(status_file, key[0]) for status_file in status_files.values()):
            continue
        count = min(sum(call.left_s is not None for call in ledger[key]) for ledger in ledgers)
        common_calls += ledgers[0][key][count - 1 : count] if count else []
    return max(common_calls, key=lambda call: (call.step, call.number), default=None)


def shared_calls_s(status_file: StatusFile) -> tuple[float, ...]:
    """Return the times at which the rank finished a collective."""
    calls = (call for calls in _ledger(status_file).values() for call in calls)
    return tuple(sorted(call.left_s for call in calls if call.left_s is not None))


def ledger_lines(status_file: StatusFile) -> Iterator[str]:
    """Yield the lines of a text table that lists a rank's calls, oldest first."""
    yield "number  step  position  entered_s     left_s  elements  call"
    for call in status_file.calls:
        left_s = "   inside" if call.left_s is None else f"{call.left_s:9.3f}"
        place = f"  {call.place.file}:{call.place.line} {call.place.function}" if call.place else ""
        yield (
            f"{call.number:6}  {call.step:4}  {call.position:8}  {call.entered_s:9.3f}  {left_s}  {call.elements:8}"
            f"  {call.op} group {call.group}{place}"
        )


def _finished_rows(rows: Sequence[StepRow]) -> dict[int, StepRow]:
    return {step: row for step, row in by_step(rows).items() if row.done_s is not None}


def _difference(rows_of: Mapping[int, dict[int, StepRow]], steps: Sequence[int], group: str) -> StepDifference | None:
    """Return the first step from which the ranks' numbers of collectives in `group` differ, or None if they agree."""
    members = [rank for rank in sorted(rows_of) if any(_entered_count(row, group) for row in rows_of[rank].values())]
    totals = dict.fromkeys(members, 0)
    since: int | None = None
    for step in steps:
        for rank in members:
            totals[rank] += _entered_count(rows_of[rank][step], group)
        totals_differ = len(set(totals.values())) > 1
        since = (since if since is not None else step) if totals_differ else None
    return _difference_in({rank: rows_of[rank][since] for rank in members}, group) if since is not None else None


def _difference_in(rows: Mapping[int, StepRow], group: str) -> StepDifference:
    """Return how the ranks differ in one step, considering only the collective whose counts differ most."""
    kinds = sorted(
        {(tally.op, tally.from_python) for row in rows.values() for tally in row.tallies if tally.group == group}
    )
    counts = {kind: {rank: _count(row, group, *kind) for rank, row in rows.items()} for kind in kinds}
    differing = [kind for kind in kinds if len(set(counts[kind].values())) > 1]
    op, from_python = max(kinds, key=lambda kind: max(counts[kind].values()) - min(counts[kind].values()))
    most = max(_entered_count(row, group) for row in rows.values())
    behind = tuple(rank for rank, row in rows.items() if _entered_count(row, group) < most)
    gradients = {rank: row.gradients for rank, row in rows.items() if row.gradients is not None}
    return StepDifference(
        step=next(iter(rows.values())).step,
        group=group,
        op=op,
        from_python=from_python,
        is_only_difference=len(differing) == 1,
        counts=tuple(counts[op, from_python].items()),
        behind=behind,
        without_gradients=tuple(r for r in behind if r in gradients and gradients[r] < max(gradients.values())),
    )


def _entered_count(row: StepRow, group: str) -> int:
    return sum(tally.count for tally in row.tallies if tally.group == group)


def _count(row: StepRow, group: str, op: str, from_python: bool) -> int:
    kind = (group, op, from_python)
    return sum(tally.count for tally in row.tallies if (tally.group, tally.op, tally.from_python) == kind)


def _is_out_of_batches(status_file: StatusFile) -> bool:
    """Return whether the rank requested another batch but received none from its DataLoader."""
    event = status_file.latest_training_event
    if event is None or event.kind != "data" or event.name != _FETCH:
        return False
    made_call = any(call.entered_s > event.at_s for call in status_file.calls)
    return made_call or status_file.exit_s is not None


def _trains(status_file: StatusFile, step: int) -> bool:
    """Return whether the rank was last seen training in `step` or later."""
    event = status_file.latest_training_event
    return event is not None and event.step >= step and event.kind in ("forward", "backward", "optimizer")


def _ledger(status_file: StatusFile) -> dict[tuple[int, Key], list[Call]]:
    """Group the collectives of a rank that wait for other ranks by step and call site, without waits and transfers."""
    ledger: dict[tuple[int, Key], list[Call]] = {}
    for call in status_file.calls:
        # The two ranks of a transfer do not make the same call.
        if call.op.startswith(protocol.WAIT) or call.op in TRANSFERS or call.op in LOCAL_CALLS:
            continue
        place = call.place
        key = (call.op, call.group, place.file if place else None, place.line if place else None)
        ledger.setdefault((call.step, key), []).append(call)
    return ledger


def _has_all_calls(status_file: StatusFile, step: int) -> bool:
    """Return whether the status file still stores every call of the step."""
    if not status_file.calls or status_file.calls[0].number == 1:
        return True
    return status_file.calls[0].step < step


_MIN_STEPS = 3  # finished steps per rank from which its usual number of events is determined
_MODEL_EVENTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class AbandonedBatch:
    """A batch that a rank dropped, which made the rank run out of batches before the others."""

    rank: int
    step: int
    event_count: int  # number of the rank's training events in that step
    usual_count: int  # number of training events in the rank's other steps
    others: tuple[int, ...]  # the ranks that still train


@dataclass(frozen=True, kw_only=True)
class PaceDifference:
    """Ranks that use more or fewer batches per step than the others."""

    ranks: tuple[int, ...]  # the ranks that use more or fewer batches than the others
    events_per_step: tuple[tuple[int, int], ...]  # (rank, number of training events in each of its steps)


def abandoned_batch(status_files: Mapping[int, StatusFile]) -> AbandonedBatch | None:
    """Return the first batch that a rank dropped before it ran out of batches early, or None if there is none."""
    usual = _usual_events(status_files)
    candidates = (
        batch for rank in _short_ranks(status_files) if usual for batch in _begun_twice(rank, status_files, usual)
    )
    return min(candidates, key=lambda batch: (batch.step, batch.rank), default=None)


def pace_difference(status_files: Mapping[int, StatusFile]) -> PaceDifference | None:
    """Return the ranks that use more or fewer batches in every step than the others, or None if there are none."""
    usual = _usual_events(status_files)
    steady = (
        all(set(status_file.events_per_step.values()) == {usual[rank]} for rank, status_file in status_files.items())
        if usual
        else False
    )
    if not steady or len(set(usual.values())) < 2 or not _short_ranks(status_files):
        return None
    return PaceDifference(ranks=minority(usual), events_per_step=tuple(sorted(usual.items())))


def _usual_events(status_files: Mapping[int, StatusFile]) -> dict[int, int]:
    """Map each rank to its usual number of training events per step, or return {} if any rank's number is unknown."""
    if len(status_files) < 2 or any(
        len(status_file.events_per_step) < _MIN_STEPS for status_file in status_files.values()
    ):
        return {}
    return {
        rank: Counter(status_file.events_per_step.values()).most_common(1)[0][0]
        for rank, status_file in status_files.items()
    }


def _short_ranks(status_files: Mapping[int, StatusFile]) -> tuple[int, ...]:
    """Return the ranks that stopped training after fewer steps than another rank."""
    last_steps = {rank: _last_begun_step(status_file) for rank, status_file in status_files.items()}
    return tuple(
        rank
        for rank, status_file in sorted(status_files.items())
        if last_steps[rank] < max(last_steps.values())
        and status_file.latest_training_event is not None
        and status_file.latest_training_event.kind not in _MODEL_EVENTS
    )


def _last_begun_step(status_file: StatusFile) -> int:
    finished_step = status_file.steps_s[-1][0] if status_file.steps_s else 0
    event = status_file.latest_training_event
    return max(finished_step, event.step) if event is not None and event.kind in _MODEL_EVENTS else finished_step


def _begun_twice(
    rank: int, status_files: Mapping[int, StatusFile], usual: Mapping[int, int]
) -> Iterator[AbandonedBatch]:
    """Yield a dropped batch for each step that `rank`, and no other rank, began twice.

    If the rank finished two complete passes in a step, the second one was an evaluation, which does not count.
    """
    others = tuple(sorted(set(status_files) - {rank}))
    for step, events in sorted(status_files[rank].events_per_step.items()):
        others_are_usual = all(status_files[other].events_per_step.get(step) == usual[other] for other in others)
        if others_are_usual and usual[rank] < events < 2 * usual[rank]:
            yield AbandonedBatch(rank=rank, step=step, event_count=events, usual_count=usual[rank], others=others)


@dataclass(frozen=True, kw_only=True)
class ModuleDifference:
    """The first module in an optimizer step at which the ranks' forward passes diverge."""

    ranks: tuple[int, ...]  # the ranks at fault
    step: int
    expected: ModuleCall  # the module that the other ranks entered
    actual: ModuleCall  # the module that `ranks` entered
    is_skip: bool  # the other ranks entered `actual` later, so `ranks` skipped `expected`
    is_extra: bool  # `ranks` entered `expected` later, so `actual` is an additional module
    culprit_is_certain: bool  # only `ranks` deviated from the modules of the previous step


def module_difference(status_files: Mapping[int, StatusFile]) -> ModuleDifference | None:
    """Return the first module at which the ranks' forward passes diverge in the current step, or None if there is none.

    All ranks must have entered the same modules in the previous step, so pipeline stages and experts are not compared.
    A rank that is only behind has not skipped anything yet. An additional pass through the model, such as an
    evaluation, does not count.
    """
    step = min((status_file.step for status_file in status_files.values()), default=0)
    lines = {
        rank: modules
        for rank, status_file in sorted(status_files.items())
        if (modules := status_file.modules_entered(step))
    }
    if len(lines) < 2 or len(lines) < len(status_files):
        return None
    at = next((at for at, calls in enumerate(zip(*lines.values(), strict=False)) if len(_names(calls)) > 1), None)
    if at is None or any(line[at].name == line[0].name for line in lines.values()):
        return None
    before = {rank: status_files[rank].modules_entered(step - 1) for rank in lines}
    if not all(before.values()) or len({_names_of(line) for line in before.values()}) > 1:
        return None
    in_order = {rank for rank, line in lines.items() if _names_of(line[: at + 1]) == _names_of(before[rank])[: at + 1]}
    out_of_order = tuple(rank for rank in lines if rank not in in_order)
    is_certain = 0 < len(out_of_order) < len(lines)
    ranks = out_of_order if is_certain else minority({rank: line[at].name for rank, line in lines.items()})
    other = next(rank for rank in lines if lines[rank][at].name != lines[ranks[0]][at].name)
    expected, actual = lines[other][at], lines[ranks[0]][at]
    return ModuleDifference(
        ranks=ranks,
        step=step,
        expected=expected,
        actual=actual,
        is_skip=actual.name in _names(lines[other][at:]),
        is_extra=expected.name in _names(lines[ranks[0]][at:]),
        culprit_is_certain=is_certain,
    )


def _names(calls: Sequence[ModuleCall]) -> set[str]:
    return set(_names_of(calls))


def _names_of(calls: Sequence[ModuleCall] | None) -> tuple[str, ...]:
    return tuple(call.name for call in calls or ())
