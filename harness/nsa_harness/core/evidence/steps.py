"""Which collectives a rank entered during which of its steps: the board's times joined with the flight recorder's."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import prod
from statistics import median

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Call, Collective, StatusFile, StepRow, Tally

_NS = 1_000_000_000
_KEPT_ROWS = 64  # of a rank whose steps all differ; equal ones in a row are one
_NEAR = 64  # calls that other threads may have made while this one was inside
_SLACK_S = 0.0001  # both clocks are read a moment apart
SETUP = ("init_process_group", "new_", "split_group", "shrink_group", "destroy_process_group", protocol.WAIT)


def entered_s(board: StatusFile, collective: Collective) -> float | None:
    """When the rank entered it, in seconds since the launch; None where the board lacks the recorder's clock."""
    return None if board.zero_ns is None else (collective.created_ns - board.zero_ns) / _NS


def calls_of(board: StatusFile, collectives: Iterable[Collective]) -> dict[tuple[str, int], Call]:
    """The calls from Python that they were entered from, by group and number; none for what DDP and FSDP do below it.

    One call may enter several. Of calls within the same tenth of a millisecond each entered one of its own size; the
    newest are matched first, since the older ones of either side may be lost.
    """
    found: dict[tuple[str, int], Call] = {}
    alike: set[int] = set()  # calls that entered just what they were called for
    for one in sorted(collectives, key=lambda one: (one.group, one.seq), reverse=True):
        near = _calls_around(board, one)
        own = next((call for call in reversed(near) if call.number not in alike and _is_entered_by(one, call)), None)
        if own is not None:
            alike.add(own.number)
        if near:
            found[one.group, one.seq] = own or near[-1]
    return found


def _calls_around(board: StatusFile, collective: Collective) -> list[Call]:
    at_s = entered_s(board, collective)
    if at_s is None:
        return []
    until = bisect_right(board.calls, at_s + _SLACK_S, key=lambda call: call.entered_s)
    near = board.calls[max(0, until - _NEAR) : until + 1]
    return [call for call in near if _covers(call, collective.group, at_s)]


def _is_entered_by(collective: Collective, call: Call) -> bool:
    return collective.op.endswith(call.op) and call.elements == elements(collective)


def step_s(board: StatusFile) -> float | None:
    """Median between its finished steps, so without what comes before the first; None where fewer than two are."""
    took = [later - earlier for (_, earlier), (_, later) in pairwise(board.steps_s)]
    return median(took) if took else None


def elements(collective: Collective) -> int:
    """Of all its tensors: their shapes need not agree between ranks."""
    return sum(prod(sizes) for sizes in collective.sizes)


def step_rows(board: StatusFile, collectives: Sequence[Collective]) -> tuple[StepRow, ...]:
    """The steps that both still remember whole, and the one in progress; none without a common clock."""
    if board.zero_ns is None or not board.steps_s:
        return ()
    since_s = _remembered_since(board, collectives)
    marked = [(at_s, one) for one in collectives if (at_s := entered_s(board, one)) is not None]
    rows = (
        StepRow(
            step=step,
            until=step,
            done_s=end_s,
            gradients=board.gradients.get(step) if end_s is not None else None,
            tallies=_tallies(
                board,
                [
                    one
                    for at_s, one in marked
                    if (begin_s is None or at_s > begin_s) and (end_s is None or at_s <= end_s)
                ],
            ),
        )
        for step, begin_s, end_s in _spans(board)
        if since_s is None or (begin_s is not None and begin_s >= since_s)
    )
    return tuple(_merged(rows))[-_KEPT_ROWS:]


def by_step(rows: Sequence[StepRow]) -> dict[int, StepRow]:
    """Every step of its own."""
    return {step: replace(row, step=step, until=step) for row in rows for step in range(row.step, row.until + 1)}


def ledger_table(rows: dict[int, tuple[StepRow, ...]]) -> Iterator[str]:
    """The ledgers of all ranks as a table for people: a line a step, a column a rank."""
    known = {rank: by_step(ledger) for rank, ledger in rows.items()}
    yield "Collectives that each rank entered during each optimizer step; 'below': by DDP or FSDP, not from Python."
    texts = {
        step: [f"  rank {rank}  {_row_text(known[rank].get(step))}" for rank in sorted(known)]
        for step in sorted({step for rank in known.values() for step in rank})
    }
    for lines, steps in groupby(texts, key=texts.__getitem__):
        first, *more = steps
        yield f"steps {first} to {more[-1]}" if more else f"step {first}"
        yield from lines


def _row_text(row: StepRow | None) -> str:
    if row is None:
        return "not remembered, or not reached"
    done = "in progress" if row.done_s is None else "done"
    gradients = "" if row.gradients is None else f", {row.gradients} gradients"
    tallies = [
        f"{tally.op} x{tally.count} group {tally.group}{'' if tally.called else ' below'}" for tally in row.tallies
    ]
    return f"{done}{gradients}: {', '.join(tallies) or 'no collective'}"


def _merged(rows: Iterable[StepRow]) -> list[StepRow]:
    """Equal finished steps in a row as one."""
    merged: list[StepRow] = []
    for row in rows:
        before = merged[-1] if merged and row.done_s is not None else None
        if before is not None and (before.gradients, before.tallies) == (row.gradients, row.tallies):
            merged[-1] = replace(row, step=before.step)
        else:
            merged.append(row)
    return merged


def _covers(call: Call, group: str, at_s: float) -> bool:
    if call.group != group or call.entered_s > at_s + _SLACK_S or call.op.startswith(SETUP):
        return False
    return call.left_s is None or at_s <= call.left_s + _SLACK_S


def _spans(board: StatusFile) -> Iterator[tuple[int, float | None, float | None]]:
    """(step, begin, end); the first step has no begin, the one in progress no end. An unknown begin is left out."""
    begin_s: float | None = None
    for number, (step, end_s) in enumerate(board.steps_s):
        if number or step == 1:
            yield step, begin_s, end_s
        begin_s = end_s
    yield board.steps_s[-1][0] + 1, begin_s, None


def _tallies(board: StatusFile, collectives: Sequence[Collective]) -> tuple[Tally, ...]:
    called = calls_of(board, collectives)
    counts = Counter((one.group, one.op, (one.group, one.seq) in called) for one in collectives)
    return tuple(
        Tally(group=group, op=op, called=called, count=count) for (group, op, called), count in sorted(counts.items())
    )


def _remembered_since(board: StatusFile, collectives: Sequence[Collective]) -> float | None:
    """From when on recorder and board hold everything; None = from the beginning.

    A group is whole back to the first hole in its numbers: what is older was overwritten, or kept only for being open.
    """
    groups: dict[str, list[Collective]] = {}
    for one in collectives:
        groups.setdefault(one.group, []).append(one)
    begins = [begin for group in groups.values() if (begin := _whole_since(group)) is not None]
    times = [at_s for begin in begins if (at_s := entered_s(board, begin)) is not None]
    times += [call.entered_s for call in board.calls[:1] if call.number > 1]
    return max(times, default=None)


def _whole_since(group: Sequence[Collective]) -> Collective | None:
    """The oldest entry after the last hole; None where the numbers go back to the first."""
    series = sorted(group, key=lambda one: one.seq, reverse=True)
    oldest = series[0]
    for one in series[1:]:
        if one.seq < oldest.seq - 1:
            return oldest
        oldest = one
    return oldest if oldest.seq > 1 else None
