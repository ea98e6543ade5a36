"""The sections of a report about one run, in the order in which every document has them.

`run_section` builds them once. Each writer (documents/summary_md.py, documents/html.py, terminal/screen.py) decides
how a kind of section looks in its format, and escapes every text for it. It skips a kind that its format cannot draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.report import Finding, Outcome, Report, Severity, Status
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render import answer
from nsa_harness.render.text import link_target
from nsa_harness.texts import words

_MAX_RANK_ROWS = 8  # more ranks are grouped by where they are, and the row of each rank is folded


class Span(NamedTuple):
    """A piece of a line. `run` is the number of the run that the piece links to, `status` the verdict of that run."""

    text: str
    code: bool = False
    strong: bool = False
    quiet: bool = False
    run: int | None = None
    status: Status | None = None


Line = tuple[Span, ...]  # its pieces are joined by spaces


def line(text: str) -> Line:
    return (Span(text),)


def lines(rows: Iterable[Iterable[str]]) -> tuple[tuple[Line, ...], ...]:
    return tuple(tuple(map(line, row)) for row in rows)


def plain(line: Line) -> str:
    return " ".join(span.text for span in line if span.text)


def joined(texts: Iterable[str]) -> str:
    return " · ".join(texts)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The heading of a report of several runs."""

    report: Report


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything about one run, under its verdict and name. `alone`: it is the only run of the report."""

    number: int  # from 1, in the order of the report
    outcome: Outcome
    alone: bool
    sections: tuple[Section, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Sections under a title. The title of a chapter has the rank of a run's; a folded part is opened by its title."""

    title: str
    sections: tuple[Section, ...]
    chapter: bool = False
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What happened in one sentence, the line to look at, and the call stacks."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The collectives around the divergence, and the ranks over time. Only the page can draw them."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A paragraph. A quiet one is a remark. A label is set in bold in front of a text whose backticks mark code."""

    line: Line
    label: str = ""
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Search:
    """The bisection whose probes are the runs of the report. For the page; elsewhere BISECT.md describes it."""

    report: BisectReport


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. A head that ends in a colon aligns its column to the right; `extra` columns may go on a small screen."""

    title: str  # for a screen reader
    head: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    kind: str = ""  # a class of the style sheet
    extra: tuple[str, ...] = ()
    culprits: frozenset[int] = frozenset()  # numbers of rows


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One row for each run, worst first. Runs in `in_full` have sections of their own, to which the row links."""

    runs: tuple[tuple[int, Outcome], ...]
    in_full: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Bullets:
    title: str
    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was run, a line each."""

    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Grounds:
    """Labelled lists that the verdict rests on."""

    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class FindingDetails:
    """A finding with its proof. Advice and open questions of the cause are in the answer already."""

    finding: Finding
    severity: Severity
    is_cause: bool


@dataclass(frozen=True, kw_only=True)
class Command:
    text: str


class File(NamedTuple):
    path: str
    address: str | None  # None if the path names several files, or leads out of the run directory
    remark: str


@dataclass(frozen=True, kw_only=True)
class Files:
    items: tuple[File, ...]


Section = (
    Counts
    | Run
    | Part
    | Answer
    | Pictures
    | Search
    | Sentence
    | Table
    | Overview
    | Bullets
    | Facts
    | Grounds
    | FindingDetails
    | Command
    | Files
)


def run_section(number: int, outcome: Outcome, *, alone: bool) -> Run:
    """Return the answer, then what it rests on, then how to repeat the run and which files it left."""
    sections = (
        Answer(outcome=outcome),
        *_ranks(outcome),
        *_to_do(outcome),
        Pictures(outcome=outcome),
        Part(title="Evidence", sections=(Sentence(line=line(words.meaning(outcome))), *evidence_sections(outcome))),
        Part(title="Repeat it", sections=tuple(_repeat(outcome))),
        *_files(outcome),
    )
    return Run(number=number, outcome=outcome, alone=alone, sections=sections)


def _to_do(outcome: Outcome) -> Iterator[Section]:
    cause = answer.cause_of(outcome)
    if cause and cause.advice:
        yield Sentence(label="Do:", line=line(cause.advice))
    if cause and cause.left_open:
        yield Bullets(title="Left open by the evidence:", items=cause.left_open)


def evidence_sections(outcome: Outcome) -> Iterator[Section]:
    """Yield what the verdict rests on."""
    if facts := tuple(filter(None, (*words.facts(outcome), words.culprit_line(outcome)))):
        yield Facts(items=facts)
    proof = (("why a hang", outcome.why or ""), ("last shared", words.last_shared(outcome)))
    yield Grounds(rows=tuple((label, (text,)) for label, text in proof if text))
    cause = answer.cause_of(outcome)
    for finding in outcome.findings:
        yield FindingDetails(finding=finding, severity=severity(finding, outcome), is_cause=finding is cause)
    missing = tuple(("not captured", (words.trouble(trouble),)) for trouble in outcome.trouble)
    yield Grounds(rows=(*words.grounds(outcome), *missing))
    head, rows = words.vital_table(outcome)
    if len(head) > 1:
        yield Table(title="Numbers of each rank", kind="vitals", head=head, rows=lines(rows))
    numbers = joined(words.numbers(outcome))
    if numbers:
        yield Sentence(line=line(numbers))
    ran = outcome.verdict.status is not Status.SKIP
    if ran and not (numbers or rows or outcome.standings or outcome.exit_codes or words.culprit_line(outcome)):
        yield Sentence(line=line("No rank left anything to be read."))


_EXTRA = ("steps done:", "exit")


def _ranks(outcome: Outcome) -> Iterator[Section]:
    if len(outcome.standings) > _MAX_RANK_ROWS:
        head, rows, culprits = answer.rank_table(outcome)
        yield Table(
            title="Ranks at the end, grouped by where they are",
            kind="ranks",
            head=head,
            rows=lines(rows),
            culprits=frozenset(number for number, culprit in enumerate(culprits) if culprit),
        )
        yield Part(title=f"Each of the {len(outcome.standings)} ranks", sections=(_each_rank(outcome),), folded=True)
    elif outcome.standings:
        yield _each_rank(outcome)
    elif outcome.exit_codes:
        yield Table(
            title="Ranks at the end",
            kind="ranks",
            head=("rank:", *_EXTRA),
            rows=lines((str(rank), *_steps_and_exit(outcome, rank)) for rank in sorted(outcome.exit_codes)),
        )


def _each_rank(outcome: Outcome) -> Table:
    return Table(
        title="Ranks at the end",
        kind="ranks",
        head=("rank:", answer.position_head(outcome), "waiting for", "no progress for:", *_EXTRA),
        extra=_EXTRA,
        rows=lines(
            (
                words.standing_rank(row),
                row.blocked_in,
                row.waits_for,
                words.seconds(row.no_progress_s),
                *_steps_and_exit(outcome, row.rank),
            )
            for row in outcome.standings
        ),
        culprits=frozenset(number for number, row in enumerate(outcome.standings) if row.culprit),
    )


def _steps_and_exit(outcome: Outcome, rank: int) -> tuple[str, str]:
    return words.step(outcome.last_step.get(rank)), words.exit_of(outcome, rank)


def _repeat(outcome: Outcome) -> Iterator[Section]:
    yield Command(text=outcome.repeat) if outcome.repeat else Sentence(line=line("No command repeats it."))
    if outcome.next:
        yield Sentence(line=line("Go on with:"))
        yield Command(text=outcome.next)


def _files(outcome: Outcome) -> Iterator[Section]:
    written = tuple(
        File(item.path, _address(outcome, item.path), words.plural(item.count or 0, "entry"))
        for item in outcome.artifacts
        if item.absent is None
    )
    missing = tuple(File(item.path, None, item.absent) for item in outcome.artifacts if item.absent is not None)
    there: tuple[Section, ...] = (Files(items=written),) if written else ()
    if missing:
        there += (Part(title=f"files not written: {len(missing)}", sections=(Files(items=missing),), folded=True),)
    if there:
        yield Part(title="Files", sections=there)


def _address(outcome: Outcome, path: str) -> str | None:
    return None if "*" in path else link_target(f"{outcome.dir}/{path}")
