"""The explanation of a run that did not pass, as the last lines on the terminal.

It has the same parts as in the documents, but it must fit on the smallest screen. If there is too little room, call
stacks and table rows are dropped first; the advice is shortened last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from nsa_harness.core.report import Outcome, Status
from nsa_harness.render import answer
from nsa_harness.render.terminal.layout import NARROW, command, cropped, labelled, padded, paragraph, table, table_width
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning

MAX_LINES = 13  # on 80 columns; the next command and the path of the HTML page follow
ANSWER_LABEL_WIDTH = 10
_FUNCTION_COLUMNS = 24
_MIN_CELL_COLUMNS = 16  # a table cell is not shortened below this width


@dataclass(frozen=True, kw_only=True)
class _Budget:
    """The maximum number of lines, stacks or rows in each part of the explanation."""

    sentence: int  # lines
    stacks: int
    frames: int  # per stack
    ranks: int  # rows of the table
    advice: int  # lines
    open_questions: int
    has_extras: bool  # whether one other finding, and how the run ended, are shown
    has_gaps: bool  # whether there is an empty line between the parts


# The first budget whose answer fits is used.
_BUDGETS = (
    _Budget(sentence=4, stacks=3, frames=4, ranks=4, advice=6, open_questions=3, has_extras=True, has_gaps=True),
    _Budget(sentence=4, stacks=3, frames=3, ranks=4, advice=6, open_questions=3, has_extras=True, has_gaps=True),
    _Budget(sentence=4, stacks=3, frames=2, ranks=4, advice=6, open_questions=3, has_extras=True, has_gaps=True),
    _Budget(sentence=4, stacks=3, frames=2, ranks=4, advice=6, open_questions=3, has_extras=True, has_gaps=False),
    _Budget(sentence=4, stacks=3, frames=2, ranks=3, advice=6, open_questions=2, has_extras=True, has_gaps=False),
    _Budget(sentence=4, stacks=3, frames=1, ranks=3, advice=6, open_questions=2, has_extras=True, has_gaps=False),
    _Budget(sentence=4, stacks=3, frames=1, ranks=2, advice=6, open_questions=1, has_extras=False, has_gaps=False),
    _Budget(sentence=4, stacks=2, frames=1, ranks=2, advice=6, open_questions=1, has_extras=False, has_gaps=False),
    _Budget(sentence=4, stacks=1, frames=1, ranks=2, advice=6, open_questions=1, has_extras=False, has_gaps=False),
    _Budget(sentence=4, stacks=1, frames=1, ranks=2, advice=4, open_questions=0, has_extras=False, has_gaps=False),
    _Budget(sentence=3, stacks=1, frames=1, ranks=2, advice=3, open_questions=0, has_extras=False, has_gaps=False),
)


def headline(outcome: Outcome) -> str:
    """Return the heading for a run.

    Example: "HANG  train   deadlock · likely cause · 7.0 s after the last progress".
    """
    return f"{words.verdict(outcome)}  {outcome.spec.scenario}   {answer.title(outcome)}"


def answer_lines(outcome: Outcome, width: int) -> list[str]:
    """Return lines that say what went wrong and what to do.

    Parts are shortened or left out until the lines fit into `MAX_LINES`.
    """
    outcome = escaped(outcome)
    lines: list[str] = []
    for budget in _BUDGETS:
        lines = _lines_within(outcome, budget, width)
        if len(lines) <= MAX_LINES:
            break
    return lines


def _lines_within(outcome: Outcome, budget: _Budget, width: int) -> list[str]:
    """Return the lines of the explanation, with each part limited by the budget."""
    sentence = paragraph(answer.sentence(outcome.verdict.summary), width, "  ")
    parts = (
        list(at_most(2, paragraph(headline(outcome), width, "", "      "), width)),
        list(at_most(budget.sentence, sentence, width)),
        [*_look_at(outcome, width), *_stacks(outcome, budget, width)],
        list(ranks_table(outcome, budget.ranks, width, shorten=True)),
        list(_what_to_do(outcome, budget, width)),
    )
    gap = [""] if budget.has_gaps else []
    lines = [line for part in parts if part for line in (*gap, *part)]
    return lines[len(gap) :]


def at_most(limit: int, lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield the first `limit` lines. The last of them ends in "…" if lines are left out."""
    every_line = list(lines)
    yield from every_line[: limit - 1]
    if len(every_line) > limit:
        yield cropped(f"{every_line[limit - 1]} …", width)
    else:
        yield from every_line[limit - 1 :]


def _look_at(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield a line that shows the source line to change, unless the first call stack already shows it."""
    place = outcome.culprit.place if outcome.culprit else None
    if place is None:
        return
    innermost = [frame for stack in outcome.stacks[:1] for frame in stack.frames[:1]]
    if any((frame.file, frame.line) == (place.file, place.line) for frame in innermost):
        return
    name = answer.short_names([place])(place)
    source = f"▸ {words.statement(place)}" if place.text else ""
    for details in (words.place_details(place), place.function):
        line = f"    look at {'   '.join(part for part in (name, details, source) if part)}"
        if cell_len(line) <= width:
            break
    yield cropped(line, width)


def _stacks(outcome: Outcome, budget: _Budget, width: int) -> Iterator[str]:
    """Yield the innermost frames of each call stack as a table."""
    stacks = outcome.stacks[: budget.stacks]
    name = answer.frame_namer(stacks)
    rows = [
        ("" if number else answer.stack_owner(stack), name(frame), frame.function or "", number, words.statement(frame))
        for stack in stacks
        for number, frame in enumerate(stack.frames[: budget.frames])
    ]
    if not rows:
        return
    texts = zip(*(row[:3] for row in rows), strict=True)
    owner_columns, place_columns, function_columns = (max(map(cell_len, column)) for column in texts)
    for owner, place, function, number, text in rows:
        cells = (
            padded(owner, owner_columns),
            padded(place, place_columns),
            padded(cropped(function, _FUNCTION_COLUMNS), min(function_columns, _FUNCTION_COLUMNS)),
            f"{' ' if number else '▸'} {text}" if text else "",
        )
        yield cropped(f"    {'   '.join(cells)}".rstrip(), width)


def ranks_table(outcome: Outcome, max_rows: int, width: int, *, shorten: bool = False) -> Iterator[str]:
    """Yield the lines of the rank table, with at most `max_rows` rows.

    If rows are left out, those of culprits are kept. `shorten`: cut the middle out of long cells, so that the table
    fits the width.
    """
    head, rows, culprits = answer.rank_table(outcome)
    head = (*head, "")
    with_remarks = [(*row, "◀ culprit" if culprit else "") for row, culprit in zip(rows, culprits, strict=True)]
    numbers = sorted(range(len(rows)), key=lambda number: not culprits[number])[:max_rows]
    visible: Sequence[Sequence[str]] = [with_remarks[number] for number in sorted(numbers)]
    if visible and shorten and width >= NARROW:
        visible = _with_shorter_cells(head, visible, width)
    if visible:
        yield from table(head, visible, width)
    if len(rows) > len(visible):
        yield from paragraph(f"{words.plural(len(rows) - len(visible), 'more row')}: use -v", width, "  ")


def _with_shorter_cells(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Sequence[Sequence[str]]:
    """Return the rows of a table, with the widest column shortened if the table is too wide."""
    too_many = table_width(head, rows) - width
    if too_many <= 0:
        return rows
    columns = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    widest = columns.index(max(columns))
    limit = max(columns[widest] - too_many, _MIN_CELL_COLUMNS)
    return [(*row[:widest], words.middle(row[widest], limit), *row[widest + 1 :]) for row in rows]


def _what_to_do(outcome: Outcome, budget: _Budget, width: int) -> Iterator[str]:
    """Yield lines with advice for the user, the questions that are still open, and the cause of the failure."""
    cause = answer.cause_of(outcome)
    if outcome.verdict.status is Status.SKIP:
        return
    label, advice = ("do", cause.advice) if cause else ("means", meaning(outcome))
    yield from at_most(budget.advice, labelled(label, advice, width, ANSWER_LABEL_WIDTH), width)
    for text in cause.left_open[: budget.open_questions] if cause else ():
        yield from at_most(2, labelled("open", text, width, ANSWER_LABEL_WIDTH), width)
    if cause is not None:
        explain = f"nsa-harness explain {cause.code}"
        both = f"{cause.code} · {explain}"
        has_room = cell_len(both) + ANSWER_LABEL_WIDTH + 2 <= width
        yield from command("cause", both if has_room else explain, width, ANSWER_LABEL_WIDTH)
    if budget.has_extras:
        for finding in answer.other_findings(outcome)[:1]:
            text = f"{finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
            yield from at_most(1, labelled("also", text, width, ANSWER_LABEL_WIDTH), width)
        yield from at_most(1, labelled("ended", outcome.ending_text, width, ANSWER_LABEL_WIDTH), width)
