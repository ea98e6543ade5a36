"""BISECT.md, ready to paste into an issue: the answer, its proof, and the commands that show it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsa_harness.core.search.question import CONTROLS, PROOFS, AnswerKind
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.picture import Grid, Row, rows
from nsa_harness.render.terminal.layout import cropped
from nsa_harness.render.text import escape_block, escaped, markdown, markdown_code, markdown_fence, markdown_table
from nsa_harness.texts import words

LIMIT = 65_536  # characters that GitHub takes in one issue
_GRID_COLUMNS = 110
_STACK_LINES = 24  # lines of each file
_PROBE_ROWS = 120
_CELL = 200  # columns of one cell; bisect.json has the whole text
_OMITTED = "\n\nThe rest is cut, because an issue takes 65,536 characters; all of it is in the run directory.\n"


def bisect_md(report: BisectReport, stacks: Mapping[str, str] | None = None) -> str:
    """Return the document. `stacks`: dumps of the failing and of the passing probe, by the name of the file."""
    report = escaped(report)
    probe_rows, facts = tuple(rows(report)), tuple(bisect_words.facts(report))
    sections = (
        _head(report),
        _commands([fact for fact in facts if fact.command]),
        _known(report, [fact for fact in facts if not fact.command]),
        _proof(report, probe_rows),
        _picture(report, probe_rows),
        _stacks(report, stacks or {}),
        _searched(report),
        _probes(probe_rows),
        _made_with(report),
    )
    return _bounded(["\n".join(lines) for lines in sections if lines])


def _head(report: BisectReport) -> list[str]:
    facts = filter(None, (report.answer.kind.value, bisect_words.sureness(report.answer)))
    lines = [f"# {markdown(bisect_words.sentence(report))}", ""]
    lines += [f"{markdown(report.scenario)}: {markdown(bisect_words.question(report))}", ""]
    lines += [f"**{markdown(' · '.join(facts))}**"]
    if setting := bisect_words.setting_word(report):
        lines += ["", f"That is {markdown_code(setting)}."]
    if report.interrupted:
        lines += ["", "**Interrupted.** The same command goes on where it stopped."]
    if report.answer.kind is AnswerKind.UNDECIDED:
        lines += ["", f"{markdown(bisect_words.open_word(report))}."]
    return lines


def _commands(facts: Sequence[bisect_words.Fact]) -> list[str]:
    commands = ((fact.label.capitalize(), text) for fact in facts for text in fact.texts)
    lines = [line for name, text in commands for line in ("", f"{name}:", "", *markdown_fence(text, "sh"))]
    return ["## See it again", *lines] if lines else []


def _known(report: BisectReport, facts: Sequence[bisect_words.Fact]) -> list[str]:
    failed = bisect_words.failing_probe(report)
    shown = [(fact.label, text) for fact in facts for text in fact.texts]
    shown += [("failed", failed.summary)] if failed is not None and failed.summary else []
    return ["## What is known", "", *(f"- {label}: {markdown(text)}" for label, text in shown)]


def _proof(report: BisectReport, probe_rows: Sequence[Row]) -> list[str]:
    """Return the section with the controls, and the probes that prove the answer."""
    shown = [row for row, probe in zip(probe_rows, report.probes, strict=True) if probe.purpose in (*PROOFS, *CONTROLS)]
    return ["## What proves it", "", *_table(shown)] if shown else []


def _picture(report: BisectReport, probe_rows: Sequence[Row]) -> list[str]:
    if not probe_rows:
        return []
    picture = list(Grid(subject=report.subject, width=_GRID_COLUMNS).whole(probe_rows))
    kept = picture[:_PROBE_ROWS]
    # Each line is already escaped; markdown_fence would cut the block to its last 40 lines.
    fence = markdown_fence("\n".join(kept), "text")[0][:-4]
    more = ["", f"{len(picture) - len(kept)} more lines are in report.html."] if len(picture) > len(kept) else []
    return ["## The search", "", f"{fence}text", *kept, fence, *more]


def _stacks(report: BisectReport, stacks: Mapping[str, str]) -> list[str]:
    verdicts = {probe.dir: probe.verdict for probe in report.probes}
    lines: list[str] = []
    for name, text in stacks.items():
        kept = _clean(text).split("\n")
        cut = len(kept) - _STACK_LINES
        shown = kept[:_STACK_LINES] + ([f"… {cut} more lines in the file"] if cut > 0 else [])
        lines += [
            "",
            "<details>",
            f"<summary>{markdown(' · '.join(filter(None, (verdicts.get(name.split('/')[0]), name))))}</summary>",
            "",
        ]
        lines += [*markdown_fence("\n".join(shown), "text"), "", "</details>"]
    return ["## Stacks", *lines] if lines else []


def _searched(report: BisectReport) -> list[str]:
    signature = "no failure was seen" if report.signature is None else f"only {report.signature} counts"
    bullets = [report.subject.question, signature, *report.notes]
    bullets += [f"at least {words.plural(report.floor_probes, 'probe')} for a question of this size"]
    return ["## What was searched", "", *(f"- {markdown(item)}" for item in bullets)]


def _probes(probe_rows: Sequence[Row]) -> list[str]:
    if not probe_rows:
        return []
    omitted = len(probe_rows) - _PROBE_ROWS
    more = ["", f"{omitted} more are in bisect.json."] if omitted > 0 else []
    return [f"## All {words.plural(len(probe_rows), 'probe')}", "", *_table(probe_rows), *more]


def _made_with(report: BisectReport) -> list[str]:
    machine = f"{report.machine.host} · {words.machine_line(report.machine)} · nsa-harness {report.harness}"
    lines = ["## Made with", "", f"Run {markdown_code(report.run_id)} on {markdown(machine)}"]
    if report.what:
        lines += ["", markdown(report.what)]
    return [*lines, "", *markdown_fence(report.command, "sh")]


_HEAD = ("probe:", "why", "configuration", "verdict", "counts as", "took:", "remark", "directory")


def _table(probe_rows: Sequence[Row]) -> list[str]:
    return markdown_table(_HEAD, map(_cells, probe_rows[:_PROBE_ROWS]))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.n),
        markdown(row.why),
        markdown_code(cropped(row.config, _CELL), in_table=True),
        f"**{markdown(row.verdict)}**" if row.launched else row.verdict,
        row.counts_as.value,
        row.took,
        markdown(cropped(row.remark, _CELL)),
        markdown_code(row.dir, in_table=True) if row.dir else "",  # no link: an issue has no run directory
    )


def _clean(text: str) -> str:
    """Return the text of a dump, escaped line by line: `escape_block` keeps only the last lines of a long text."""
    lines = text.splitlines()
    return "\n".join(escape_block(line) if line.strip() else "" for line in lines).strip("\n")


def _bounded(sections: Sequence[str]) -> str:
    """Join whole sections up to the size of an issue; the answer and its proof come first."""
    whole = "\n\n".join(sections) + "\n"
    if len(whole) <= LIMIT:
        return whole
    kept: list[str] = []
    for section in sections:
        if sum(map(len, kept)) + 2 * len(kept) + len(section) + len(_OMITTED) > LIMIT:
            continue
        kept.append(section)
    return "\n\n".join(kept) + _OMITTED
