"""BISECT.md: the answer of a bisection, ready to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsa_harness.core.search.question import CONTROLS, PROOFS, AnswerKind
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.picture import Grid, ProbeText, rows
from nsa_harness.render.text import (
    escape_block,
    escaped,
    markdown,
    markdown_code,
    markdown_fence,
    markdown_prose,
    markdown_table,
)
from nsa_harness.texts import words

MAX_CHARACTERS = 65_536  # the size limit of a GitHub issue
_GRID_COLUMNS = 110
_STACK_LINES = 24  # lines that are shown of each stack file
_PROBE_ROWS = 120
_OMITTED = (
    "\n\nThe rest was cut because an issue can have at most 65,536 characters. The run directory has all of it.\n"
)


def bisect_md(report: BisectReport, stacks: Mapping[str, str] | None = None) -> str:
    """Return BISECT.md. `stacks`: stack files of the last failing and the last passing test run, by file name."""
    report = escaped(report)
    probe_rows, facts = tuple(rows(report)), tuple(bisect_words.facts(report))
    sections = (
        _head_section(report),
        _commands_section([fact for fact in facts if fact.is_command]),
        _facts_section(report, [fact for fact in facts if not fact.is_command]),
        _proof_section(report, probe_rows),
        _picture_section(report, probe_rows),
        _stacks_section(report, stacks or {}),
        _search_section(report),
        _probes_section(probe_rows),
        _environment_section(report),
    )
    return _join_within_limit(["\n".join(lines) for lines in sections if lines])


def _head_section(report: BisectReport) -> list[str]:
    certainty = bisect_words.certainty_text(report.answer) or report.answer.kind.value
    lines = [f"# {markdown(bisect_words.sentence(report))}", ""]
    lines += [f"{markdown(report.scenario)}: {markdown(bisect_words.question(report))}", ""]
    lines += [f"**{markdown(certainty)}**"]
    if setting := bisect_words.setting_text(report):
        lines += ["", f"The setting is {markdown_code(setting)}."]
    if report.interrupted:
        lines += ["", "**Interrupted.** The same command continues the search."]
    if report.answer.kind is AnswerKind.UNDECIDED:
        open_text = bisect_words.open_text(report)
        lines += ["", f"{markdown(open_text[:1].upper() + open_text[1:])}."]
    return lines


def _commands_section(facts: Sequence[bisect_words.Fact]) -> list[str]:
    commands = ((fact.label.capitalize(), text) for fact in facts for text in fact.texts)
    lines = [line for name, text in commands for line in ("", f"{name}:", "", *markdown_fence(text, "sh"))]
    return ["## Reproduce it", *lines] if lines else []


def _facts_section(report: BisectReport, facts: Sequence[bisect_words.Fact]) -> list[str]:
    failing = bisect_words.failing_probe(report)
    labelled_texts = [(fact.label, text) for fact in facts for text in fact.texts]
    labelled_texts += [("failed", failing.summary)] if failing is not None and failing.summary else []
    return ["## What is known", "", *(f"- {label}: {markdown_prose(text)}" for label, text in labelled_texts)]


def _proof_section(report: BisectReport, probe_rows: Sequence[ProbeText]) -> list[str]:
    """Return the lines of the section "Proof" in BISECT.md, or [] if there is nothing to show."""
    proof_rows = [
        row for row, probe in zip(probe_rows, report.probes, strict=True) if probe.purpose in (*PROOFS, *CONTROLS)
    ]
    return ["## Proof", "", *_table(proof_rows)] if proof_rows else []


def _picture_section(report: BisectReport, probe_rows: Sequence[ProbeText]) -> list[str]:
    if not probe_rows:
        return []
    picture = list(Grid(subject=report.subject, width=_GRID_COLUMNS).whole(probe_rows))
    shown_lines = picture[:_PROBE_ROWS]
    # Each line is already escaped. markdown_fence would shorten the block to its last 40 lines.
    fence = markdown_fence("\n".join(shown_lines), "text")[0][:-4]
    more = (
        ["", f"{len(picture) - len(shown_lines)} more lines are in report.html."]
        if len(picture) > len(shown_lines)
        else []
    )
    return ["## The search", "", f"{fence}text", *shown_lines, fence, *more]


def _stacks_section(report: BisectReport, stacks: Mapping[str, str]) -> list[str]:
    verdicts = {probe.dir: probe.verdict for probe in report.probes}
    lines: list[str] = []
    for name, text in stacks.items():
        stack_lines = _clean(text).split("\n")
        cut = len(stack_lines) - _STACK_LINES
        shown_lines = stack_lines[:_STACK_LINES] + ([f"… {cut} more lines in the file"] if cut > 0 else [])
        lines += [
            "",
            "<details>",
            f"<summary>{markdown(' · '.join(filter(None, (verdicts.get(name.split('/')[0]), name))))}</summary>",
            "",
        ]
        lines += [*markdown_fence("\n".join(shown_lines), "text"), "", "</details>"]
    return ["## Stacks", *lines] if lines else []


def _search_section(report: BisectReport) -> list[str]:
    signature = "no failure was seen" if report.signature is None else f"only this failure counts: {report.signature}"
    bullets = [report.subject.question, signature, *report.notes]
    bullets += [f"any search needs at least {words.plural(report.floor_probes, 'probe')} for this question"]
    return ["## Question", "", *(f"- {markdown(item)}" for item in bullets)]


def _probes_section(probe_rows: Sequence[ProbeText]) -> list[str]:
    if not probe_rows:
        return []
    omitted_count = len(probe_rows) - _PROBE_ROWS
    more = ["", f"{omitted_count} more are in bisect.json."] if omitted_count > 0 else []
    return [f"## All {words.plural(len(probe_rows), 'probe')}", "", *_table(probe_rows), *more]


def _environment_section(report: BisectReport) -> list[str]:
    machine = f"{report.machine.host} · {words.machine_line(report.machine)} · nsa-harness {report.harness}"
    lines = ["## Environment", "", f"Run {markdown_code(report.run_id)} on {markdown(machine)}"]
    if report.what:
        lines += ["", markdown(report.what)]
    return [*lines, "", *markdown_fence(report.command, "sh")]


_HEAD = ("probe:", "purpose", "configuration", "verdict", "counts as", "took:", "remark", "directory")


def _table(probe_rows: Sequence[ProbeText]) -> list[str]:
    return markdown_table(_HEAD, map(_cells, probe_rows[:_PROBE_ROWS]))


def _cells(row: ProbeText) -> tuple[str, ...]:
    return (
        str(row.n),
        markdown(row.purpose),
        markdown_code(row.config, in_table=True),
        f"**{markdown(row.verdict)}**" if row.was_launched else row.verdict,
        row.counts_as.value,
        row.took,
        markdown_prose(row.remark, in_table=True),
        markdown_code(row.dir, in_table=True) if row.dir else "",  # no link: an issue has no run directory
    )


def _clean(text: str) -> str:
    """Escape the text of a stack file, so that it is safe in BISECT.md."""
    lines = text.splitlines()  # escaped one by one, because `escape_block` keeps only the last lines of a long text
    return "\n".join(escape_block(line) if line.strip() else "" for line in lines).strip("\n")


def _join_within_limit(sections: Sequence[str]) -> str:
    """Join the sections, leaving out those that exceed the size limit of a GitHub issue."""
    whole = "\n\n".join(sections) + "\n"
    if len(whole) <= MAX_CHARACTERS:
        return whole
    kept_sections: list[str] = []
    for section in sections:
        if sum(map(len, kept_sections)) + 2 * len(kept_sections) + len(section) + len(_OMITTED) > MAX_CHARACTERS:
            continue
        kept_sections.append(section)
    return "\n\n".join(kept_sections) + _OMITTED
