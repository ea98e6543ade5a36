"""Count the collectives that a rank entered in each optimizer step.

They come from its status file and flight recorder.
"""

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
_MAX_ROWS = 64  # latest rows that are kept per rank; consecutive equal steps share a row
_NEAR = 64  # calls before a point in time that are searched: other threads may have made calls since a call began
_SLACK_S = 0.0001  # the two clocks are read at slightly different moments
SETUP = ("init_process_group", "new_", "split_group", "shrink_group", "destroy_process_group", protocol.WAIT)


def entered_s(status_file: StatusFile, collective: Collective) -> float | None:
    """Return when the rank entered the collective, in seconds since the launch, or None without a clock to convert."""
    return None if status_file.zero_ns is None else (collective.created_ns - status_file.zero_ns) / _NS


def python_calls(status_file: StatusFile, collectives: Iterable[Collective]) -> dict[tuple[str, int], Call]:
    """Map each collective, given as (group, number), to the Python call that entered it."""
    calls: dict[tuple[str, int], Call] = {}
    matched: set[int] = set()  # numbers of calls that are matched with a collective of the same operation and size
    for collective in sorted(collectives, key=lambda collective: (collective.group, collective.seq), reverse=True):
        near = _calls_around(status_file, collective)
        own = next(
            (call for call in reversed(near) if call.number not in matched and _is_entered_by(collective, call)), None
        )
        if own is not None:
            matched.add(own.number)
        if near:
            calls[collective.group, collective.seq] = own or near[-1]
    return calls


def _calls_around(status_file: StatusFile, collective: Collective) -> list[Call]:
    at_s = entered_s(status_file, collective)
    if at_s is None:
        return []
    until = bisect_right(status_file.calls, at_s + _SLACK_S, key=lambda call: call.entered_s)
    near = status_file.calls[max(0, until - _NEAR) : until + 1]
    return [call for call in near if _covers(call, collective.group, at_s)]


def _is_entered_by(collective: Collective, call: Call) -> bool:
    return collective.op.endswith(call.op) and call.elements == elements(collective)


_MIN_STEPS_OF_SHARE = 10  # steps that must be known before a duration is called that of nine in ten


def step_s(status_file: StatusFile) -> float | None:
    """Return the median duration in seconds of at least two steps after the first, or None."""
    durations_s = _durations_s(status_file)
    return median(durations_s) if durations_s else None


def step_p90_s(status_file: StatusFile) -> float | None:
    """Return the duration that nine of ten steps do not exceed, or None if fewer than ten steps are recorded."""
    durations_s = sorted(_durations_s(status_file))
    return durations_s[9 * len(durations_s) // 10] if len(durations_s) >= _MIN_STEPS_OF_SHARE else None


def _durations_s(status_file: StatusFile) -> list[float]:
    return [later - earlier for (_, earlier), (_, later) in pairwise(status_file.steps_s)]


def elements(collective: Collective) -> int:
    """Return the total number of elements in the collective's input tensors."""
    return sum(prod(sizes) for sizes in collective.sizes)


def step_rows(status_file: StatusFile, collectives: Sequence[Collective]) -> tuple[StepRow, ...]:
    """Return the collectives that the rank entered, grouped by optimizer step."""
    rows = (
        StepRow(
            step=step,
            last_step=step,
            done_s=end_s,
            gradients=status_file.gradients.get(step) if end_s is not None else None,
            tallies=_tallies(status_file, entered),
        )
        for step, end_s, entered in entered_by_step(status_file, collectives)
    )
    return tuple(_merge_equal_steps(rows))[-_MAX_ROWS:]


def entered_by_step(
    status_file: StatusFile, collectives: Sequence[Collective]
) -> Iterator[tuple[int, float | None, list[Collective]]]:
    """Yield the number and end of each optimizer step that is recorded completely, and the collectives entered in it.

    The end of the step in progress is None. A step lasts from the end of the step before to its own end.
    """
    if status_file.zero_ns is None or not status_file.steps_s:
        return
    since_s = _remembered_since(status_file, collectives)
    timed = [
        (at_s, collective) for collective in collectives if (at_s := entered_s(status_file, collective)) is not None
    ]
    for step, begin_s, end_s in _spans(status_file):
        if since_s is None or (begin_s is not None and begin_s >= since_s):
            yield (
                step,
                end_s,
                [
                    collective
                    for at_s, collective in timed
                    if (begin_s is None or at_s > begin_s) and (end_s is None or at_s <= end_s)
                ],
            )


def by_step(rows: Sequence[StepRow]) -> dict[int, StepRow]:
    """Map the number of each optimizer step to the row that covers it."""
    return {
        step: replace(row, step=step, last_step=step) for row in rows for step in range(row.step, row.last_step + 1)
    }


def ledger_table(rows: dict[int, tuple[StepRow, ...]]) -> Iterator[str]:
    """Yield a table of the collectives in `rows` by rank, with equal consecutive steps shown once."""
    ledgers = {rank: by_step(ledger) for rank, ledger in rows.items()}
    yield "Collectives that each rank entered during each optimizer step; 'below': by DDP or FSDP, not from Python."
    texts = {
        step: [f"  rank {rank}  {_row_text(ledgers[rank].get(step))}" for rank in sorted(ledgers)]
        for step in sorted({step for rank in ledgers.values() for step in rank})
    }
    for lines, steps in groupby(texts, key=texts.__getitem__):
        first, *more = steps
        yield f"steps {first} to {more[-1]}" if more else f"step {first}"
        yield from lines


def _row_text(row: StepRow | None) -> str:
    if row is None:
        return "not remembered, or not reached"
    state = "in progress" if row.done_s is None else "done"
    gradients = "" if row.gradients is None else f", {row.gradients} gradients"
    tallies = [
        f"{tally.op} x{tally.count} group {tally.group}{'' if tally.from_python else ' below'}" for tally in row.tallies
    ]
    return f"{state}{gradients}: {', '.join(tallies) or 'no collective'}"


def _merge_equal_steps(rows: Iterable[StepRow]) -> list[StepRow]:
    result: list[StepRow] = []
    for row in rows:
        before = result[-1] if result and row.done_s is not None else None
        if before is not None and (before.gradients, before.tallies) == (row.gradients, row.tallies):
            result[-1] = replace(row, step=before.step)
        else:
            result.append(row)
    return result


def _covers(call: Call, group: str, at_s: float) -> bool:
    if call.group != group or call.entered_s > at_s + _SLACK_S or call.op.startswith(SETUP):
        return False
    return call.left_s is None or at_s <= call.left_s + _SLACK_S


def _spans(status_file: StatusFile) -> Iterator[tuple[int, float | None, float | None]]:
    """Yield the number, start and end of each recorded optimizer step."""
    begin_s: float | None = None
    for number, (step, end_s) in enumerate(status_file.steps_s):
        if number or step == 1:
            yield step, begin_s, end_s
        begin_s = end_s
    yield status_file.steps_s[-1][0] + 1, begin_s, None


def _tallies(status_file: StatusFile, collectives: Sequence[Collective]) -> tuple[Tally, ...]:
    calls = python_calls(status_file, collectives)
    counts = Counter(
        (collective.group, collective.op, (collective.group, collective.seq) in calls) for collective in collectives
    )
    return tuple(
        Tally(group=group, op=op, from_python=from_python, count=count)
        for (group, op, from_python), count in sorted(counts.items())
    )


def _remembered_since(status_file: StatusFile, collectives: Sequence[Collective]) -> float | None:
    """Return the time since which the records of collectives are complete, or None if none are missing."""
    groups: dict[str, list[Collective]] = {}
    for collective in collectives:
        groups.setdefault(collective.group, []).append(collective)
    begins = [begin for group in groups.values() if (begin := _first_after_gap(group)) is not None]
    times = [at_s for begin in begins if (at_s := entered_s(status_file, begin)) is not None]
    times += [call.entered_s for call in status_file.calls[:1] if call.number > 1]
    return max(times, default=None)


def _first_after_gap(group: Sequence[Collective]) -> Collective | None:
    """Return the oldest collective after the latest gap in the numbers of `group`, or None without a gap."""
    series = sorted(group, key=lambda entry: entry.seq, reverse=True)
    oldest = series[0]
    for entry in series[1:]:
        if entry.seq < oldest.seq - 1:
            return oldest
        oldest = entry
    return oldest if oldest.seq > 1 else None
