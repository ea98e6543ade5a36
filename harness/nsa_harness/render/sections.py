"""The sections that make up a report.

`run_section` builds the sections of a run. Each writer (documents/summary_md.py, documents/html.py, terminal/screen.py)
decides what each kind of section looks like in its format and escapes the text for that format. A writer skips the
kinds that its format cannot show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import Finding, Outcome, Place, Severity, Status
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render import answer
from nsa_harness.render.text import link_target
from nsa_harness.render.values import values_table
from nsa_harness.texts import words
from nsa_harness.texts.measurements import vital_table

_MAX_RANK_ROWS = 8  # if there are more ranks, they are grouped by call, and the table with a row per rank is folded


class Span(NamedTuple):
    """A piece of a line in a single style. It can link to run number `run`, which has the verdict `status`."""

    text: str
    code: bool = False
    strong: bool = False
    quiet: bool = False
    run: int | None = None
    status: Status | None = None
    address: str | None = None  # relative URL to which the HTML page links


Line = tuple[Span, ...]  # writers put a space between two spans


def line(text: str) -> Line:
    """Return a line that shows `text` in the default style."""
    return (Span(text),)


def lines(rows: Iterable[Iterable[str]]) -> tuple[tuple[Line, ...], ...]:
    """Convert the cells of a table from strings to lines in the default style."""
    return tuple(tuple(map(line, row)) for row in rows)


def plain(line: Line) -> str:
    """Return the text of a line without styles and links."""
    return " ".join(span.text for span in line if span.text)


def join_texts(texts: Iterable[str]) -> str:
    """Join the texts with " · " between them."""
    return " · ".join(texts)


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The heading of a document. `tally`: the number of runs with each verdict. `whole`: both as one line."""

    text: str
    tally: tuple[tuple[str, int], ...]
    whole: str = ""


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """The section of a report about run `number`, counted from 1. `alone`: the report has no other run."""

    number: int
    outcome: Outcome
    alone: bool
    sections: tuple[Section, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A group of sections under a title.

    `chapter`: whether the title has the same heading level as the title of a run. `folded`: whether the sections are
    hidden until the reader opens them. `folded_on_page`: the same, but only on the HTML page.
    """

    title: str
    sections: tuple[Section, ...]
    chapter: bool = False
    folded: bool = False
    folded_on_page: bool = False


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """A sentence that says what happened in a run, with a source line and call stacks."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The section with the charts of a run. Only the HTML page shows it."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Card:
    """A frame around sections, with a title. `verdicts`: shown before the title. Only HTML pages have cards."""

    verdicts: tuple[str, ...]
    title: str
    remark: str
    sections: tuple[Section, ...]


class Chart(NamedTuple):
    """A line chart of one number over several runs, drawn in a picture that is 1000 wide and 100 high."""

    label: str
    caption: str
    title: str  # read aloud by screen readers
    line: str  # SVG path; "" for a strip, which has one coloured cell per run instead of a line
    marks: tuple[tuple[str, str], ...]  # (verdict, SVG path of its cells or dots)


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts with the same horizontal axis. `ticks`: positions in percent with their labels. Only on HTML pages."""

    charts: tuple[Chart, ...]
    ticks: tuple[tuple[float, str], ...]
    ends: tuple[str, str]  # labels of the left and the right end


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A paragraph of text.

    `label`: shown in bold in front of the text. If there is a label, backticks in the text mark code. `quiet`: whether
    the paragraph is a remark in a paler colour.
    """

    line: Line
    label: str = ""
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Search:
    """The section about the bisection that launched the runs of the report, shown only on the HTML page."""

    report: BisectReport


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text cells.

    `head`: the column names. A name that ends in a colon aligns its column to the right. `extra`: the names of columns
    that may be left out on a small screen.
    """

    title: str  # read aloud by screen readers
    head: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    kind: str = ""  # CSS class
    extra: tuple[str, ...] = ()
    culprits: frozenset[int] = frozenset()  # indices of the rows that show culprits
    badge: str = "culprit"  # how the HTML page marks these rows, in the column with index `badge_column`
    badge_column: int = 1


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A table with one row for each run, worst first. Rows of the runs `in_full` link to their sections."""

    runs: tuple[tuple[int, Outcome], ...]
    in_full: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Bullets:
    """A bulleted list with a title."""

    title: str
    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FactList:
    """A list of facts about a run, such as its scenario and launch, each on its own line."""

    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Grounds:
    """The observations on which a verdict is based, in labelled lists."""

    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class FindingDetails:
    """A finding with the files that prove it, without what the start of the run's section already shows."""

    finding: Finding
    severity: Severity
    is_cause: bool
    claim: str
    place: Place | None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A shell command for the reader to copy."""

    text: str


class File(NamedTuple):
    """An entry in a list of files. `remark` is a short text, such as the number of lines."""

    path: str
    address: str | None  # relative URL; None if the path is a pattern or leads out of the run directory
    remark: str


@dataclass(frozen=True, kw_only=True)
class Files:
    """A list of files in the run directory."""

    items: tuple[File, ...]


Section = (
    Heading
    | Card
    | Charts
    | RunDetails
    | Part
    | RunAnswer
    | Pictures
    | Search
    | Sentence
    | Table
    | Overview
    | Bullets
    | FactList
    | Grounds
    | FindingDetails
    | Command
    | Files
)


def run_section(number: int, outcome: Outcome, *, alone: bool) -> RunDetails:
    """Return the report section on run `number`, counted from 1. `alone`: the report has no other run."""
    sections = (
        RunAnswer(outcome=outcome),
        *_communication(outcome),
        *_raised(outcome),
        *_ranks(outcome),
        *_what_to_do(outcome),
        *_values(outcome),
        Pictures(outcome=outcome),
        Part(
            title="Evidence",
            sections=(Sentence(line=line(words.meaning(outcome))), *evidence_sections(outcome)),
            folded_on_page=True,
        ),
        Part(title="Repeat it", sections=tuple(_repeat(outcome))),
        *_files(outcome),
    )
    return RunDetails(number=number, outcome=outcome, alone=alone, sections=sections)


def _communication(outcome: Outcome) -> Iterator[Section]:
    head, rows = answer.communication_table(outcome)
    if rows:
        yield Table(title="Calls that differ from the recorded step", kind="values", head=head, rows=lines(rows))


def _raised(outcome: Outcome) -> Iterator[Section]:
    if raised := answer.raised(outcome):
        yield Sentence(label="Raised:", line=line(raised))


def _what_to_do(outcome: Outcome) -> Iterator[Section]:
    cause = answer.cause_of(outcome)
    if advice := answer.advice(outcome):
        yield Sentence(label="Do:", line=line(advice))
    if cause and cause.code != Cause.UNKNOWN:
        yield Sentence(label="Cause:", line=line(f"`{cause.code}`, explained by `nsa-harness explain {cause.code}`"))
    if cause and cause.left_open:
        yield Bullets(title="Open questions:", items=cause.left_open)


def evidence_sections(outcome: Outcome) -> Iterator[Section]:
    """Yield the sections that contain the evidence for a verdict."""
    if facts := tuple(filter(None, (*words.run_facts(outcome), words.culprit_line(outcome)))):
        yield FactList(items=facts)
    proof = (("why a hang", outcome.proof_reason or ""), ("last shared", words.last_shared(outcome)))
    yield Grounds(rows=tuple((label, (text,)) for label, text in proof if text))
    cause = answer.cause_of(outcome)
    shown_place = outcome.culprit.place if outcome.culprit else None
    for finding in outcome.findings:
        is_cause = finding is cause
        yield FindingDetails(
            finding=finding,
            severity=severity(finding, outcome),
            is_cause=is_cause,
            claim="" if is_cause and finding.claim == outcome.verdict.summary else finding.claim,
            place=None if is_cause and finding.place == shown_place else finding.place,
        )
    missing = tuple(("not captured", (words.trouble(trouble),)) for trouble in outcome.trouble)
    yield Grounds(rows=(*words.grounds(outcome), *missing))
    head, rows = vital_table(outcome)
    if len(head) > 1:
        yield Table(title="Measurements per rank", kind="vitals", head=head, rows=lines(rows))
    in_table = "peak memory" if "peak memory:" in head else None
    numbers = join_texts(text for text in words.numbers(outcome) if not (in_table and text.startswith(in_table)))
    if numbers:
        yield Sentence(line=line(numbers))
    ran = outcome.verdict.status is not Status.SKIP
    if ran and not (numbers or rows or outcome.rank_statuses or outcome.exit_codes or words.culprit_line(outcome)):
        yield Sentence(line=line("No rank left any evidence."))


def _values(outcome: Outcome) -> Iterator[Section]:
    if outcome.values:
        head, rows = values_table(outcome)
        cells = tuple(((Span(name, code=True),), *map(line, others)) for name, *others in rows)
        yield Sentence(label="Values:", line=line("names that decide what the ranks do, or that differ between ranks."))
        yield Table(title="Values of names on each rank", kind="values", head=head, rows=cells)


_EXTRA = ("steps done:", "exit")


def _ranks(outcome: Outcome) -> Iterator[Section]:
    if len(outcome.rank_statuses) > _MAX_RANK_ROWS:
        head, rows, culprits = answer.rank_table(outcome)
        yield Table(
            title="Ranks at the end, grouped by the call they are in",
            kind="ranks",
            head=head,
            rows=lines(rows),
            culprits=frozenset(number for number, culprit in enumerate(culprits) if culprit),
        )
        if len(outcome.rank_statuses) <= words.MANY_RANKS:
            yield Part(title=f"All {len(outcome.rank_statuses)} ranks", sections=(_each_rank(outcome),), folded=True)
    elif outcome.rank_statuses:
        yield _each_rank(outcome)
    elif outcome.exit_codes:
        yield Table(
            title="Ranks at the end",
            kind="ranks",
            head=("rank:", *_EXTRA),
            rows=lines((str(rank), *_steps_and_exit(outcome, rank)) for rank in sorted(outcome.exit_codes)),
        )


def _each_rank(outcome: Outcome) -> Table:
    marked = words.marked_culprits(outcome)
    head = ("rank:", answer.position_head(outcome), "waiting for", "no progress for:", *_EXTRA)
    rows = [
        (
            words.rank_with_coordinates(row),
            row.blocked_in,
            row.waits_for,
            words.seconds(row.no_progress_s),
            *_steps_and_exit(outcome, row.rank),
        )
        for row in outcome.rank_statuses
    ]
    known = [
        column
        for column, name in enumerate(head)
        if name in _EXTRA or any(row[column] not in ("", words.UNKNOWN) for row in rows)
    ]
    return Table(
        title="Ranks at the end",
        kind="ranks",
        head=tuple(head[column] for column in known),
        extra=_EXTRA,
        rows=lines(tuple(row[column] for column in known) for row in rows),
        culprits=frozenset(number for number, row in enumerate(outcome.rank_statuses) if row.rank in marked),
    )


def _steps_and_exit(outcome: Outcome, rank: int) -> tuple[str, str]:
    return words.step(outcome.last_step.get(rank)), words.exit_of(outcome, rank)


def _repeat(outcome: Outcome) -> Iterator[Section]:
    yield (
        Command(text=outcome.repeat_command)
        if outcome.repeat_command
        else Sentence(line=_WATCH_NODES if _has_nodes(outcome) else _WATCH)
    )
    if outcome.next_command:
        yield Sentence(line=line("Continue with:"))
        yield Command(text=outcome.next_command)


_OBSERVES = "observes the next run from its start."
_WATCH = (Span("No command repeats this run."), Span("nsa-harness watch -- COMMAND", code=True), Span(_OBSERVES))
_WATCH_NODES = (
    Span("Agents on the nodes of this job observed it, so no command on one machine repeats it."),
    Span("nsa-harness watch --shared DIR -- COMMAND", code=True),
    Span(f"on each node, with a new DIR, {_OBSERVES}"),
)


def _has_nodes(outcome: Outcome) -> bool:
    """Return whether agents on several nodes observed the run."""
    return any(artifact.path.startswith("nodes/") for artifact in outcome.artifacts)


def _files(outcome: Outcome) -> Iterator[Section]:
    present = tuple(
        File(item.path, _address(outcome, item.path), words.plural(item.count or 0, "entry"))
        for item in outcome.artifacts
        if item.absent is None
    )
    missing = tuple(File(item.path, None, item.absent) for item in outcome.artifacts if item.absent is not None)
    lists: tuple[Section, ...] = (Files(items=present),) if present else ()
    if missing:
        lists += (Part(title=f"files not written: {len(missing)}", sections=(Files(items=missing),), folded=True),)
    if lists:
        yield Part(title="Files", sections=lists)


def _address(outcome: Outcome, path: str) -> str | None:
    return None if "*" in path else link_target(f"{outcome.dir}/{path}")
