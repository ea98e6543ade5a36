"""Reasons before a difference: a rank's batches, steps and reductions compared with those of the others."""

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
OWN = frozenset({"destroy_process_group"})  # a rank ends its own side, whatever the others do
_FETCH = "fetch"  # a DataLoader is asked for a batch; another progress event follows once it has answered


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """From `step` on, `behind` entered fewer collectives of `group` than the others, and never caught up."""

    step: int
    group: str
    op: str
    called: bool  # from Python; False = DDP's buckets or FSDP
    alone: bool  # nothing else of the group differs in that step
    counts: tuple[tuple[int, int], ...]  # (rank, how often in that step)
    behind: tuple[int, ...]
    without_gradients: tuple[int, ...]  # the ranks of `behind` with fewer gradients than another rank


@dataclass(frozen=True, kw_only=True)
class OutOfBatches:
    """`ranks` requested another batch after `step` and got none; `others` got one."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    step: int
    inside: Call | None  # the call that the first of these ranks in a call is blocked in


def first_step_of_difference(ledgers: Mapping[int, Sequence[StepRow]]) -> StepDifference | None:
    """Return the first step in which some rank entered fewer collectives of a group than another, and stayed behind.

    Only steps that every rank has finished and remembers completely are compared, and only ranks that entered the group
    at all. A call that only came a step later, from another thread, is no difference.
    """
    known = {rank: _finished_rows(rows) for rank, rows in ledgers.items() if _finished_rows(rows)}
    shared = sorted(set.intersection(*(set(rows) for rows in known.values()))) if len(known) > 1 else []
    groups = sorted({tally.group for rows in known.values() for step in shared for tally in rows[step].tallies})
    found = [difference for group in groups if (difference := _difference(known, shared, group))]
    return min(found, key=lambda one: (one.step, one.group), default=None)


def first_out_of_batches(boards: Mapping[int, StatusFile]) -> OutOfBatches | None:
    """Return the ranks that ran out of batches while others still had one; None if nothing shows that."""
    done = {rank: board.steps_s[-1][0] for rank, board in boards.items() if board.steps_s}
    step = min(done.values(), default=0)
    ranks = tuple(rank for rank in sorted(done) if done[rank] == step and _out_of_batches(boards[rank]))
    others = tuple(rank for rank in sorted(done) if done[rank] > step or _trains(boards[rank], step + 1))
    if not ranks or not others:
        return None
    inside = (call for rank in ranks for call in boards[rank].calls[-1:] if call.left_s is None)
    return OutOfBatches(ranks=ranks, others=others, step=step, inside=next(inside, None))


def still_given(boards: Mapping[int, StatusFile], finished: OutOfBatches) -> bool:
    """Whether the iterator that ended here gave another rank more, and so is no evaluation or loop of its own.

    Also true if no rank's loaders are known.
    """
    ended = [loader for rank in finished.ranks for loader in boards[rank].loaders if loader.ended]
    others = {
        (loader.number, loader.iterators, loader.chain): loader.batches
        for rank in finished.others
        for loader in boards[rank].loaders
    }
    if not ended or not others:
        return True
    return any(others.get((one.number, one.iterators, one.chain), 0) > one.batches for one in ended)


def last_agreed(boards: Mapping[int, StatusFile]) -> Call | None:
    """Return the latest call that every rank made and left, as the first of them made it; None for a single rank."""
    ledgers = [_ledger(board) for _, board in sorted(boards.items())]
    if len(ledgers) < 2:
        return None
    agreed = []
    for key in set.intersection(*(set(ledger) for ledger in ledgers)):
        if not all(_remembers(board, key[0]) for board in boards.values()):
            continue
        left = min(sum(call.left_s is not None for call in ledger[key]) for ledger in ledgers)
        agreed += ledgers[0][key][left - 1 : left] if left else []
    return max(agreed, key=lambda call: (call.step, call.number), default=None)


def ledger_lines(board: StatusFile) -> Iterator[str]:
    """Yield the calls as lines of a table, oldest first."""
    yield "number  step  position  entered_s     left_s  elements  call"
    for call in board.calls:
        left = "   inside" if call.left_s is None else f"{call.left_s:9.3f}"
        place = f"  {call.place.file}:{call.place.line} {call.place.function}" if call.place else ""
        yield (
            f"{call.number:6}  {call.step:4}  {call.position:8}  {call.entered_s:9.3f}  {left}  {call.elements:8}"
            f"  {call.op} group {call.group}{place}"
        )


def _finished_rows(rows: Sequence[StepRow]) -> dict[int, StepRow]:
    return {step: row for step, row in by_step(rows).items() if row.done_s is not None}


def _difference(known: Mapping[int, dict[int, StepRow]], shared: Sequence[int], group: str) -> StepDifference | None:
    members = [rank for rank in sorted(known) if any(_entered(row, group) for row in known[rank].values())]
    totals = dict.fromkeys(members, 0)
    since: int | None = None
    for step in shared:
        for rank in members:
            totals[rank] += _entered(known[rank][step], group)
        apart = len(set(totals.values())) > 1
        since = (since if since is not None else step) if apart else None
    return _difference_in({rank: known[rank][since] for rank in members}, group) if since is not None else None


def _difference_in(rows: Mapping[int, StepRow], group: str) -> StepDifference:
    """Return the difference in that step: the kind of collective with the widest gap between ranks."""
    kinds = sorted({(tally.op, tally.called) for row in rows.values() for tally in row.tallies if tally.group == group})
    counts = {kind: {rank: _count(row, group, *kind) for rank, row in rows.items()} for kind in kinds}
    apart = [kind for kind in kinds if len(set(counts[kind].values())) > 1]
    op, called = max(kinds, key=lambda kind: max(counts[kind].values()) - min(counts[kind].values()))
    most = max(_entered(row, group) for row in rows.values())
    behind = tuple(rank for rank, row in rows.items() if _entered(row, group) < most)
    gradients = {rank: row.gradients for rank, row in rows.items() if row.gradients is not None}
    return StepDifference(
        step=next(iter(rows.values())).step,
        group=group,
        op=op,
        called=called,
        alone=len(apart) == 1,
        counts=tuple(counts[op, called].items()),
        behind=behind,
        without_gradients=tuple(r for r in behind if r in gradients and gradients[r] < max(gradients.values())),
    )


def _entered(row: StepRow, group: str) -> int:
    return sum(tally.count for tally in row.tallies if tally.group == group)


def _count(row: StepRow, group: str, op: str, called: bool) -> int:
    kind = (group, op, called)
    return sum(tally.count for tally in row.tallies if (tally.group, tally.op, tally.called) == kind)


def _out_of_batches(board: StatusFile) -> bool:
    """Whether the rank's newest training event requests a batch, and the rank then went on to something else."""
    training = board.training
    if training is None or training.kind != "data" or training.name != _FETCH:
        return False
    went_on = any(call.entered_s > training.at_s for call in board.calls)
    return went_on or board.exit_s is not None


def _trains(board: StatusFile, step: int) -> bool:
    training = board.training
    return training is not None and training.step >= step and training.kind in ("forward", "backward", "optimizer")


def _ledger(board: StatusFile) -> dict[tuple[int, Key], list[Call]]:
    ledger: dict[tuple[int, Key], list[Call]] = {}
    for call in board.calls:
        # A transfer has two sides, which do not make the same call.
        if call.op.startswith(protocol.WAIT) or call.op in TRANSFERS or call.op in OWN:
            continue
        place = call.place
        key = (call.op, call.group, place.file if place else None, place.line if place else None)
        ledger.setdefault((call.step, key), []).append(call)
    return ledger


def _remembers(board: StatusFile, step: int) -> bool:
    """Whether the ring still has every call of that step: nothing since the step's first call was overwritten."""
    if not board.calls or board.calls[0].number == 1:
        return True
    return board.calls[0].step < step


_STEPS = 3  # finished steps per rank that make a number usual
_TRAINS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class AbandonedBatch:
    """`rank` began more in `step` than it finished, and reached its end a batch before the others."""

    rank: int
    step: int
    marks: int  # progress events of training in that step
    usual: int  # in the rank's other steps
    others: tuple[int, ...]  # the ranks that still train


@dataclass(frozen=True, kw_only=True)
class OtherPace:
    """In every step, `ranks` go through more or fewer batches than the rest, so the ranks drifted apart."""

    ranks: tuple[int, ...]
    marks: tuple[tuple[int, int], ...]  # (rank, training events in its usual step)


def abandoned_batch(boards: Mapping[int, StatusFile]) -> AbandonedBatch | None:
    """Return the first step in which a rank that is a batch short began again; None if its steps show no such step."""
    usual = _usual_events(boards)
    found = (one for rank in _short_ranks(boards) if usual for one in _begun_twice(rank, boards, usual))
    return min(found, key=lambda one: (one.step, one.rank), default=None)


def other_pace(boards: Mapping[int, StatusFile]) -> OtherPace | None:
    """Return the difference in pace; None also if all steps of a rank differ, because then nothing is usual."""
    usual = _usual_events(boards)
    steady = all(set(board.marked.values()) == {usual[rank]} for rank, board in boards.items()) if usual else False
    if not steady or len(set(usual.values())) < 2 or not _short_ranks(boards):
        return None
    return OtherPace(ranks=minority(usual), marks=tuple(sorted(usual.items())))


def _usual_events(boards: Mapping[int, StatusFile]) -> dict[int, int]:
    """Return the training events in most steps of each rank; empty if they are unknown for some rank."""
    if len(boards) < 2 or any(len(board.marked) < _STEPS for board in boards.values()):
        return {}
    return {rank: Counter(board.marked.values()).most_common(1)[0][0] for rank, board in boards.items()}


def _short_ranks(boards: Mapping[int, StatusFile]) -> tuple[int, ...]:
    """Return the ranks that finished training with fewer steps than another rank has begun."""
    begun = {rank: _begun(board) for rank, board in boards.items()}
    return tuple(
        rank
        for rank, board in sorted(boards.items())
        if begun[rank] < max(begun.values()) and board.training is not None and board.training.kind not in _TRAINS
    )


def _begun(board: StatusFile) -> int:
    done = board.steps_s[-1][0] if board.steps_s else 0
    training = board.training
    return max(done, training.step) if training is not None and training.kind in _TRAINS else done


def _begun_twice(rank: int, boards: Mapping[int, StatusFile], usual: Mapping[int, int]) -> Iterator[AbandonedBatch]:
    """Whether the rank began the step twice. A complete extra step is an evaluation, not a dropped batch."""
    others = tuple(sorted(set(boards) - {rank}))
    for step, marks in sorted(boards[rank].marked.items()):
        alone = all(boards[other].marked.get(step) == usual[other] for other in others)
        if alone and usual[rank] < marks < 2 * usual[rank]:
            yield AbandonedBatch(rank=rank, step=step, marks=marks, usual=usual[rank], others=others)


@dataclass(frozen=True, kw_only=True)
class OtherModules:
    """In `step` the others entered module `expected` and `ranks` entered module `entered`; before, all did the same."""

    ranks: tuple[int, ...]
    step: int
    expected: ModuleCall
    entered: ModuleCall
    skipped: bool  # `entered` is what the others entered later
    besides: bool  # `expected` is what these ranks entered later: `entered` is an extra module
    who: bool  # these ranks left the order of the previous step, which the others kept


def diverging_modules(boards: Mapping[int, StatusFile]) -> OtherModules | None:
    """Return the first module in which a step of the ranks diverges, if the previous step was the same on all of them.

    Ranks whose steps are never the same, such as pipeline stages or experts, diverge in none. A rank that is behind has
    skipped nothing yet. Another pass through the model, such as an evaluation, does not count either.
    """
    step = min((board.step for board in boards.values()), default=0)
    lines = {rank: found for rank, board in sorted(boards.items()) if (found := board.entered(step))}
    if len(lines) < 2 or len(lines) < len(boards):
        return None
    at = next((at for at, calls in enumerate(zip(*lines.values(), strict=False)) if len(_names(calls)) > 1), None)
    if at is None or any(line[at].name == line[0].name for line in lines.values()):
        return None
    before = {rank: boards[rank].entered(step - 1) for rank in lines}
    if not all(before.values()) or len({_names_of(line) for line in before.values()}) > 1:
        return None
    kept = {rank for rank, line in lines.items() if _names_of(line[: at + 1]) == _names_of(before[rank])[: at + 1]}
    left = tuple(rank for rank in lines if rank not in kept)
    who = 0 < len(left) < len(lines)
    ranks = left if who else minority({rank: line[at].name for rank, line in lines.items()})
    other = next(rank for rank in lines if lines[rank][at].name != lines[ranks[0]][at].name)
    expected, entered = lines[other][at], lines[ranks[0]][at]
    return OtherModules(
        ranks=ranks,
        step=step,
        expected=expected,
        entered=entered,
        skipped=entered.name in _names(lines[other][at:]),
        besides=expected.name in _names(lines[ranks[0]][at:]),
        who=who,
    )


def _names(calls: Sequence[ModuleCall]) -> set[str]:
    return set(_names_of(calls))


def _names_of(calls: Sequence[ModuleCall] | None) -> tuple[str, ...]:
    return tuple(call.name for call in calls or ())
