"""The answer on a terminal: the last lines of a run that did not pass, so few that the smallest screen holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len

from nsa_harness.core.report import Outcome, Status
from nsa_harness.render import answer
from nsa_harness.render.terminal.layout import cropped, labelled, padded, paragraph, table
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning

LINES = 13  # of the whole answer on 80 columns; the command to go on with, and where all lies, stand below it
LABEL_WIDTH = 10
_STACKS = 3
_FUNCTION_COLUMNS = 24


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How much of each part is told."""

    sentence: int  # lines
    frames: int  # of each stack
    ranks: int  # rows of the table
    advice: int  # lines
    left_open: int  # other readings
    besides: bool  # what else was found, and how it ended
    spaced: bool  # a line between the parts


_FORMS = (
    _Form(sentence=4, frames=4, ranks=4, advice=4, left_open=3, besides=True, spaced=True),
    _Form(sentence=4, frames=3, ranks=4, advice=4, left_open=3, besides=True, spaced=True),
    _Form(sentence=4, frames=2, ranks=4, advice=4, left_open=3, besides=True, spaced=True),
    _Form(sentence=4, frames=2, ranks=4, advice=4, left_open=3, besides=True, spaced=False),
    _Form(sentence=4, frames=2, ranks=3, advice=2, left_open=2, besides=True, spaced=False),
    _Form(sentence=4, frames=1, ranks=3, advice=2, left_open=2, besides=True, spaced=False),
    _Form(sentence=3, frames=1, ranks=2, advice=2, left_open=1, besides=False, spaced=False),
    _Form(sentence=2, frames=1, ranks=2, advice=1, left_open=0, besides=False, spaced=False),
)


def headline(outcome: Outcome) -> str:
    """ "HANG  NAME   deadlock · likely cause · 5.2 s after the last progress"."""
    return f"{words.verdict(outcome)}  {outcome.spec.scenario}   {answer.title(outcome)}"


def answer_lines(outcome: Outcome, width: int) -> list[str]:
    """What is wrong, where, who waits for whom, and what to do: as much of each as fits."""
    outcome = escaped(outcome)
    told: list[str] = []
    for form in _FORMS:
        told = _told(outcome, form, width)
        if len(told) <= LINES:
            break
    return told


def _told(outcome: Outcome, form: _Form, width: int) -> list[str]:
    parts = (
        list(at_most(2, paragraph(headline(outcome), width, "", "      "), width)),
        list(at_most(form.sentence, paragraph(answer.sentence(outcome.verdict.summary), width, "  "), width)),
        [*_where(outcome, width), *_stacks(outcome, form.frames, width)],
        list(ranks_table(outcome, form.ranks, width)),
        list(_to_do(outcome, form, width)),
    )
    between = [""] if form.spaced else []
    lines = [line for part in parts if part for line in (*between, *part)]
    return lines[len(between) :]


def at_most(most: int, lines: Iterable[str], width: int) -> Iterator[str]:
    """The first of the lines; the last of them says that there are more."""
    kept = list(lines)
    yield from kept[: most - 1]
    if len(kept) > most:
        yield cropped(f"{kept[most - 1]} …", width)
    else:
        yield from kept[most - 1 :]


def _where(outcome: Outcome, width: int) -> Iterator[str]:
    """The line to change, where it is not the one on top of the first stack."""
    place = outcome.culprit.place if outcome.culprit else None
    if place is None:
        return
    first = [frame for stack in outcome.stacks[:1] for frame in stack.frames[:1]]
    if any((one.file, one.line) == (place.file, place.line) for one in first):
        return
    source = f"▸ {words.statement(place)}" if place.text else ""
    named = (answer.short_names([place])(place), words.place_details(place), source)
    yield cropped(f"    look at {'   '.join(part for part in named if part)}", width)


def _stacks(outcome: Outcome, frames: int, width: int) -> Iterator[str]:
    rows = answer.stack_rows(outcome.stacks[:_STACKS], frames)
    who, where, function = (
        (max(map(cell_len, column), default=0) for column in zip(*(row[:3] for row in rows), strict=True))
        if rows
        else (0, 0, 0)
    )
    for row in rows:
        known = (
            padded(row.who, who),
            padded(row.where, where),
            padded(cropped(row.function, _FUNCTION_COLUMNS), min(function, _FUNCTION_COLUMNS)),
            f"{'▸' if row.innermost else ' '} {row.text}" if row.text else "",
        )
        yield cropped(f"    {'   '.join(known)}".rstrip(), width)


def ranks_table(outcome: Outcome, most: int, width: int) -> Iterator[str]:
    """At most so many rows; culprits are never among those that are left out."""
    head, rows, culprits = answer.rank_table(outcome)
    numbered = sorted(range(len(rows)), key=lambda number: not culprits[number])[:most]
    shown = [(*rows[number], "◀ culprit" if culprits[number] else "") for number in sorted(numbered)]
    if shown:
        yield from table((*head, ""), shown, width)
    if len(rows) > len(shown):
        yield from paragraph(f"{len(rows) - len(shown)} more rows; -v shows them", width, "  ")


def _to_do(outcome: Outcome, form: _Form, width: int) -> Iterator[str]:
    said = answer.cause_of(outcome)
    if outcome.verdict.status is Status.SKIP:
        return
    advice = said.advice if said else meaning(outcome)
    yield from at_most(form.advice, labelled("do" if said else "means", advice, width, LABEL_WIDTH), width)
    for text in said.left_open[: form.left_open] if said else ():
        yield from at_most(1, labelled("or", text, width, LABEL_WIDTH), width)
    if said is not None:
        yield from at_most(
            1, labelled("cause", f"{said.code} · nsa-harness explain {said.code}", width, LABEL_WIDTH), width
        )
    if form.besides:
        for one in answer.others(outcome)[:1]:
            told = f"{one.code} ({words.certainty(one.confidence)}): {one.claim}"
            yield from at_most(1, labelled("also", told, width, LABEL_WIDTH), width)
        yield from at_most(1, labelled("ended", outcome.ended, width, LABEL_WIDTH), width)
