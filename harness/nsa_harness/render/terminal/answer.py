"""The explanation of a run that did not pass, as the last lines on the terminal.

It has the same parts as in the documents, but it must fit on the smallest screen. If there is too little room, call
stacks, table rows and remarks are left out. The advice, the cause and the line to look at are never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from nsa_harness.core.report import Outcome, Status
from nsa_harness.render import answer
from nsa_harness.render.terminal.layout import (
    NARROW,
    NO_WIDTH,
    command,
    labelled,
    padded,
    paragraph,
    table,
    table_width,
)
from nsa_harness.render.text import escaped
from nsa_harness.render.values import values_line
from nsa_harness.texts import words

MAX_LINES = 16  # on 80 columns; up to three lines with commands and the HTML page follow
ANSWER_LABEL_WIDTH = 10
_MIN_CELL_COLUMNS = 16  # a table cell is not wrapped to less than this width
_LOOK_AT = "    look at "
_MAX_CALLS = 12  # rows of calls that differ from a comm.lock file


@dataclass(frozen=True, kw_only=True)
class _Budget:
    """The maximum number of stacks, frames, rows and remarks in the explanation."""

    stacks: int
    frames: int  # per stack
    ranks: int  # rows of the table
    open_questions: int
    others: int  # other findings
    has_values: bool  # whether the values of names are shown
    has_gaps: bool  # whether there is an empty line between the parts


# The first budget whose answer fits is used.
_BUDGETS = (
    _Budget(stacks=3, frames=4, ranks=4, open_questions=3, others=1, has_values=True, has_gaps=True),
    _Budget(stacks=3, frames=3, ranks=4, open_questions=3, others=1, has_values=True, has_gaps=True),
    _Budget(stacks=3, frames=2, ranks=4, open_questions=3, others=1, has_values=True, has_gaps=True),
    _Budget(stacks=3, frames=2, ranks=4, open_questions=3, others=1, has_values=True, has_gaps=False),
    _Budget(stacks=3, frames=2, ranks=3, open_questions=2, others=1, has_values=True, has_gaps=False),
    _Budget(stacks=3, frames=1, ranks=3, open_questions=2, others=1, has_values=True, has_gaps=False),
    _Budget(stacks=3, frames=1, ranks=2, open_questions=1, others=0, has_values=True, has_gaps=False),
    _Budget(stacks=2, frames=1, ranks=2, open_questions=1, others=0, has_values=True, has_gaps=False),
    _Budget(stacks=1, frames=1, ranks=2, open_questions=1, others=0, has_values=False, has_gaps=False),
    _Budget(stacks=1, frames=1, ranks=2, open_questions=0, others=0, has_values=False, has_gaps=False),
)
_WITHOUT_A_SCREEN = _Budget(stacks=8, frames=8, ranks=16, open_questions=8, others=8, has_values=True, has_gaps=True)


def headline(outcome: Outcome) -> str:
    """Return a heading such as "HANG  train   deadlock · likely cause · 7.0 s after the last progress"."""
    return f"{words.verdict(outcome)}  {outcome.spec.scenario}   {answer.title(outcome)}"


def answer_lines(outcome: Outcome, width: int) -> list[str]:
    """Return lines that say what went wrong and what to do. On a screen, there are at most `MAX_LINES`."""
    outcome = escaped(outcome)
    lines: list[str] = []
    for budget in (_WITHOUT_A_SCREEN,) if width >= NO_WIDTH else _BUDGETS:
        lines = _lines_within(outcome, budget, width)
        if len(lines) <= MAX_LINES:
            break
    return lines


def _lines_within(outcome: Outcome, budget: _Budget, width: int) -> list[str]:
    """Return the lines of the explanation, with each part limited by the budget."""
    parts = (
        list(paragraph(headline(outcome), width, "", "      ")),
        list(paragraph(answer.sentence(outcome.verdict.summary), width, "  ")),
        [*_look_at(outcome, width), *_stacks(outcome, budget, width), *_communication(outcome, width)],
        [*ranks_table(outcome, budget.ranks, width, wrap=True), *_values(outcome, budget, width)],
        list(_what_to_do(outcome, budget, width)),
    )
    gap = [""] if budget.has_gaps else []
    lines = [line for part in parts if part for line in (*gap, *part)]
    return lines[len(gap) :]


def _look_at(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield the source line to change and the reason, unless the first call stack already shows the line."""
    place = outcome.culprit.place if outcome.culprit else None
    if place is None:
        return
    innermost = [frame for stack in outcome.stacks[:1] for frame in stack.frames[:1]]
    if any((frame.file, frame.line) == (place.file, place.line) for frame in innermost):
        return
    name = answer.short_names([place])(place) or words.place_details(place)
    reason = answer.why_look_at(outcome)
    statement = f"▸ {words.statement(place)}" if place.text else ""
    with_details = f"{_LOOK_AT}{name}   {words.place_details(place)}   {reason}"
    has_room = cell_len(f"{with_details}   {statement}") <= width and words.place_details(place)
    text = with_details if has_room else f"{_LOOK_AT}{name}   {reason}"
    yield from _with_statement(text, statement, width, " " * len(_LOOK_AT))


def _with_statement(text: str, statement: str, width: int, indent: str) -> Iterator[str]:
    """Yield a line with a source line behind it. If both do not fit, the source line is wrapped below the text."""
    line = f"{text}   {statement}" if statement else text
    if cell_len(line) <= width:
        yield line.rstrip()
        return
    text = text.rstrip()
    yield from paragraph(text.lstrip(), width, text[: len(text) - len(text.lstrip())], indent)
    yield from paragraph(statement, width, indent, f"{indent}  ") if statement else ()


def _stacks(outcome: Outcome, budget: _Budget, width: int) -> Iterator[str]:
    """Yield the innermost frames of each call stack as a table."""
    stacks = outcome.stacks[: budget.stacks]
    name = answer.frame_namer(stacks)
    owners = {id(stack): answer.stack_owner(stack, outcome.spec.ranks) for stack in stacks}
    rows = [
        ("" if number else owners[id(stack)], name(frame), frame.function or "", number, words.statement(frame))
        for stack in stacks
        for number, frame in enumerate(stack.frames[: budget.frames])
    ]
    columns = [max(map(cell_len, column)) for column in zip(*(row[:3] for row in rows), strict=True)]
    for *cells, number, text in rows:
        texts = [padded(cell, column) for cell, column in zip(cells, columns, strict=True)]
        statement = f"{' ' if number else '▸'} {text}" if text else ""
        yield from _with_statement(f"    {'   '.join(texts)}", statement, width, " " * 8)


def ranks_table(outcome: Outcome, max_rows: int, width: int, *, wrap: bool = False) -> Iterator[str]:
    """Yield the rank table with at most `max_rows` rows, always with the culprits. `wrap`: wrap long cells."""
    head, rows, culprits = answer.rank_table(outcome)
    head = (*head, "")
    with_remarks = [(*row, "◀ culprit" if culprit else "") for row, culprit in zip(rows, culprits, strict=True)]
    numbers = sorted(range(len(rows)), key=lambda number: not culprits[number])
    if len(rows) > max_rows + 1:
        numbers = numbers[:max_rows]
    visible: Sequence[Sequence[str]] = [with_remarks[number] for number in sorted(numbers)]
    if visible:
        wrapped = list(_with_wrapped_cells(head, visible, width)) if wrap and width >= NARROW else visible
        yield from table(head, wrapped if table_width(head, wrapped) <= width else visible, width)
    if len(rows) > len(visible):
        yield from paragraph(f"and {len(rows) - len(visible)} more rows, all with -v", width, "  ")


def _with_wrapped_cells(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Sequence[str]]:
    """Yield the rows of a table, with the widest column wrapped onto rows of its own if the table is too wide."""
    too_many = table_width(head, rows) - width
    columns = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    widest = columns.index(max(columns))
    limit = max(columns[widest] - max(too_many, 0), _MIN_CELL_COLUMNS)
    for row in rows:
        first, *others = paragraph(row[widest], limit)
        yield (*row[:widest], first, *row[widest + 1 :])
        for text in others:
            yield tuple(text if column == widest else "" for column in range(len(row)))


def _communication(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield a table of the calls that differ from a comm.lock file."""
    head, rows = answer.communication_table(outcome)
    if rows:
        yield from table(head, rows[:_MAX_CALLS], width, "    ")
    if len(rows) > _MAX_CALLS:
        yield f"    and {words.plural(len(rows) - _MAX_CALLS, 'more row')} in SUMMARY.md"


def _values(outcome: Outcome, budget: _Budget, width: int) -> Iterator[str]:
    if budget.has_values:
        columns = width - ANSWER_LABEL_WIDTH - len("  ")
        yield from labelled("values", values_line(outcome, columns), width, ANSWER_LABEL_WIDTH)


def _what_to_do(outcome: Outcome, budget: _Budget, width: int) -> Iterator[str]:
    """Yield the advice, the open questions, the cause, other findings and the way in which the run ended."""
    cause = answer.cause_of(outcome)
    if outcome.verdict.status is Status.SKIP:
        return
    yield from labelled("raised", answer.raised(outcome), width, ANSWER_LABEL_WIDTH)
    advice = answer.advice(outcome)
    label, text = ("do", advice) if advice else ("means", words.meaning(outcome))
    yield from labelled(label, text, width, ANSWER_LABEL_WIDTH)
    for text in cause.left_open[: budget.open_questions] if cause else ():
        yield from labelled("open", text, width, ANSWER_LABEL_WIDTH)
    yield from command("cause", cause.code if cause and advice else "", width, ANSWER_LABEL_WIDTH)
    for finding in answer.other_findings(outcome)[: budget.others]:
        text = f"{finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
        yield from labelled("also", text, width, ANSWER_LABEL_WIDTH)
    yield from labelled("ended", words.ending(outcome), width, ANSWER_LABEL_WIDTH)
