"""The live view: the running attempts as lines, a pure function of the values and the size of the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from nsa_harness.core.evidence.live import Progress, RankProgress
from nsa_harness.core.report import Status
from nsa_harness.render.terminal.layout import NARROW, cropped, paragraph
from nsa_harness.render.text import escape
from nsa_harness.texts import words

MAX_RANKS = 8  # of one attempt
_NAME_COLUMNS, _MODULE_COLUMNS = 12, 12  # minimum widths; a narrower module is not shown
_ONCE = "interrupted: taking stacks, ending the processes, writing the report; once more kills at once"
_TWICE = "interrupted twice: killing now; `nsa-harness report` judges what was seen"


@dataclass(frozen=True, kw_only=True)
class Running:
    """One running attempt."""

    name: str
    phase: str
    progress: Progress
    suspicion: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One attempt that has its verdict."""

    status: Status
    expected: bool
    counts: bool  # False for an attempt that a later one replaces
    took_s: float


@dataclass(frozen=True, kw_only=True)
class View:
    running: tuple[Running, ...]
    ended: tuple[Ended, ...]
    planned: int  # runs, without what is skipped
    left_s: float | None
    interrupts: int


def view_lines(view: View, width: int, height: int) -> list[str]:
    """Return at most `height` lines of `width` columns. If not all fit, the ranks without progress for longest stay."""
    if not view.running:
        return []
    tail = [*_plan_lines(view, width), *interrupted_lines(view.interrupts, width)][: max(height - 2, 0)]
    heads = [[_head(running, width), *_suspicion(running, width)] for running in view.running]
    spare = height - len(tail) - sum(map(len, heads))
    shown = min(max(spare // len(heads), 0), MAX_RANKS + 1)
    body = [
        line
        for head, running in zip(heads, view.running, strict=True)
        for line in (*head, *_ranks(running.progress.ranks, shown, width))
    ]
    room = height - len(tail)
    if len(body) > room:
        body = [
            *body[: max(room - 1, 0)],
            cropped(f"  {words.plural(len(heads), 'run')} at once, not all shown", width),
        ]
    return [*body, *tail][: max(height, 0)]


def interrupted_lines(interrupts: int, width: int) -> list[str]:
    """Return what Ctrl-C or TERM does: the first ends the run in order, the second kills."""
    if interrupts == 0:
        return []
    return [cropped(line, width) for line in paragraph(_ONCE if interrupts == 1 else _TWICE, width, "  ")]


def _plan_lines(view: View, width: int) -> Iterator[str]:
    """Yield "5 of 12 done · about 2 min left · 4 PASS · 1 HANG · 1 not as expected"; nothing for a single run."""
    final = [attempt for attempt in view.ended if attempt.counts]
    done = sum(attempt.status is not Status.SKIP for attempt in final)
    planned = max(view.planned, done + len(view.running))
    if planned < 2:
        return
    given = [(status, sum(attempt.status is status for attempt in final)) for status in words.LOUDEST_FIRST]
    surprises = sum(not attempt.expected for attempt in final)
    parts = [f"{done} of {planned} done"]
    parts += [f"about {_rounded(view.left_s)} left"] if view.left_s is not None else []
    parts += [f"{count} {status.value}" for status, count in given if count]
    parts += [f"{surprises} not as expected"] if surprises else []
    line = " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
    yield from (cropped(text, width) for text in paragraph(line, width, "  "))


def _rounded(seconds: float) -> str:
    """Return the estimate without tenths."""
    return f"{max(round(seconds), 1)} s" if seconds < 99.5 else words.seconds(float(round(seconds)))


def _head(running: Running, width: int) -> str:
    """Return name, phase, time and time left; a narrow line drops the last of them first."""
    progress = running.progress
    remarks = [escape(running.phase), words.seconds(progress.elapsed_s)]
    if progress.deadline_s is not None:
        left_s = max(progress.deadline_s - progress.elapsed_s, 0.0)
        remarks.append(f"at most {words.seconds(left_s)} left")
    name = escape(running.name)
    while remarks and 2 + min(cell_len(name), _NAME_COLUMNS) + cell_len(_remarks_text(remarks)) > width:
        remarks.pop()
    text = _remarks_text(remarks)
    return cropped(f"  {cropped(name, max(width - cell_len(text) - 2, 0))}{text}", width)


def _remarks_text(remarks: Sequence[str]) -> str:
    return f"   {' · '.join(remarks)}" if remarks else ""


def _suspicion(running: Running, width: int) -> list[str]:
    if running.suspicion is None:
        return []
    lines = list(paragraph(f"stall   {escape(running.suspicion)}", width, "    ", "            "))
    return [cropped(line, width) for line in (lines if width >= NARROW else lines[:3])]


def _ranks(ranks: Sequence[RankProgress], lines: int, width: int) -> Iterator[str]:
    """Yield a row for each rank. If not all fit, the ranks without progress for longest stay."""
    fits = len(ranks) <= min(lines, MAX_RANKS)
    shown = len(ranks) if fits else max(lines - 1, min(lines, 1))
    quietest = sorted(ranks, key=lambda rank: -(rank.no_progress_s or 0.0))[:shown]
    yield from _rows(sorted(quietest, key=lambda rank: rank.rank), width)
    if shown < min(lines, len(ranks)):
        omitted = len(ranks) - shown
        yield cropped(f"    {words.plural(omitted, 'more rank')}, with progress since", width)


def _rows(ranks: Sequence[RankProgress], width: int) -> Iterator[str]:
    """Yield aligned rows. A narrow screen drops the module first, then memory and step."""
    gap = "   " if width >= NARROW else "  "
    indent = " " * (len(gap) + 1)
    columns = [
        _column([f"rank {rank.rank}" for rank in ranks], 6),
        _column([escape(rank.phase) for rank in ranks], 8),
        _column([_quiet(rank) for rank in ranks], 12),
        _column([f"step {rank.step}" for rank in ranks], 6),
        _column(["" if rank.rss_bytes is None else words.size(rank.rss_bytes) for rank in ranks], 6),
    ]
    rows = [indent + gap.join(cells) for cells in zip(*_fitting(columns, gap, width), strict=True)]
    for row, rank in zip(rows, ranks, strict=True):
        room = width - cell_len(row) - len(gap)
        module = escape(rank.module or "")
        whole = f"{row}{gap}{cropped(module, room)}" if module and room >= _MODULE_COLUMNS else row
        yield cropped(whole.rstrip(), width)


def _fitting(columns: Sequence[list[str]], gap: str, width: int) -> Sequence[list[str]]:
    """Return as many columns as fit, at least three."""
    while len(columns) > 3 and 1 + sum(len(gap) + cell_len(column[0]) for column in columns if column) > width:
        columns = columns[:-1]
    return columns


def _column(cells: Sequence[str], least: int) -> list[str]:
    """Return the cells padded to a width that changes rarely, so that rows do not jump."""
    wide = max([least, *map(cell_len, cells)])
    return [cell + " " * (wide - cell_len(cell)) for cell in cells]


def _quiet(rank: RankProgress) -> str:
    return "nothing yet" if rank.no_progress_s is None else f"no progress {words.seconds(rank.no_progress_s)}"
