"""What counts as right: an answer of the harness against the truth of its program, shares, and the one table."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

PAGE_WIDTH = 118  # characters in a line of a generated page
LINES_OFF = 2  # a line that is named this close to one of the truth is right
CERTAIN = 0.9  # a cause with this confidence or more is called certain
PARTS = ("verdict", "rank", "cause", "line", "silent")
COLUMNS = ("cases", "answer", *PARTS, "certain and wrong", "false HANG")

Answer = Mapping[str, Any]  # verdict, cause, ranks, file, line, confidence, beside
Row = dict[str, str]  # column of the table -> text


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is right to say of one run. A part that is empty is not asked for."""

    verdict: str
    faulty: bool = True
    causes: frozenset[str] = frozenset()
    ranks: frozenset[tuple[int, ...]] = frozenset()
    places: tuple[tuple[str, int, int], ...] = ()  # file, first line, last line

    @property
    def silent(self) -> bool:
        """Whether the program passes in spite of its fault, so that a finding has to name it."""
        return self.faulty and self.verdict == "PASS"


def compare(truth: Truth, answer: Answer) -> dict[str, bool | None]:
    """Return for each part whether the answer is right; None where the truth asks nothing of the kind."""
    judged = truth.faulty and not truth.silent
    return {
        "verdict": answer["verdict"] == truth.verdict,
        "rank": tuple(sorted(answer["ranks"])) in truth.ranks if judged and truth.ranks else None,
        "cause": answer["cause"] in truth.causes if judged and truth.causes else None,
        "line": _is_near(truth, answer) if judged and truth.places else None,
        "silent": bool(truth.causes & set(answer["beside"])) if truth.silent else None,
    }


def _is_near(truth: Truth, answer: Answer) -> bool:
    line = answer["line"] or 0
    return any(
        answer["file"] == file and first - LINES_OFF <= line <= last + LINES_OFF for file, first, last in truth.places
    )


def mistakes(right: Mapping[str, bool | None]) -> list[str]:
    """The parts that are wrong."""
    return [part for part in PARTS if right.get(part) is False]


def share(values: Iterable[bool | None]) -> str:
    """The count as text, "12 of 23". None does not count."""
    counts = Counter(value for value in values if value is not None)
    return f"{counts[True]} of {counts.total()}"


def shares(rows: Sequence[Mapping[str, Any]], parts: Sequence[str] = PARTS) -> Row:
    """How many of the rows are right, part by part."""
    return {part: share(row[part] for row in rows) for part in parts}


def table(rows: Mapping[str, Row], heads: Sequence[str] = COLUMNS) -> Iterator[str]:
    """Yield the lines of a table for the terminal, without the columns that nothing is in."""
    used = [head for head in heads if any(head in row for row in rows.values())]
    cells = [["", *used], *([name, *(row.get(head, "-") for head in used)] for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        numbers = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *numbers])


def paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph for a generated page, wrapped at PAGE_WIDTH; line breaks in `text` are spaces."""
    return textwrap.wrap(" ".join(text.split()), PAGE_WIDTH)


def chance_of_as_many(wrong: int, of: int, chance: float) -> float:
    """Return how likely `wrong` or more of `of` are, where each is wrong with this chance (binomial, one-sided)."""
    return sum(comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(wrong, of + 1))


def interval(wrong: int, of: int) -> str:
    """The exact interval of 95 % (Clopper-Pearson), found by bisection on the binomial distribution."""
    low = 0.0 if wrong == 0 else _where_the_tail_is(wrong, of, 0.025)
    high = 1.0 if wrong == of else _where_the_tail_is(wrong + 1, of, 0.975)
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _where_the_tail_is(wrong: int, of: int, share_of_it: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_of_as_many(wrong, of, middle) < share_of_it else (low, middle)
    return low
