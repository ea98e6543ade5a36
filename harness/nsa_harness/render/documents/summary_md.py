"""SUMMARY.md: the report for people, a pure function of it. Same report, same bytes."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.report import Finding, Outcome, Place, Report, Status
from nsa_harness.render import answer
from nsa_harness.render.documents.tables import Cell, CellPart, Table, hypotheses, tables
from nsa_harness.render.text import (
    escaped,
    link_target,
    markdown,
    markdown_code,
    markdown_fence,
    markdown_link,
    markdown_table,
)
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning


def summary_md(report: Report, playbook: Playbook) -> str:
    """Of a single run the answer is the beginning; of several the counts, then a row a run, then what went wrong."""
    report = escaped(report)
    told = answer.told_at_length(report)
    single = len(report.outcomes) == 1
    asked = hypotheses(report, playbook)
    first = [_over_all(asked)] if asked else []
    overview = _overview(report, {number for number, _ in told})
    # Where all went well, what that shows is the news; else what failed.
    news = [overview, *first] if told else [*first, overview]
    sections = [] if single else [_head(report), *news]
    sections += [_section(number, outcome, "#" if single else "##") for number, outcome in told]
    sections += [_head(report)] if single else []
    sections += [_over_all(table) for table in tables(report, playbook)]
    sections += [_gathered(report), _origin(report)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def proof_link(path: str) -> str:
    target = link_target(path)
    return markdown_link(path, target) if target else markdown_code(path)


def _head(report: Report) -> list[str]:
    lines = [] if len(report.outcomes) == 1 else [f"# {words.counts_line(report)}"]
    if report.interrupted:
        lines += ["", "**Interrupted.** What follows is what was judged before."]
    if report.not_run:
        lines += ["", f"Of the plan, not run: {markdown(' · '.join(report.not_run))}"]
    return lines[1:] if lines[:1] == [""] else lines


def _gathered(report: Report) -> list[str]:
    """The files that are made of all attempts together."""
    lines = [
        f"- {markdown_link(file.path, link_target(file.path) or '')}: {markdown(words.gathered(file))}"
        for file in report.files
    ]
    return ["Of all attempts together:", "", *lines] if lines else []


def _origin(report: Report) -> list[str]:
    machine = f"{report.machine.host} · {words.machine_line(report.machine)} · nsa-harness {report.harness}"
    return [f"Run {markdown_code(report.run_id)} on {markdown(machine)}", "", *markdown_fence(report.command, "sh")]


def _overview(report: Report, told: set[int]) -> list[str]:
    rows = [
        (
            markdown_link(outcome.spec.scenario, f"#run-{number}")
            if number in told
            else f'<a id="run-{number}"></a>{markdown(outcome.spec.scenario)}',
            f"**{words.verdict(outcome)}**",
            markdown(words.headline_tag(outcome)),
            markdown(words.row_sentence(outcome)),
            markdown(" · ".join(words.remarks(outcome))),
            words.wall_time(outcome),
        )
        for number, outcome in enumerate(report.outcomes, start=1)
    ]
    return markdown_table(("run", "verdict", "cause", "summary", "note", "time:"), rows) if rows else []


def _over_all(table: Table) -> list[str]:
    lines = [f"<details><summary>{table.title}</summary>"] if table.folded else [f"## {table.title}"]
    for sentence in table.said:
        lines += ["", markdown(sentence)]
    if table.command:
        lines += ["", *markdown_fence(table.command, "sh")]
    if table.rows:
        lines += ["", *markdown_table(table.head, [tuple(map(_cell, row)) for row in table.rows])]
    for sentence in table.after:
        lines += ["", markdown(sentence)]
    return [*lines, *(["", "</details>"] if table.folded else [])]


def _cell(cell: Cell) -> str:
    return " ".join(_part(part) for part in cell if part.text)


def _part(part: CellPart) -> str:
    if part.code:
        return markdown_code(part.text, in_table=True)
    if part.run is None:
        return f"**{markdown(part.text)}**" if part.strong else markdown(part.text)
    link = markdown_link(part.text, f"#run-{part.run}")
    return f"**{link}**" if part.status in (Status.HANG, Status.FAIL) else link


def _section(number: int, outcome: Outcome, level: str) -> list[str]:
    """The answer in five lines, then what it rests on."""
    title = f"{words.verdict(outcome)} {markdown(outcome.spec.scenario)}: {markdown(answer.title(outcome))}"
    anchor = [] if level == "#" else [f'<a id="run-{number}"></a>', ""]
    return [
        *anchor,
        f"{level} {title}",
        "",
        f"**{markdown(answer.sentence(outcome.verdict.summary))}**",
        *_place(outcome.culprit.place if outcome.culprit else None),
        *_stacks(outcome),
        *_standings(outcome),
        *_to_do(outcome),
        *_evidence(outcome),
        *_repeat(outcome),
        *_artifacts(outcome),
    ]


def _place(place: Place | None) -> list[str]:
    if place is None:
        return []
    source = f": {markdown_code(words.statement(place))}" if place.text else ""
    return ["", f"Look at {_place_line(place)}{source}"]


def _place_line(place: Place) -> str:
    name, details = words.place_name(place), words.place_details(place)
    return " · ".join([markdown_code(name)] * bool(name) + [markdown(details)] * bool(details))


def _stacks(outcome: Outcome) -> list[str]:
    """The culprit's first. Files with whole stacks are links below."""
    lines = [line for block in answer.parting_stacks(outcome.stacks) for line in ("", *block)][1:]
    return ["", *markdown_fence("\n".join(lines), "text")] if lines else []


def _to_do(outcome: Outcome) -> list[str]:
    said = answer.cause_of(outcome)
    do = ["", f"**Do:** {markdown(said.advice)}"] if said and said.advice else []
    left_open = said.left_open if said else ()
    return [
        *do,
        *(["", "Left open by the evidence:", "", *(f"- {markdown(text)}" for text in left_open)] if left_open else []),
    ]


def _standings(outcome: Outcome) -> list[str]:
    if not outcome.standings:
        return _endings(outcome)
    hangs = outcome.verdict.status is Status.HANG
    rows = [
        (
            f"{markdown(words.standing_rank(row))}{' ◀ culprit' if row.culprit else ''}",
            markdown(row.blocked_in),
            markdown(row.waits_for),
            words.seconds(row.no_progress_s),
            words.step(outcome.last_step.get(row.rank)),
            words.exit_of(outcome, row.rank),
        )
        for row in outcome.standings
    ]
    blocked = "blocked in" if hangs else "last seen"
    return ["", *markdown_table(("rank:", blocked, "waiting for", "no progress for:", "steps done:", "exit"), rows)]


def _endings(outcome: Outcome) -> list[str]:
    rows = [
        (str(rank), words.step(outcome.last_step.get(rank)), words.exit_of(outcome, rank))
        for rank in sorted(outcome.exit_codes)
    ]
    return ["", *markdown_table(("rank:", "steps done:", "exit"), rows)] if rows else []


def _vitals(outcome: Outcome) -> list[str]:
    head, rows = words.vital_table(outcome)
    lines = ["", *markdown_table(head, [tuple(map(markdown, row)) for row in rows])] if len(head) > 1 else []
    numbers = " · ".join(words.numbers(outcome))
    return [*lines, "", markdown(numbers)] if numbers else lines


def _evidence(outcome: Outcome) -> list[str]:
    lines = [*_heading("Evidence"), "", meaning(outcome), ""]
    lines += [f"- {markdown(fact)}" for fact in words.facts(outcome)]
    if culprit := words.culprit_line(outcome):
        lines += [f"- {markdown(culprit)}"]
    if outcome.why:
        lines += [f"- **why a hang:** {markdown(outcome.why)}"]
    if shared := words.last_shared(outcome):
        lines += [f"- **last shared:** {markdown(shared)}"]
    for finding in outcome.findings:
        lines += _finding(finding, outcome)
    return [*lines, *_looked_at(outcome), *_vitals(outcome)]


def _finding(finding: Finding, outcome: Outcome) -> Iterator[str]:
    who = f", {words.ranks(finding.ranks)}" if finding.ranks else ""
    sure = f"{severity(finding, outcome).value}, {words.certainty(finding.confidence)}"
    yield f"- **{markdown(finding.code)}** ({sure}{who}): {markdown(finding.claim)}"
    if finding.place:
        yield f"  - place: {_place_line(finding.place)}"
    if finding is not answer.cause_of(outcome):
        yield from (f"  - left open: {markdown(text)}" for text in finding.left_open)
    if finding.advice and finding is not answer.cause_of(outcome):
        yield f"  - do: {markdown(finding.advice)}"
    yield f"  - proof: {' · '.join(map(proof_link, finding.proof)) or 'no file'}"


def _looked_at(outcome: Outcome) -> Iterator[str]:
    for name, items in words.grounds(outcome):
        yield f"- **{name}:** {' · '.join(map(markdown, items))}"
    for trouble in outcome.trouble:
        yield f"- **not captured:** {markdown(words.trouble(trouble))}"


def _repeat(outcome: Outcome) -> list[str]:
    lines = _heading("Repeat it")
    lines += ["", *(markdown_fence(outcome.repeat, "sh") if outcome.repeat else ["No command repeats it."])]
    if outcome.next:
        lines += ["", "Go on with:", "", *markdown_fence(outcome.next, "sh")]
    return lines


def _artifacts(outcome: Outcome) -> list[str]:
    rows = [(_link(outcome, item.path), f"{item.count}") for item in outcome.artifacts if item.absent is None]
    missing = [
        f"{markdown_code(item.path)}: {markdown(item.absent)}" for item in outcome.artifacts if item.absent is not None
    ]
    return (
        [
            *_heading("Files"),
            *(["", *markdown_table(("file", "entries:"), rows)] if rows else []),
            *(
                ["", f"<details><summary>not there: {len(missing)}</summary>", "", " · ".join(missing)]
                if missing
                else []
            ),
            *(["", "</details>"] if missing else []),
        ]
        if rows or missing
        else []
    )


def _link(outcome: Outcome, path: str) -> str:
    """A pattern names several files, which no link can."""
    target = None if "*" in path else link_target(f"{outcome.dir}/{path}")
    return markdown_link(path, target) if target else markdown_code(path, in_table=True)


def _heading(title: str) -> list[str]:
    return ["", f"### {title}"]
