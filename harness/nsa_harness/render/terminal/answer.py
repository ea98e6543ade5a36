"""The answer on a terminal: the last lines of a run that did not pass, so few that the smallest screen holds them.

It has the same parts as the answer in the documents, but the terminal has no room for all of each part.
"""

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

MAX_LINES = 13  # of the whole answer on 80 columns; below it are the next command and the run directory
ANSWER_LABEL_WIDTH = 10
_MAX_STACKS = 3
_FUNCTION_COLUMNS = 24


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How much of each part is shown."""

    sentence: int  # lines
    frames: int  # of each stack
    ranks: int  # rows of the table
    advice: int  # lines
    left_open: int  # other readings
    others: bool  # another finding, and how the run ended
    spaced: bool  # an empty line between the parts


_FORMS = (
    _Form(sentence=4, frames=4, ranks=4, advice=4, left_open=3, others=True, spaced=True),
    _Form(sentence=4, frames=3, ranks=4, advice=4, left_open=3, others=True, spaced=True),
    _Form(sentence=4, frames=2, ranks=4, advice=4, left_open=3, others=True, spaced=True),
    _Form(sentence=4, frames=2, ranks=4, advice=4, left_open=3, others=True, spaced=False),
    _Form(sentence=4, frames=2, ranks=3, advice=2, left_open=2, others=True, spaced=False),
    _Form(sentence=4, frames=1, ranks=3, advice=2, left_open=2, others=True, spaced=False),
    _Form(sentence=3, frames=1, ranks=2, advice=2, left_open=1, others=False, spaced=False),
    _Form(sentence=2, frames=1, ranks=2, advice=1, left_open=0, others=False, spaced=False),
)


def headline(outcome: Outcome) -> str:
    """Return "HANG  NAME   deadlock · likely cause · 5.2 s after the last progress"."""
    return f"{words.verdict(outcome)}  {outcome.spec.scenario}   {answer.title(outcome)}"


def answer_lines(outcome: Outcome, width: int) -> list[str]:
    """Return what is wrong, where, which rank waits for which, and what to do: as much of each as fits."""
    outcome = escaped(outcome)
    lines: list[str] = []
    for form in _FORMS:
        lines = _lines_in_form(outcome, form, width)
        if len(lines) <= MAX_LINES:
            break
    return lines


def _lines_in_form(outcome: Outcome, form: _Form, width: int) -> list[str]:
    parts = (
        list(at_most(2, paragraph(headline(outcome), width, "", "      "), width)),
        list(at_most(form.sentence, paragraph(answer.sentence(outcome.verdict.summary), width, "  "), width)),
        [*_look_at(outcome, width), *_stacks(outcome, form.frames, width)],
        list(ranks_table(outcome, form.ranks, width)),
        list(_to_do(outcome, form, width)),
    )
    between = [""] if form.spaced else []
    lines = [line for part in parts if part for line in (*between, *part)]
    return lines[len(between) :]


def at_most(most: int, lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield at most `most` lines; mark the last with … if more follow."""
    kept = list(lines)
    yield from kept[: most - 1]
    if len(kept) > most:
        yield cropped(f"{kept[most - 1]} …", width)
    else:
        yield from kept[most - 1 :]


def _look_at(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield the line to change, unless it is the innermost frame of the first stack."""
    place = outcome.culprit.place if outcome.culprit else None
    if place is None:
        return
    first = [frame for stack in outcome.stacks[:1] for frame in stack.frames[:1]]
    if any((frame.file, frame.line) == (place.file, place.line) for frame in first):
        return
    source = f"▸ {words.statement(place)}" if place.text else ""
    known = (answer.short_names([place])(place), words.place_details(place), source)
    yield cropped(f"    look at {'   '.join(part for part in known if part)}", width)


def _stacks(outcome: Outcome, frames: int, width: int) -> Iterator[str]:
    """Yield the innermost frames of each stack, in columns; the owner is beside the first frame."""
    stacks = outcome.stacks[:_MAX_STACKS]
    name = answer.names_of(stacks)
    rows = [
        ("" if number else answer.stack_owner(stack), name(frame), frame.function or "", number, words.statement(frame))
        for stack in stacks
        for number, frame in enumerate(stack.frames[:frames])
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


def ranks_table(outcome: Outcome, most: int, width: int) -> Iterator[str]:
    """Yield a table of at most `most` rows. The rows of culprits come before all others if not every row fits."""
    head, rows, culprits = answer.rank_table(outcome)
    numbered = sorted(range(len(rows)), key=lambda number: not culprits[number])[:most]
    shown = [(*rows[number], "◀ culprit" if culprits[number] else "") for number in sorted(numbered)]
    if shown:
        yield from table((*head, ""), shown, width)
    if len(rows) > len(shown):
        yield from paragraph(f"{len(rows) - len(shown)} more rows; -v shows them", width, "  ")


def _to_do(outcome: Outcome, form: _Form, width: int) -> Iterator[str]:
    cause = answer.cause_of(outcome)
    if outcome.verdict.status is Status.SKIP:
        return
    label, advice = ("do", cause.advice) if cause else ("means", meaning(outcome))
    yield from at_most(form.advice, labelled(label, advice, width, ANSWER_LABEL_WIDTH), width)
    for text in cause.left_open[: form.left_open] if cause else ():
        yield from at_most(1, labelled("or", text, width, ANSWER_LABEL_WIDTH), width)
    if cause is not None:
        explain = f"{cause.code} · nsa-harness explain {cause.code}"
        yield from at_most(1, labelled("cause", explain, width, ANSWER_LABEL_WIDTH), width)
    if form.others:
        for finding in answer.others(outcome)[:1]:
            text = f"{finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
            yield from at_most(1, labelled("also", text, width, ANSWER_LABEL_WIDTH), width)
        yield from at_most(1, labelled("ended", outcome.ended, width, ANSWER_LABEL_WIDTH), width)
