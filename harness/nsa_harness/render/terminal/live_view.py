"""The lines of the live view of the attempts in progress, made from the state and the size of the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.cells import cell_len

from nsa_harness.core.evidence.live import Progress, RankProgress
from nsa_harness.core.report import Status
from nsa_harness.render.terminal.layout import NARROW, cropped, paragraph
from nsa_harness.render.text import escape
from nsa_harness.texts import words

MAX_RANKS = 8  # rows per attempt
_NAME_COLUMNS, _MODULE_COLUMNS = 12, 12  # minimum widths; the module is left out if there is less room
_ONCE = "interrupted: reading stacks, ending the processes, writing the report; Ctrl-C again kills at once"
_TWICE = "interrupted twice: killing the processes now; the report is still written"


@dataclass(frozen=True, kw_only=True)
class RunningAttempt:
    """A running attempt, with the details that the live view shows."""

    name: str
    phase: str
    progress: Progress
    stall: str | None = None  # description of the stall; None while a rank makes progress


@dataclass(frozen=True, kw_only=True)
class EndedAttempt:
    """An attempt that has ended, with the details that the live view needs."""

    status: Status
    expected: bool
    counts: bool  # False if a later attempt replaces this one
    took_s: float


@dataclass(frozen=True, kw_only=True)
class View:
    """The state that the live view shows."""

    running: tuple[RunningAttempt, ...]
    ended: tuple[EndedAttempt, ...]
    run_count: int  # planned runs that are not skipped
    left_s: float | None  # estimated time until the last run ends; None if unknown
    interrupts: int  # number of SIGINT and SIGTERM so far
    by_class: bool = False  # if there are many ranks, those in the same module, phase and step share a row


def view_lines(view: View, width: int, height: int) -> list[str]:
    """Return the live view. If it has no room for all ranks, those that stand still for longest are shown."""
    if not view.running:
        return []
    tail = [*_plan_lines(view, width), *interrupted_lines(view.interrupts, width)][: max(height - 2, 0)]
    heads = [[_head(running, width), *_stall_lines(running, width)] for running in view.running]
    spare = height - len(tail) - sum(map(len, heads))
    rows_each = min(max(spare // len(heads), 0), MAX_RANKS + 1)
    body = [
        line
        for head, running in zip(heads, view.running, strict=True)
        for line in (*head, *_rank_lines(running.progress.ranks, rows_each, width, by_class=view.by_class))
    ]
    room = height - len(tail)
    if len(body) > room:
        body = [
            *body[: max(room - 1, 0)],
            cropped(f"  {words.plural(len(heads), 'run')} in parallel, not all shown", width),
        ]
    return [*body, *tail][: max(height, 0)]


def interrupted_lines(interrupts: int, width: int) -> list[str]:
    """Return lines that say what happens after `interrupts` signals, or [] if there was none."""
    if interrupts == 0:
        return []
    return [cropped(line, width) for line in paragraph(_ONCE if interrupts == 1 else _TWICE, width, "  ")]


def _plan_lines(view: View, width: int) -> Iterator[str]:
    """Yield lines such as "5 of 12 done · about 2 min left · 4 PASS · 1 HANG · 1 not as expected"."""
    final = [attempt for attempt in view.ended if attempt.counts]
    done_count = sum(attempt.status is not Status.SKIP for attempt in final)
    run_count = max(view.run_count, done_count + len(view.running))
    if run_count < 2:
        return
    by_verdict = [(status, sum(attempt.status is status for attempt in final)) for status in words.LOUDEST_FIRST]
    surprises = sum(not attempt.expected for attempt in final)
    parts = [f"{done_count} of {run_count} done"]
    parts += [f"about {words.whole_seconds(view.left_s)} left"] if view.left_s is not None else []
    parts += [f"{count} {status.value}" for status, count in by_verdict if count]
    parts += [f"{surprises} not as expected"] if surprises else []
    line = " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
    yield from (cropped(text, width) for text in paragraph(line, width, "  "))


def _head(running: RunningAttempt, width: int) -> str:
    """Return the first line about an attempt, which shows its name, phase and time."""
    progress = running.progress
    remarks = [escape(running.phase), words.seconds(progress.elapsed_s)]
    if progress.deadline_s is not None:
        left_s = max(progress.deadline_s - progress.elapsed_s, 0.0)
        remarks.append(f"at most {words.seconds(left_s)} left")
    name = escape(running.name)
    while remarks and 2 + min(cell_len(name), _NAME_COLUMNS) + cell_len(_join_remarks(remarks)) > width:
        remarks.pop()
    text = _join_remarks(remarks)
    return cropped(f"  {cropped(name, max(width - cell_len(text) - 2, 0))}{text}", width)


def _join_remarks(remarks: Sequence[str]) -> str:
    return f"   {' · '.join(remarks)}" if remarks else ""


def _stall_lines(running: RunningAttempt, width: int) -> list[str]:
    if running.stall is None:
        return []
    lines = list(paragraph(f"stall   {escape(running.stall)}", width, "    ", "            "))
    return [cropped(line, width) for line in (lines if width >= NARROW else lines[:3])]


def _rank_lines(ranks: Sequence[RankProgress], max_lines: int, width: int, *, by_class: bool = False) -> Iterator[str]:
    """Yield one row for each rank. If not all ranks fit, the rows show those with the least progress."""
    if by_class and len(ranks) > MAX_RANKS:
        yield from islice(_rows(*_classes(ranks), width), max_lines)
        return
    all_fit = len(ranks) <= min(max_lines, MAX_RANKS)
    row_count = len(ranks) if all_fit else max(max_lines - 1, min(max_lines, 1))
    slowest = sorted(ranks, key=lambda rank: -(rank.no_progress_s or 0.0))[:row_count]
    slowest = sorted(slowest, key=lambda rank: rank.rank)
    yield from _rows([f"rank {rank.rank}" for rank in slowest], slowest, width)
    if row_count < min(max_lines, len(ranks)):
        more = len(ranks) - row_count
        yield cropped(f"    {words.plural(more, 'more rank')}, with later progress", width)


def _classes(ranks: Sequence[RankProgress]) -> tuple[list[str], list[RankProgress]]:
    """Return the names of the ranks that are in the same place, and of each class the rank with the least progress."""
    classes: dict[tuple[str, int, str | None], list[RankProgress]] = {}
    for rank in ranks:
        classes.setdefault((rank.phase, rank.step, rank.module), []).append(rank)
    smallest_first = sorted(classes.values(), key=len)
    names = [words.ranks(rank.rank for rank in members) for members in smallest_first]
    return names, [max(members, key=lambda rank: rank.no_progress_s or 0.0) for members in smallest_first]


def _rows(names: Sequence[str], ranks: Sequence[RankProgress], width: int) -> Iterator[str]:
    """Yield one row for each rank, with as many columns as fit the width."""
    gap = "   " if width >= NARROW else "  "
    indent = " " * (len(gap) + 1)
    columns = [
        _column(names, 6),
        _column([escape(rank.phase) for rank in ranks], 8),
        _column([_time_without_progress(rank) for rank in ranks], 12),
        _column([f"step {rank.step}" for rank in ranks], 6),
        _column(["" if rank.rss_bytes is None else words.size(rank.rss_bytes) for rank in ranks], 6),
    ]
    rows = [indent + gap.join(cells) for cells in zip(*_columns_that_fit(columns, gap, width), strict=True)]
    for row, rank in zip(rows, ranks, strict=True):
        room = width - cell_len(row) - len(gap)
        module = escape(rank.module or "")
        line = f"{row}{gap}{cropped(module, room)}" if module and room >= _MODULE_COLUMNS else row
        yield cropped(line.rstrip(), width)


def _columns_that_fit(columns: Sequence[list[str]], gap: str, width: int) -> Sequence[list[str]]:
    """Return as many of the columns as fit the width, but at least three."""
    while len(columns) > 3 and 1 + sum(len(gap) + cell_len(column[0]) for column in columns if column) > width:
        columns = columns[:-1]
    return columns


def _column(cells: Sequence[str], min_width: int) -> list[str]:
    """Return the cells padded to the same width, whose minimum keeps it the same from frame to frame."""
    column_width = max([min_width, *map(cell_len, cells)])
    return [cell + " " * (column_width - cell_len(cell)) for cell in cells]


def _time_without_progress(rank: RankProgress) -> str:
    return "nothing yet" if rank.no_progress_s is None else f"no progress {words.seconds(rank.no_progress_s)}"
