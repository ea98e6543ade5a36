"""The live view: what runs at this moment as lines, a pure function of the values and the size of the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from nsa_harness.core.evidence.live import Progress, RankProgress
from nsa_harness.core.report import Status
from nsa_harness.render.terminal.layout import NARROW, cropped, paragraph
from nsa_harness.render.text import escape
from nsa_harness.texts import words

SHOWN_RANKS = 8  # of one attempt
_NAME_COLUMNS, _MODULE_COLUMNS = 12, 12  # a name keeps at least these; a narrower module says nothing
_ONCE = "interrupted: taking stacks, ending the processes, writing the report; once more kills at once"
_TWICE = "interrupted twice: killing now; `nsa-harness report` judges what was seen"


@dataclass(frozen=True, kw_only=True)
class Running:
    """One attempt that runs."""

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
    """At most `height` lines of at most `width` columns: where little fits, what is quiet for longest stays."""
    if not view.running:
        return []
    tail = [*_plan_lines(view, width), *interrupted_lines(view.interrupts, width)][: max(height - 2, 0)]
    heads = [[_head(running, width), *_suspicion(running, width)] for running in view.running]
    spare = height - len(tail) - sum(map(len, heads))
    shown = min(max(spare // len(heads), 0), SHOWN_RANKS + 1)
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
    """What Ctrl-C does, or TERM: the first one asks, the second one kills."""
    if interrupts == 0:
        return []
    return [cropped(line, width) for line in paragraph(_ONCE if interrupts == 1 else _TWICE, width, "  ")]


def _plan_lines(view: View, width: int) -> Iterator[str]:
    """ "5 of 12 done · 4 PASS · 1 HANG · 1 not as expected · about 2 min left"; a single run has nothing to add up."""
    final = [one for one in view.ended if one.counts]
    done = sum(one.status is not Status.SKIP for one in final)
    planned = max(view.planned, done + len(view.running))
    if planned < 2:
        return
    given = [(status, sum(one.status is status for one in final)) for status in words.LOUDEST_FIRST]
    surprises = sum(not one.expected for one in final)
    parts = [f"{done} of {planned} done"]
    parts += [f"about {_whole(view.left_s)} left"] if view.left_s is not None else []
    parts += [f"{count} {status.value}" for status, count in given if count]
    parts += [f"{surprises} not as expected"] if surprises else []
    whole = " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
    yield from (cropped(line, width) for line in paragraph(whole, width, "  "))


def _whole(seconds: float) -> str:
    """An estimate has no tenths."""
    return f"{max(round(seconds), 1)} s" if seconds < 99.5 else words.seconds(float(round(seconds)))


def _head(running: Running, width: int) -> str:
    """Name, phase, time and time left; the last ones go first where the line is narrow."""
    progress = running.progress
    remarks = [escape(running.phase), words.seconds(progress.elapsed_s)]
    if progress.deadline_s is not None:
        left_s = max(progress.deadline_s - progress.elapsed_s, 0.0)
        remarks.append(f"at most {words.seconds(left_s)} left")
    name = escape(running.name)
    while remarks and 2 + min(cell_len(name), _NAME_COLUMNS) + cell_len(_said(remarks)) > width:
        remarks.pop()
    said = _said(remarks)
    return cropped(f"  {cropped(name, max(width - cell_len(said) - 2, 0))}{said}", width)


def _said(remarks: Sequence[str]) -> str:
    return f"   {' · '.join(remarks)}" if remarks else ""


def _suspicion(running: Running, width: int) -> list[str]:
    if running.suspicion is None:
        return []
    lines = list(paragraph(f"stall   {escape(running.suspicion)}", width, "    ", "            "))
    return [cropped(line, width) for line in (lines if width >= NARROW else lines[:3])]


def _ranks(ranks: Sequence[RankProgress], lines: int, width: int) -> Iterator[str]:
    """One row a rank, the quietest where not all fit."""
    fits = len(ranks) <= min(lines, SHOWN_RANKS)
    shown = len(ranks) if fits else max(lines - 1, min(lines, 1))
    quietest = sorted(ranks, key=lambda rank: -(rank.quiet_s or 0.0))[:shown]
    yield from _rows(sorted(quietest, key=lambda rank: rank.rank), width)
    if shown < min(lines, len(ranks)):
        omitted = len(ranks) - shown
        yield cropped(f"    {words.plural(omitted, 'more rank')}, with progress since", width)


def _rows(ranks: Sequence[RankProgress], width: int) -> Iterator[str]:
    """Aligned columns. Those that say least go first: the module, the memory, the step (the head has the slowest)."""
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
    """As many columns as fit, the first three always."""
    while len(columns) > 3 and 1 + sum(len(gap) + cell_len(column[0]) for column in columns if column) > width:
        columns = columns[:-1]
    return columns


def _column(cells: Sequence[str], least: int) -> list[str]:
    """Padded to a width that changes rarely, so that rows do not dance."""
    wide = max([least, *map(cell_len, cells)])
    return [cell + " " * (wide - cell_len(cell)) for cell in cells]


def _quiet(rank: RankProgress) -> str:
    return "nothing yet" if rank.quiet_s is None else f"no progress {words.seconds(rank.quiet_s)}"
