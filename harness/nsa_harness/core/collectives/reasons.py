"""Find why ranks made different collective calls, by comparing their batches, steps, modules and call counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness import protocol
from nsa_harness.core.collectives.alignment import minority
from nsa_harness.core.evidence.evidence import Call, ModuleCall, StatusFile, StepRow
from nsa_harness.core.evidence.steps import by_step
from nsa_harness.core.verdict.group_waits import TRANSFERS

# The identity of a call: the same operation, in the same group, on the same source line.
Key = tuple[str, str, str | None, int | None]
LOCAL_CALLS = frozenset({"destroy_process_group"})  # calls that wait for no other rank
_FETCH = "fetch"  # the event of a request to a DataLoader; another event follows when the batch is there


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """The first step in which some ranks entered fewer collectives of a group and did not catch up later."""

    step: int
    group: str
    op: str
    from_python: bool  # from Python; False = DDP's buckets or FSDP
    is_only_difference: bool  # no other kind of collective of the group differs in that step
    counts: tuple[tuple[int, int], ...]  # (rank, how often in that step)
    behind: tuple[int, ...]
    without_gradients: tuple[int, ...]  # the ranks of `behind` with fewer gradients than another rank


@dataclass(frozen=True, kw_only=True)
class OutOfBatches:
    """A finding that the DataLoader of some ranks ended after `step`, while the other ranks still got a batch."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    step: int
    open_call: Call | None  # the call that the first of these ranks in a call is blocked in


def first_step_of_difference(ledgers: Mapping[int, Sequence[StepRow]]) -> StepDifference | None:
    """Return the first step in which a rank entered fewer collectives of a group and did not catch up later.

    Return None if there is no such step. Only steps that every rank has finished and recorded completely are compared,
    and only ranks that ever entered the group. A rank that makes the call one step later has caught up.
    """
    finished = {rank: _finished_rows(rows) for rank, rows in ledgers.items() if _finished_rows(rows)}
    shared = sorted(set.intersection(*(set(rows) for rows in finished.values()))) if len(finished) > 1 else []
    groups = sorted({tally.group for rows in finished.values() for step in shared for tally in rows[step].tallies})
    differences = [difference for group in groups if (difference := _difference(finished, shared, group))]
    return min(differences, key=lambda difference: (difference.step, difference.group), default=None)


def ranks_out_of_batches(status_files: Mapping[int, StatusFile]) -> OutOfBatches | None:
    """Return the ranks whose batches ended while other ranks still got one, or None if this did not happen."""
    done = {rank: status_file.steps_s[-1][0] for rank, status_file in status_files.items() if status_file.steps_s}
    step = min(done.values(), default=0)
    ranks = tuple(rank for rank in sorted(done) if done[rank] == step and _out_of_batches(status_files[rank]))
    others = tuple(rank for rank in sorted(done) if done[rank] > step or _trains(status_files[rank], step + 1))
    if not ranks or not others:
        return None
    inside = (call for rank in ranks for call in status_files[rank].calls[-1:] if call.left_s is None)
    return OutOfBatches(ranks=ranks, others=others, step=step, open_call=next(inside, None))


def others_got_more_batches(status_files: Mapping[int, StatusFile], finished: OutOfBatches) -> bool:
    """Whether the DataLoader that ended in `finished` yielded more batches on another rank.

    This is true for a loader of training batches; otherwise the loader that ended belongs to an evaluation. True is
    also returned if no loaders are known.
    """
    ended = [loader for rank in finished.ranks for loader in status_files[rank].loaders if loader.is_exhausted]
    others = {
        (loader.number, loader.iterators, loader.chain): loader.batches
        for rank in finished.others
        for loader in status_files[rank].loaders
    }
    if not ended or not others:
        return True
    return any(others.get((loader.number, loader.iterators, loader.chain), 0) > loader.batches for loader in ended)


def last_common_call(status_files: Mapping[int, StatusFile]) -> Call | None:
    """Return the latest collective call that every rank has finished, in the record of the lowest rank.

    Return None if there is only one rank, or no such call. Transfers and waits on handles do not count.
    """
    ledgers = [_ledger(status_file) for _, status_file in sorted(status_files.items())]
    if len(ledgers) < 2:
        return None
    agreed = []
    for key in set.intersection(*(set(ledger) for ledger in ledgers)):
        if not all(_remembers(status_file, key[0]) for status_file in status_files.values()):
            continue
        left = min(sum(call.left_s is not None for call in ledger[key]) for ledger in ledgers)
        agreed += ledgers[0][key][left - 1 : left] if left else []
    return max(agreed, key=lambda call: (call.step, call.number), default=None)


def ledger_lines(status_file: StatusFile) -> Iterator[str]:
    """Yield the lines of a text table with a rank's stored collective calls, after a line of column titles."""
    yield "number  step  position  entered_s     left_s  elements  call"
    for call in status_file.calls:
        left = "   inside" if call.left_s is None else f"{call.left_s:9.3f}"
        place = f"  {call.place.file}:{call.place.line} {call.place.function}" if call.place else ""
        yield (
            f"{call.number:6}  {call.step:4}  {call.position:8}  {call.entered_s:9.3f}  {left}  {call.elements:8}"
            f"  {call.op} group {call.group}{place}"
        )


def _finished_rows(rows: Sequence[StepRow]) -> dict[int, StepRow]:
    return {step: row for step, row in by_step(rows).items() if row.done_s is not None}


def _difference(finished: Mapping[int, dict[int, StepRow]], shared: Sequence[int], group: str) -> StepDifference | None:
    members = [rank for rank in sorted(finished) if any(_entered(row, group) for row in finished[rank].values())]
    totals = dict.fromkeys(members, 0)
    since: int | None = None
    for step in shared:
        for rank in members:
            totals[rank] += _entered(finished[rank][step], group)
        differ = len(set(totals.values())) > 1
        since = (since if since is not None else step) if differ else None
    return _difference_in({rank: finished[rank][since] for rank in members}, group) if since is not None else None


def _difference_in(rows: Mapping[int, StepRow], group: str) -> StepDifference:
    """Return the difference between the ranks in one step, from each rank's row of this step.

    It names the kind of collective whose counts differ most between the ranks.
    """
    kinds = sorted(
        {(tally.op, tally.from_python) for row in rows.values() for tally in row.tallies if tally.group == group}
    )
    counts = {kind: {rank: _count(row, group, *kind) for rank, row in rows.items()} for kind in kinds}
    differing = [kind for kind in kinds if len(set(counts[kind].values())) > 1]
    op, called = max(kinds, key=lambda kind: max(counts[kind].values()) - min(counts[kind].values()))
    most = max(_entered(row, group) for row in rows.values())
    behind = tuple(rank for rank, row in rows.items() if _entered(row, group) < most)
    gradients = {rank: row.gradients for rank, row in rows.items() if row.gradients is not None}
    return StepDifference(
        step=next(iter(rows.values())).step,
        group=group,
        op=op,
        from_python=called,
        is_only_difference=len(differing) == 1,
        counts=tuple(counts[op, called].items()),
        behind=behind,
        without_gradients=tuple(r for r in behind if r in gradients and gradients[r] < max(gradients.values())),
    )


def _entered(row: StepRow, group: str) -> int:
    return sum(tally.count for tally in row.tallies if tally.group == group)


def _count(row: StepRow, group: str, op: str, called: bool) -> int:
    kind = (group, op, called)
    return sum(tally.count for tally in row.tallies if (tally.group, tally.op, tally.from_python) == kind)


def _out_of_batches(status_file: StatusFile) -> bool:
    """Whether the rank has requested a batch and got none.

    This is so if the request is its latest training event, and it has made a call or exited since.
    """
    training = status_file.latest_training_event
    if training is None or training.kind != "data" or training.name != _FETCH:
        return False
    went_on = any(call.entered_s > training.at_s for call in status_file.calls)
    return went_on or status_file.exit_s is not None


def _trains(status_file: StatusFile, step: int) -> bool:
    training = status_file.latest_training_event
    return training is not None and training.step >= step and training.kind in ("forward", "backward", "optimizer")


def _ledger(status_file: StatusFile) -> dict[tuple[int, Key], list[Call]]:
    ledger: dict[tuple[int, Key], list[Call]] = {}
    for call in status_file.calls:
        # A transfer has two sides, which do not make the same call.
        if call.op.startswith(protocol.WAIT) or call.op in TRANSFERS or call.op in LOCAL_CALLS:
            continue
        place = call.place
        key = (call.op, call.group, place.file if place else None, place.line if place else None)
        ledger.setdefault((call.step, key), []).append(call)
    return ledger


def _remembers(status_file: StatusFile, step: int) -> bool:
    """Whether every call of `step` is still stored, so that newer calls have not overwritten it."""
    if not status_file.calls or status_file.calls[0].number == 1:
        return True
    return status_file.calls[0].step < step


_STEPS = 3  # finished steps per rank before its usual number of events is known
_TRAINS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class AbandonedBatch:
    """A finding that `rank` dropped a batch in `step` and took another one, so it ran out of batches one step early."""

    rank: int
    step: int
    event_count: int  # progress events of training in that step
    usual_count: int  # in the rank's other steps
    others: tuple[int, ...]  # the ranks that still train


@dataclass(frozen=True, kw_only=True)
class PaceDifference:
    """A finding that some ranks use more or fewer batches per step than the others, so that their steps drift apart."""

    ranks: tuple[int, ...]
    events_per_step: tuple[tuple[int, int], ...]  # (rank, training events in its usual step)


def abandoned_batch(status_files: Mapping[int, StatusFile]) -> AbandonedBatch | None:
    """Return the first step in which a rank dropped a batch and took another, or None.

    Only ranks that finished their training early are considered.
    """
    usual = _usual_events(status_files)
    candidates = (
        batch for rank in _short_ranks(status_files) if usual for batch in _begun_twice(rank, status_files, usual)
    )
    return min(candidates, key=lambda batch: (batch.step, batch.rank), default=None)


def pace_difference(status_files: Mapping[int, StatusFile]) -> PaceDifference | None:
    """Return the ranks that use another number of batches per step than most ranks.

    Return None if all ranks use the same number, if a rank's number changes between its steps, or if no rank ended
    early.
    """
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
    """Return each rank's most frequent number of training events per step.

    The result is empty if there is only one rank or some rank has finished too few steps.
    """
    if len(status_files) < 2 or any(len(status_file.events_per_step) < _STEPS for status_file in status_files.values()):
        return {}
    return {
        rank: Counter(status_file.events_per_step.values()).most_common(1)[0][0]
        for rank, status_file in status_files.items()
    }


def _short_ranks(status_files: Mapping[int, StatusFile]) -> tuple[int, ...]:
    """Return the ranks that no longer train although another rank has begun a later step."""
    begun = {rank: _begun(status_file) for rank, status_file in status_files.items()}
    return tuple(
        rank
        for rank, status_file in sorted(status_files.items())
        if begun[rank] < max(begun.values())
        and status_file.latest_training_event is not None
        and status_file.latest_training_event.kind not in _TRAINS
    )


def _begun(status_file: StatusFile) -> int:
    done = status_file.steps_s[-1][0] if status_file.steps_s else 0
    training = status_file.latest_training_event
    return max(done, training.step) if training is not None and training.kind in _TRAINS else done


def _begun_twice(
    rank: int, status_files: Mapping[int, StatusFile], usual: Mapping[int, int]
) -> Iterator[AbandonedBatch]:
    """Yield each step in which only `rank` took more than its usual number of training events.

    Steps with at least twice the usual number are skipped, because a second complete pass is an evaluation.
    """
    others = tuple(sorted(set(status_files) - {rank}))
    for step, events in sorted(status_files[rank].events_per_step.items()):
        alone = all(status_files[other].events_per_step.get(step) == usual[other] for other in others)
        if alone and usual[rank] < events < 2 * usual[rank]:
            yield AbandonedBatch(rank=rank, step=step, event_count=events, usual_count=usual[rank], others=others)


@dataclass(frozen=True, kw_only=True)
class ModuleDifference:
    """The first module of a step at which forward passes differ: `ranks` entered `entered`, others `expected`."""

    ranks: tuple[int, ...]
    step: int
    expected: ModuleCall
    actual: ModuleCall
    is_skip: bool  # the others entered `entered` later, so these ranks skipped `expected`
    is_extra: bool  # these ranks entered `expected` later, so `entered` is an extra module
    culprit_is_certain: bool  # the ranks at fault are certain: only they changed the order of the previous step


def module_difference(status_files: Mapping[int, StatusFile]) -> ModuleDifference | None:
    """Return the first module at which the ranks' forward passes differ in the current step, or None.

    The ranks must have entered the same modules in the previous step. Pipeline stages and experts, which always differ,
    are therefore not compared. A rank that is only behind does not differ, and neither does one that runs another pass
    through the model, such as an evaluation.
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
    left = tuple(rank for rank in lines if rank not in in_order)
    who = 0 < len(left) < len(lines)
    ranks = left if who else minority({rank: line[at].name for rank, line in lines.items()})
    other = next(rank for rank in lines if lines[rank][at].name != lines[ranks[0]][at].name)
    expected, entered = lines[other][at], lines[ranks[0]][at]
    return ModuleDifference(
        ranks=ranks,
        step=step,
        expected=expected,
        actual=entered,
        is_skip=entered.name in _names(lines[other][at:]),
        is_extra=expected.name in _names(lines[ranks[0]][at:]),
        culprit_is_certain=who,
    )


def _names(calls: Sequence[ModuleCall]) -> set[str]:
    return set(_names_of(calls))


def _names_of(calls: Sequence[ModuleCall] | None) -> tuple[str, ...]:
    return tuple(call.name for call in calls or ())
