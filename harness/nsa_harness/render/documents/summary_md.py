"""SUMMARY.md: the sections of a report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.outcome.callstacks import StackNode, stack_trees
from nsa_harness.core.report import CallStack, Outcome, Place, Report, Status
from nsa_harness.render import answer, sections
from nsa_harness.render.documents.report_sections import report_sections
from nsa_harness.render.sections import FindingDetails, Line, Overview, Section, Span, Table
from nsa_harness.render.text import (
    escaped,
    link_target,
    markdown,
    markdown_code,
    markdown_fence,
    markdown_link,
    markdown_prose,
    markdown_table,
)
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.texts import words


def summary_md(
    report: Report, playbook: Playbook, claim: LedgerLine | None = None, why: WhyReport | None = None
) -> str:
    """Return SUMMARY.md as text. Equal reports give equal texts."""
    report, claim, why = escaped((report, claim, why))
    return "\n".join(_section_lines(report_sections(report, playbook, claim=claim, why=why))) + "\n"


def proof_link(path: str) -> str:
    """Return a Markdown link to a file in the run directory, or code if the path leads out of it."""
    target = link_target(path)
    return markdown_link(path, target) if target else markdown_code(path)


def _section_lines(parts: Iterable[Section]) -> Iterator[str]:
    """Yield the sections as Markdown lines."""
    before: Section | None = None
    for section in parts:
        if lines := list(_lines(section)):
            if before is not None and not (isinstance(before, _LISTS) and isinstance(section, _LISTS)):
                yield ""
            yield from lines
            before = section


_LISTS = (sections.FactList, sections.Grounds, FindingDetails)


def _lines(section: Section) -> Iterator[str]:
    match section:
        case sections.Heading(whole=whole):
            yield f"# {whole}"
        case sections.RunDetails(number=number, outcome=outcome, alone=alone, sections=inner):
            title = f"{markdown(outcome.spec.scenario)}: {markdown(answer.title(outcome))}"
            yield from () if alone else (f'<a id="run-{number}"></a>', "")
            yield f"{'#' if alone else '##'} {words.verdict(outcome)} {title}"
            yield from ("", *_section_lines(inner))
        case sections.Part(title=title, sections=inner, folded=True):
            yield from (f"<details><summary>{markdown(title)}</summary>", "", *_section_lines(inner), "", "</details>")
        case sections.Part(title=title, sections=inner, chapter=chapter):
            yield from (f"{'##' if chapter else '###'} {markdown(title)}", "", *_section_lines(inner))
        case sections.RunAnswer(outcome=outcome):
            yield from _answer(outcome)
        case sections.Sentence(line=line, label=label):
            yield f"**{label}** {markdown_prose(sections.plain(line))}" if label else _line(line)
        case Table():
            yield from _table(section)
        case Overview(runs=runs, in_full=in_full):
            head = ("run", "verdict", "cause", "summary", "note", "time:")
            yield from markdown_table(head, [_overview_row(number, run, number in in_full) for number, run in runs])
        case sections.Bullets(title=title, items=items):
            yield from (markdown(title), "", *(f"- {markdown_prose(item)}" for item in items))
        case sections.FactList(items=items):
            yield from (f"- {markdown(item)}" for item in items)
        case sections.Grounds(rows=rows):
            yield from (f"- **{label}:** {sections.join_texts(map(markdown, items))}" for label, items in rows)
        case FindingDetails():
            yield from _finding(section)
        case sections.Command(text=text):
            yield from markdown_fence(text, "sh")
        case sections.Files(items=files):
            yield from (f"- {_file(file)}: {markdown(file.remark)}" for file in files)
        case sections.Pictures() | sections.Search() | sections.Card() | sections.Charts():
            pass  # only for the HTML page; BISECT.md describes the bisection
        case _:
            assert_never(section)


def _answer(outcome: Outcome) -> Iterator[str]:
    yield f"**{markdown_prose(answer.sentence(outcome.verdict.summary))}**"
    if outcome.culprit and outcome.culprit.place:
        place = outcome.culprit.place
        source = f": {markdown_code(words.statement(place))}" if place.text else ""
        yield from ("", f"Look at {_place(place)} ({markdown(answer.why_look_at(outcome))}){source}")
    if outcome.stacks:
        lines = [line for block in _stack_texts(outcome.stacks) for line in ("", *block)][1:]
        yield from ("", *markdown_fence("\n".join(lines), "text"))


def _line(line: Line, *, in_table: bool = False) -> str:
    return " ".join(_span(span, in_table=in_table) for span in line if span.text)


def _span(span: Span, *, in_table: bool) -> str:
    if span.code:
        return markdown_code(span.text, in_table=in_table)
    if span.run is None:
        return f"**{markdown(span.text)}**" if span.strong else markdown(span.text)
    link = markdown_link(span.text, f"#run-{span.run}")
    return f"**{link}**" if span.status in (Status.HANG, Status.FAIL) else link


def _table(table: Table) -> list[str]:
    rows = [[_line(cell, in_table=True) for cell in row] for row in table.rows]
    for number in table.culprits:
        rows[number][0] += " ◀ culprit"
    return markdown_table([markdown(name) for name in table.head], rows)


def _overview_row(number: int, outcome: Outcome, in_full: bool) -> tuple[str, ...]:
    name = outcome.spec.scenario
    return (
        markdown_link(name, f"#run-{number}") if in_full else f'<a id="run-{number}"></a>{markdown(name)}',
        f"**{words.verdict(outcome)}**",
        markdown(words.headline_tag(outcome)),
        markdown_prose(words.row_sentence(outcome), in_table=True),
        markdown(sections.join_texts(words.remarks(outcome))),
        words.wall_time(outcome),
    )


def _place(place: Place) -> str:
    name, details = words.place_name(place), words.place_details(place)
    return sections.join_texts([markdown_code(name)] * bool(name) + [markdown(details)] * bool(details))


def _finding(details: FindingDetails) -> Iterator[str]:
    finding = details.finding
    ranks = f", {words.ranks(finding.ranks)}" if finding.ranks else ""
    grades = f"{details.severity.value}, {words.certainty(finding.confidence)}"
    claim = f": {markdown_prose(details.claim)}" if details.claim else ""
    yield f"- **{markdown(finding.code)}** ({grades}{ranks}){claim}"
    if details.place:
        yield f"  - place: {_place(details.place)}"
    if not details.is_cause:
        yield from (f"  - open question: {markdown_prose(text)}" for text in finding.left_open)
    if finding.advice and not details.is_cause:
        yield f"  - do: {markdown_prose(finding.advice)}"
    yield f"  - proof: {sections.join_texts(map(proof_link, finding.proof)) or 'no file'}"


def _file(file: sections.File) -> str:
    return markdown_link(file.path, file.address) if file.address else markdown_code(file.path)


def _stack_texts(stacks: tuple[CallStack, ...]) -> Iterator[list[str]]:
    """Yield the lines of each call stack. Frames shared by several stacks are included only once."""
    total = len({rank for stack in stacks for rank in stack.ranks})
    for tree in stack_trees(stacks):
        shared = len(tree.frames) if tree.call_stack is None else 0  # a single stack shares no frame with another
        yield from (list(answer.stack_lines(stack, shared, total)) for stack in _stacks_below(tree))
        if tree.call_stack is None:
            inside = f" in {tree.diverges_in.function}" if tree.diverges_in and tree.diverges_in.function else ""
            callers = f"; common callers of {words.ranks(tree.ranks)}:" if tree.frames else ""
            common_frames = (line for frame in reversed(tree.frames) for line in _frame_lines(frame))
            yield [f"the ranks diverge here{inside}{callers}", *common_frames]


def _stacks_below(node: StackNode) -> Iterator[CallStack]:
    """Yield the call stacks of all leaves below this node."""
    if node.call_stack is not None:
        yield node.call_stack
    for subtree in node.subtrees:
        yield from _stacks_below(subtree)


def _frame_lines(frame: Place) -> Iterator[str]:
    yield f"  {words.place_name(frame)}   {words.place_details(frame)}".rstrip()
    if frame.text:
        yield f"    {words.statement(frame)}"
