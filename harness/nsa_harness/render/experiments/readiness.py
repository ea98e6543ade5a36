"""READINESS.md, readiness.json and the terminal output of a readiness check."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness.core.experiment.checklist import Checklist, ChecklistPhase, Concurrency
from nsa_harness.core.experiment.readiness import (
    CriterionResult,
    CriterionRow,
    Decision,
    FailureReason,
    Measurement,
    PhaseRow,
    Untested,
)
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Report, Status
from nsa_harness.render.answer import sentence
from nsa_harness.render.terminal.layout import command, labelled, paragraph, table
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.render.text import (
    escape,
    escaped,
    link_target,
    markdown,
    markdown_code,
    markdown_fence,
    markdown_link,
    markdown_prose,
    markdown_table,
)
from nsa_harness.supervisor.storage.adapters import json_object
from nsa_harness.texts import words

SCHEMA = 1
_LABEL = 13
_SIGNS = {"lt": "<", "le": "≤", "gt": ">", "ge": "≥", "eq": "="}
_BYTES = "bytes"
_LARGE = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, kw_only=True)
class ReadinessRecord:
    """The contents of readiness.json."""

    schema: int = SCHEMA
    verdict: Decision
    ended: bool  # False if it was interrupted; the same command then continues it
    shape: str  # the model size that was checked
    checklist: str  # path of the checklist file
    about: str
    command: str
    run_id: str
    harness: str
    machine: MachineFacts
    criteria: tuple[CriterionRow, ...]
    phases: tuple[PhaseRow, ...]
    not_tested: tuple[Untested, ...]
    planned: Mapping[str, int] = field(default_factory=dict)  # the run that the verdict is about; unset values left out


def readiness_json(record: ReadinessRecord) -> str:
    return json.dumps(json_object(record), indent=1) + "\n"


def readiness_md(record: ReadinessRecord) -> str:
    """Return READINESS.md as text."""
    record = escaped(record)
    untested_lines = [f"- {markdown(part.what)}: {markdown(part.why)}" for part in record.not_tested]
    sections = [
        [f"# {record.verdict} · ready {markdown(record.shape)}", "", f"**{markdown(sentence(headline(record)))}**"],
        *([[f"Planned run: {text}."]] if (text := planned_text(record.planned)) else []),
        *([["The check was interrupted. The same command continues it."]] if not record.ended else []),
        *(_reason_section(reason) for reason in failure_reasons(record)[:1]),
        ["## Criteria", "", *_criteria_table(record)],
        *([["## Not tested here", "", *untested_lines]] if untested_lines else []),
        ["## Phases", "", *_phases_table(record)],
        *(_reason_section(reason, "## Also") for reason in failure_reasons(record)[1:]),
        [
            f"Run {markdown_code(record.run_id)} on {markdown(record.machine.host)} ·"
            f" {markdown(words.machine_line(record.machine))} · nsa-harness {record.harness} · checklist:"
            f" {markdown(record.checklist)}",
            "",
            *markdown_fence(record.command, "sh"),
        ],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


_PLANNED_UNITS = {"steps": "step", "ranks": "rank", "nodes": "node"}


def planned_text(planned: Mapping[str, int]) -> str:
    """Return the planned run, such as "50000 steps, sequence 4096", or "". A single node is not mentioned."""
    parts = [
        words.plural(value, _PLANNED_UNITS[key]) if key in _PLANNED_UNITS else f"sequence {value}"
        for key, value in planned.items()
        if (key, value) != ("nodes", 1)
    ]
    return ", ".join(parts)


def headline(record: ReadinessRecord) -> str:
    """Return the reason for the verdict, such as "7 of 7 criteria met, none missed"."""
    if record.verdict is Decision.NO_GO:
        missed_texts = _missed_texts(record)
        return "; ".join(missed_texts[:_MAX_NAMED]) + (
            f"; and {len(missed_texts) - _MAX_NAMED} more" if len(missed_texts) > _MAX_NAMED else ""
        )
    met_count = sum(row.result is CriterionResult.MET for row in record.criteria)
    counts = f"{met_count} of {_criteria(len(record.criteria))} met"
    rows = [(row.name, row.result, row.why) for row in record.criteria]
    rows += [(row.name, row.result, row.why) for row in record.phases]
    open_texts = [
        f"{name}: {why}" for name, result, why in rows if result in (CriterionResult.OPEN, CriterionResult.NOT_REACHED)
    ]
    if record.verdict is Decision.GO:
        untested_names = ", ".join(part.what for part in record.not_tested)
        return f"{counts}, none missed" + (f"; {untested_names} not tested here" if untested_names else "")
    first = open_texts[0] if open_texts else "nothing could be tested here"
    return f"{counts}; {first}" + (f"; and {len(open_texts) - 1} more open" if len(open_texts) > 1 else "")


def _criteria(count: int) -> str:
    return "1 criterion" if count == 1 else f"{count} criteria"


_MAX_NAMED = 3  # at most this many reasons are listed in the headline


def _missed_texts(record: ReadinessRecord) -> list[str]:
    """Return the reasons for the verdict NO_GO, with the most important one first."""
    missed_criteria = [row for row in record.criteria if row.result is CriterionResult.MISSED]
    failed_runs = [
        run for row in record.phases if row.result is CriterionResult.MISSED for run in row.runs if not run.as_it_should
    ]
    runs = [
        (run, f"{run.scenario} ended with {run.verdict}{f' ({run.cause})' if run.cause else ''}") for run in failed_runs
    ]
    return [
        *(text for run, text in runs if run.verdict != Status.PASS),
        *(f"{row.name}: {measured_text(row)} in {row.run}, limit {limit_text(row)}" for row in missed_criteria),
        *(text for run, text in runs if run.verdict == Status.PASS),
    ]


def failure_reasons(record: ReadinessRecord) -> list[FailureReason]:
    """Return, for each run that did not end as it should, the reason."""
    run_reasons = [run.blame for row in record.phases for run in row.runs if run.blame is not None]
    criterion_reasons = [
        row.blame for row in record.criteria if row.result is CriterionResult.MISSED and row.blame is not None
    ]
    return list({reason.run: reason for reason in reversed([*run_reasons, *criterion_reasons])}.values())[::-1]


def limit_text(row: CriterionRow) -> str:
    return " and ".join(f"{_SIGNS[key]} {amount_text(limit, row.unit)}" for key, limit in row.limit)


def measured_text(row: CriterionRow) -> str:
    """Return the measured value with its unit, or the result if nothing was measured."""
    number = row.measured
    if number is None:
        return row.result.value
    return f"{amount_text(number.value, row.unit)}{_interval(number, row.unit)}"


def _interval(number: Measurement, unit: str) -> str:
    if number.low is None or number.high is None:
        return ""
    bare = _BYTES if unit.startswith(_BYTES) else ""
    return f" ({amount_text(number.low, bare)} to {amount_text(number.high, bare)})"


def margin_text(row: CriterionRow) -> str:
    """Return the distance of a measurement from its limit, such as "12%", or "" if it is unknown."""
    if row.margin is None or row.measured is None:
        return ""
    from_below = any(key in ("gt", "ge") for key, _ in row.limit)
    if row.result is CriterionResult.MISSED:
        return f"{-row.margin:.0%} too low" if from_below else f"{1 - row.margin:.3g} times the limit"
    if from_below and row.margin >= 1:
        return f"{row.margin + 1:.3g} times the limit"
    return f"{row.margin:.0%}" if row.margin else "just met"


def amount_text(value: float, unit: str) -> str:
    """Return a value with its unit, such as "28.4 GB" or "812 tokens/s"."""
    if not unit.startswith(_BYTES):
        return f"{value:.4g} {unit}".strip()
    size, letters = next(((size, letters) for size, letters in _LARGE if abs(value) >= size), (1.0, _BYTES))
    return f"{value / size:.3g} {letters}{unit.removeprefix(_BYTES)}"


def _criteria_table(record: ReadinessRecord) -> list[str]:
    rows = [
        (
            markdown(row.name),
            f"**{row.result.value}**",
            markdown(measured_text(row)) if row.measured else "",
            markdown(limit_text(row)),
            margin_text(row) if row.measured else markdown(row.why),
            _run_link(row.run, row.dir),
            markdown_code(row.repeat, in_table=True) if row.repeat else "",
        )
        for row in record.criteria
    ]
    return markdown_table(("criterion", "result", "measured", "limit", "margin", "run", "repeat"), rows)


def _run_link(run: str | None, directory: str | None) -> str:
    target = link_target(f"{directory}/verdict.json") if directory else None
    return markdown_link(run, target) if run and target else markdown(run or "")


def _phases_table(record: ReadinessRecord) -> list[str]:
    names = {CriterionResult.MET: "passed", CriterionResult.MISSED: "failed"}
    rows = [
        (
            markdown(row.name),
            f"**{names.get(row.result, row.result.value)}**",
            ", ".join(f"{_run_link(run.scenario, run.dir)} {run.verdict}" for run in row.runs) or markdown(row.why),
            words.seconds(sum(run.wall_s for run in row.runs)) if row.runs else "",
        )
        for row in record.phases
    ]
    return markdown_table(("phase", "result", "runs", "time:"), rows)


def _reason_section(reason: FailureReason, title: str = "## Cause") -> list[str]:
    place = f" at {markdown_code(words.place_name(reason.place))}" if reason.place else ""
    cause = f", {reason.cause}" if reason.cause else ""
    return [
        f"{title}: {markdown(reason.run)}",
        "",
        f"{reason.verdict}{markdown(cause)}{place}: {markdown_prose(sentence(reason.sentence))}",
        *(["", f"**Do:** {markdown_prose(reason.advice)}"] if reason.advice else []),
        *(["", *markdown_fence(reason.next, "sh")] if reason.next else []),
    ]


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """The expected and the longest possible duration of a phase or of a whole check."""

    about_s: float | None  # None if no similar run has ended
    at_most_s: float | None  # None if a run has no deadline

    def __str__(self) -> str:
        about = [] if self.about_s is None else [f"about {words.seconds(float(round(self.about_s)))}"]
        bound = "no time limit" if self.at_most_s is None else f"at most {words.seconds(self.at_most_s)}"
        return ", ".join([*about, bound])


def header_lines(shape: str, checklist: Checklist, takes: TimeEstimate, note: str, width: int) -> Iterator[str]:
    phases, criteria = len(checklist.phases), len(checklist.criteria)
    counts = f"{words.plural(phases, 'phase')}, {_criteria(criteria)}"
    yield from paragraph(f"READY  {shape}   {counts}, {takes}", width, "", "       ")
    if note:
        yield from paragraph(escape(note), width, "       ")


def phase_lines(
    number: int,
    of: int,
    phase: ChecklistPhase,
    following: Sequence[ChecklistPhase],
    takes: TimeEstimate,
    takes_in_all: TimeEstimate,
    width: int,
) -> Iterator[str]:
    """Yield the lines at the start of phase `number` of `of`, with its time and that of all remaining phases."""
    yield ""
    about = f"   {escape(phase.about)}" if phase.about else ""
    yield from paragraph(f"{number}/{of}  {phase.name}{about}", width, "", "     ")
    after = f"; then {following[0].name} · all remaining phases {takes_in_all}" if following else "; the last phase"
    yield from paragraph(f"{takes}{after}", width, "     ")


def unreached_line(phase: ChecklistPhase, why: str, width: int) -> str:
    return next(paragraph(f"not reached: {phase.name}, because {escape(why)}", width * 4))


_PARALLELISM = {
    Concurrency.NEVER: "one run at a time",
    Concurrency.MAY: "runs may be parallel",
    Concurrency.MUST: "runs must be parallel",
}


def plan_lines(shape: str, phases: Sequence[tuple[ChecklistPhase, Sequence[RunSpec | Skip]]]) -> Iterator[str]:
    """Yield the output of `ready --dry-run`, which shows each phase and its runs."""
    for phase, specs in phases:
        after = f" · after {', '.join(phase.needs)}" if phase.needs else ""
        yield f"{phase.name} ({shape}) · {_PARALLELISM[phase.together]}{after}"
        for spec in specs:
            text = f"SKIP {spec.reason}" if isinstance(spec, Skip) else spec.subject
            yield f"  {spec.scenario}   {escape(text)}"


def result_lines(record: ReadinessRecord, run_dir: Path, width: int) -> Iterator[str]:
    """Yield the final lines of a readiness check, which end with the verdict."""
    record = escaped(record)
    yield ""
    rows = [
        (row.name, row.result.value, measured_text(row) if row.measured else "", limit_text(row), margin_text(row))
        for row in record.criteria
    ]
    yield from table(("criterion", "result", "measured", "limit", "margin"), rows, width)
    yield ""
    for row in record.phases:
        if row.result in (CriterionResult.NOT_REACHED, CriterionResult.OPEN):
            yield from labelled(row.result.value, f"{row.name}: {row.why}", width, _LABEL)
    yield from labelled("planned", planned_text(record.planned), width, _LABEL)
    yield from labelled(
        "not tested", " · ".join(f"{part.what} ({part.why})" for part in record.not_tested), width, _LABEL
    )
    for reason in failure_reasons(record)[:1]:
        place = f" at {words.place_name(reason.place)}" if reason.place else ""
        cause = f" {reason.cause}" if reason.cause else ""
        text = f"{reason.run} {reason.verdict}{cause}{place}: {sentence(reason.sentence)}"
        yield from labelled("cause", text, width, _LABEL)
        yield from labelled("do", reason.advice, width, _LABEL)
        yield from command("next", reason.next or "", width, _LABEL)
    yield from command("more", escape(f"{run_dir}/READINESS.md"), width, _LABEL)
    yield ""
    yield from paragraph(f"{record.verdict}  ready {record.shape}   {headline(record)}", width, "", "       ")
    if not record.ended:
        yield from paragraph(f"interrupted; the same command continues it: {record.command}", width, "       ")


class ReadyScreen(Terminal):
    """The terminal output of a readiness check, one line per run. The command prints the lines around a phase."""

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:  # noqa: ARG002
        self.expect_runs(sum(isinstance(spec, RunSpec) for spec in specs))

    def on_launch(self, spec: RunSpec) -> None: ...

    def on_done(self, report: Report, run_dir: Path) -> None: ...

    def tell(self, lines: Iterable[str]) -> None:
        """Print the lines, and return as soon as they have been written to the stream."""
        self._print(lines)
        self.settle()

    @property
    def width(self) -> int:
        """The width of the terminal in columns."""
        return self._width
