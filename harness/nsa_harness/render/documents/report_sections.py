"""The sections of a whole report: its runs, and the tables over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

from nsa_harness.core.comparison.config_matrix import config_matrix
from nsa_harness.core.comparison.decisions import Playbook, explained_failures, fired_gates, playbook_for
from nsa_harness.core.comparison.gates import failed, outcome_names
from nsa_harness.core.comparison.hypotheses import Answer, HypothesisRow, Side, answers, worth_a_row
from nsa_harness.core.comparison.sweeps import sweeps
from nsa_harness.core.report import (
    Artifact,
    GateAnswer,
    GateState,
    Outcome,
    Report,
    Status,
    TreeAnswer,
    TreeStep,
    Walk,
)
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render.answer import outcomes_in_full, sentence
from nsa_harness.render.costs import COST_HEAD, cost_row, fit_lines
from nsa_harness.render.sections import (
    Command,
    Counts,
    File,
    Files,
    Line,
    Overview,
    Part,
    Search,
    Section,
    Sentence,
    Span,
    Table,
    joined,
    line,
    run_section,
)
from nsa_harness.render.text import link_target
from nsa_harness.texts import words

_RUNS_IN_A_CELL = 6


def report_sections(report: Report, playbook: Playbook, search: BisectReport | None = None) -> Iterator[Section]:
    """Yield the sections of a report: for a single run its answer first, for several runs what they say together.

    If runs went wrong, they are the news and come before the hypotheses; otherwise the hypotheses come first.
    """
    in_full = outcomes_in_full(report)
    alone = len(report.outcomes) == 1
    if not alone:
        yield Counts(report=report)
        yield from _incomplete(report)
    if search is not None:
        yield Search(report=search)
    if not alone:
        hypotheses = _hypotheses(report, playbook)
        overview = _overview(report, frozenset(number for number, _ in in_full))
        yield from (*overview, *hypotheses) if in_full else (*hypotheses, *overview)
    for number, outcome in in_full:
        yield run_section(number, outcome, alone=alone)
    if alone:
        yield from _incomplete(report)
    yield from _chapters(report, playbook)
    yield from _gathered_files(report)
    yield from _origin(report)


def _incomplete(report: Report) -> Iterator[Section]:
    if report.interrupted:
        yield Sentence(label="Interrupted.", line=line("What follows is what was judged before."))
    if report.not_run:
        yield Sentence(line=line(f"Of the plan, not run: {joined(report.not_run)}"))


def _overview(report: Report, in_full: frozenset[int]) -> Iterator[Section]:
    if report.outcomes:
        yield Overview(runs=tuple(words.bad_news_first(report)), in_full=in_full)


def _gathered_files(report: Report) -> Iterator[Section]:
    """Yield the files that are made of all attempts together."""
    if report.files:
        yield Sentence(line=line("Of all attempts together:"))
        yield Files(items=tuple(File(file.path, link_target(file.path), words.gathered(file)) for file in report.files))


def _origin(report: Report) -> Iterator[Section]:
    machine = f"on {report.machine.host} · {words.machine_line(report.machine)} · nsa-harness {report.harness}"
    yield Sentence(line=(Span("Run"), Span(report.run_id, code=True), Span(machine)), quiet=True)
    yield Command(text=report.command)


def _chapter(
    title: str,
    before: Sequence[str] = (),
    *,
    command: str | None = None,
    head: tuple[str, ...] = (),
    rows: tuple[tuple[Line, ...], ...] = (),
    after: Sequence[str] = (),
    folded: bool = False,
) -> Part:
    """Return sentences, the command to run now, a table, and remarks on it."""
    sections: list[Section] = [Sentence(line=line(sentence)) for sentence in before]
    sections += [Command(text=command)] if command else []
    sections += [Table(title=title, head=head, rows=rows)] if rows else []
    sections += [Sentence(line=line(sentence), quiet=True) for sentence in after]
    return Part(title=title, sections=tuple(sections), chapter=True, folded=folded)


def _hypotheses(report: Report, playbook: Playbook) -> Iterator[Part]:
    """Yield the table that people read first if there are several runs."""
    rows = answers(report.outcomes, playbook_for(playbook, report.outcomes).hypotheses)
    shown, numbers = [row for row in rows if worth_a_row(row)], _numbers(report)
    any_failed = any(map(failed, report.outcomes))
    if not shown or not (any_failed or any(row.answer is not Answer.NOT_TESTED for row in shown)):
        return
    more = sum(row.command is not None for row in rows if row not in shown)
    nothing_failed = "No run failed unexpectedly: refuted means that the setting breaks none of these runs."
    yield _chapter(
        "Hypotheses",
        before=() if any_failed else (nothing_failed,),
        head=("hypothesis", "result", "without it", "with it", "because"),
        rows=tuple(_hypothesis_row(row, numbers) for row in shown),
        after=(words.untested_note(more),) if more else (),
    )


def _chapters(report: Report, playbook: Playbook) -> Iterator[Part]:
    """Yield the tables that follow the runs, the most important first."""
    playbook = playbook_for(playbook, report.outcomes)
    numbers = _numbers(report)
    yield from _decisions(report)
    yield from _tree(report)
    yield from _untested(report, playbook)
    yield from _matrix(report, numbers)
    yield from _costs(report, numbers)
    yield from _files(report)


def _numbers(report: Report) -> dict[int, int]:
    return {id(outcome): number for number, outcome in enumerate(report.outcomes, start=1)}


def _answer(given: StrEnum, *, strong: bool) -> Line:
    return (Span(given.value, strong=strong),)


def _command(words_of_shell: str | None) -> Line:
    return (Span(words_of_shell, code=True),) if words_of_shell else ()


def _decisions(report: Report) -> Iterator[Part]:
    """Yield what the gates say. Gates compare runs: for a single run only a gate that fired is shown."""
    counting = [outcome for outcome in report.outcomes if outcome.final]
    now, sure = fired_gates(report.gates), tuple(_explained(counting))
    if not counting or (len(counting) == 1 and not now):
        return
    if not now and not any(map(failed, counting)):
        yield _chapter("Decisions", before=(_no_gate(counting), *_not_reached(report.gates)))
        return
    shown = [gate for gate in report.gates if len(counting) > 1 or gate.state is GateState.FIRED]
    leading = [gate for gate in now if gate.leads]
    yield _chapter(
        "Decisions",
        before=(*sure, *(map(_first, leading) if sure or leading else [_nobody_says(report)])),
        command=leading[0].commands[0] if leading and leading[0].commands else None,
        head=("gate", "if", "answer", "runs", "then") if shown else (),
        rows=tuple(map(_decision_row, shown)),
    )


def _explained(counting: Sequence[Outcome]) -> Iterator[str]:
    """Yield each cause that is certain, with its remedy; it takes precedence over every gate."""
    told: dict[str, list[Outcome]] = {}
    for outcome, finding in explained_failures(counting):
        told.setdefault(f"{finding.code}. {sentence(finding.advice)}", []).append(outcome)
    for remedy, outcomes in told.items():
        yield f"The cause of {outcome_names(outcomes)} is certain: {remedy}"


def _no_gate(counting: Sequence[Outcome]) -> str:
    given = [(status, sum(one.verdict.status is status for one in counting)) for status in words.LOUDEST_FIRST]
    verdicts = joined([f"{number} {status.value}" for status, number in given if number])
    announced = any(one.verdict.status in (Status.FAIL, Status.HANG) for one in counting)
    runs = words.plural(len(counting), "run")
    return f"No gate fired: {runs}, {verdicts}{'; every failure was expected' if announced else ''}."


def _not_reached(gates: Sequence[GateAnswer]) -> Iterator[str]:
    codes = [gate.name for gate in gates if gate.state is GateState.NOT_REACHED]
    if codes:
        yield f"{len(codes)} of {len(gates)} gates were not reached by these runs: {' · '.join(codes)}."


def _nobody_says(report: Report) -> str:
    asked = "no gate names what to do" if report.gates else "nothing was agreed for them"
    return f"No gate fired, and runs failed: {asked}; what to do stands with each run."


def _first(gate: GateAnswer) -> str:
    because = f" Why: {gate.because}." if gate.because else ""
    return f"{gate.when[:1].upper()}{gate.when[1:]} ({gate.why}): {gate.then}.{because}"


def _decision_row(gate: GateAnswer) -> tuple[Line, ...]:
    now = gate.state is GateState.FIRED
    then = (*line(gate.then), *(part for command in gate.commands for part in _command(command))) if now else ()
    return line(gate.name), line(gate.when), _answer(gate.state, strong=now), line(gate.why), then


def _tree(report: Report) -> Iterator[Part]:
    walk = report.tree
    if walk is None:
        return
    commands = [step.command for step in walk.open if step.command]
    yield _chapter(
        "Decision tree",
        before=tuple(_led(walk)),
        command=commands[0] if commands else None,
        head=("question", "answer", "answered by", "leads to") if walk.steps else (),
        rows=tuple(map(_tree_row, walk.steps)),
    )


def _led(walk: Walk) -> Iterator[str]:
    before = words.plural(len(walk.open), "question")
    if not walk.steps:
        yield f"Nothing is asked: the cause of {walk.made_from} is certain."
        return
    if walk.leaf is None:
        yield "The path ends at no leaf: " + (f"{before} open." if walk.open else "every question was answered no.")
    elif walk.open:
        yield f"As far as it is answered, the path leads to: {walk.leaf}. Open before it: {before}."
    else:
        yield f"The path leads to: {walk.leaf}."
    yield f"It is made from {walk.made_from}."


def _tree_row(step: TreeStep) -> tuple[Line, ...]:
    leads: Line = line(step.leads_to or "")
    if step.answer is TreeAnswer.OPEN:
        leads = _command(step.command) or line("no run here can be asked again")
    return line(step.question), _answer(step.answer, strong=step.answer is TreeAnswer.YES), line(step.why), leads


def _untested(report: Report, playbook: Playbook) -> Iterator[Part]:
    """Yield the hypotheses that no run tested, with the command that tests each and its minimum cost."""
    rows = answers(report.outcomes, playbook.hypotheses)
    rest = [row for row in rows if row.command and not worth_a_row(row)]
    if not rest:
        return
    yield _chapter(
        "Not tested",
        before=("No two of these runs differ in just that. Each command makes both sides.",),
        head=("hypothesis", "tested by", "takes"),
        rows=tuple((line(row.hypothesis.text), _command(row.command), line(words.cost(row))) for row in rest),
        folded=True,
    )


def _hypothesis_row(row: HypothesisRow, numbers: dict[int, int]) -> tuple[Line, ...]:
    because: Line = line(words.hypothesis_reason(row))
    if row.command:
        because = (*because, *_command(row.command), *line(words.cost(row)))
    answer = _answer(row.answer, strong=row.answer is Answer.SUPPORTED)
    return line(row.hypothesis.text), answer, _side(row.control, numbers), _side(row.changed, numbers), because


def _side(side: Side | None, numbers: dict[int, int]) -> Line:
    if side is None:
        return line("")
    counted = words.ending_counts(side.ended)
    return (*_run(side.run, numbers), *(line(counted) if counted else ()))


def _run(outcome: Outcome, numbers: dict[int, int]) -> Line:
    verdict = outcome.verdict.status
    return (*line(outcome.spec.scenario), Span(verdict.value, run=numbers[id(outcome)], status=verdict))


def _matrix(report: Report, numbers: dict[int, int]) -> Iterator[Part]:
    matrix = config_matrix(report.outcomes)
    if matrix is None:
        return
    same = " · ".join(f"{key}={value}" for key, value in matrix.same)
    yield _chapter(
        "Configuration matrix",
        folded=True,
        before=(
            "Down: what was set. Across: how the ranks worked together, or the setting that was varied most.",
            *([f"The same in all: {same}."] * bool(same)),
        ),
        head=("set", *matrix.columns),
        rows=tuple((line(row.name), *(_matrix_cell(runs, numbers) for runs in row.cells)) for row in matrix.rows),
    )


def _matrix_cell(runs: Sequence[Outcome], numbers: dict[int, int]) -> Line:
    if not runs:
        return line("not run")
    parts = [
        Span(run.verdict.status.value, run=numbers[id(run)], status=run.verdict.status)
        for run in runs[:_RUNS_IN_A_CELL]
    ]
    more = len(runs) - len(parts)
    return tuple(parts) + (line(f"and {more} more") if more else ())


def _costs(report: Report, numbers: dict[int, int]) -> Iterator[Part]:
    """Yield a table for each scenario that was run at several sizes: what a step cost, and how that grows."""
    swept: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        if outcome.final and outcome.cost is not None and "@" in outcome.spec.scenario:
            swept.setdefault(outcome.spec.scenario.partition("@")[0], []).append(outcome)
    for name, cells in swept.items():
        if len(cells) > 1:
            yield _chapter(
                f"What a step costs: {name}",
                before=(
                    "The median of the steps after the first; what the graph of the first keeps for its backward pass,"
                    " and its nodes.",
                ),
                head=COST_HEAD,
                rows=tuple((_run(cell, numbers), *map(line, cost_row(cell.cost))) for cell in cells if cell.cost),
                after=tuple(line for sweep in sweeps(cells) for line in fit_lines(sweep)),
            )


def _files(report: Report) -> Iterator[Part]:
    listed = [outcome for outcome in report.outcomes if outcome.artifacts]
    if len(listed) < 2:
        return
    yield _chapter(
        "Files of all runs",
        folded=True,
        before=(f"Over {len(listed)} attempts; a number in brackets says how often that reason holds.",),
        head=("file", "in attempts:", "entries:", "not there, because"),
        rows=tuple(((Span(path, code=True),), *map(line, texts)) for path, *texts in file_rows(listed)),
    )


def file_rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each file that an attempt lists: path, attempts that have it, entries, and why others do not."""
    listed: dict[str, list[Artifact]] = {}
    for outcome in outcomes:
        for item in outcome.artifacts:
            listed.setdefault(item.path, []).append(item)
    for path, items in listed.items():
        counts = [item.count or 0 for item in items if item.absent is None]
        reasons = Counter(item.absent for item in items if item.absent is not None)
        most_frequent = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
        absent = "; ".join(f"{reason} ({count})" for reason, count in most_frequent)
        yield path, f"{len(counts)} of {len(items)}", str(sum(counts)) if counts else "none", absent
