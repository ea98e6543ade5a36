"""Tables over all runs of a report, which Markdown and HTML show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.comparison.config_matrix import config_matrix
from nsa_harness.core.comparison.decisions import Playbook, explained, fired, fitting
from nsa_harness.core.comparison.gates import failed, named
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
from nsa_harness.render.answer import sentence
from nsa_harness.render.costs import COST_HEAD, cost_row, fit_lines
from nsa_harness.texts import words

_RUNS_IN_A_CELL = 6


@dataclass(frozen=True, kw_only=True)
class CellPart:
    """A part of a cell: plain text, a verdict with the number of its run, or a command or path."""

    text: str
    run: int | None = None
    status: Status | None = None
    code: bool = False
    strong: bool = False


Cell = tuple[CellPart, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A section over all runs. A head that ends in a colon aligns its column to the right."""

    title: str
    said: tuple[str, ...]  # sentences before the table
    command: str | None = None  # what to do now
    head: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    after: tuple[str, ...] = ()
    folded: bool = False  # shown closed


def hypotheses(report: Report, playbook: Playbook) -> Table | None:
    """Return the table of hypotheses, which people read first; None if nothing failed and nothing was tested."""
    rows = answers(report.outcomes, fitting(playbook, report.outcomes).hypotheses)
    shown, numbers = [row for row in rows if worth_a_row(row)], _numbers(report)
    is_useful = any(map(failed, report.outcomes)) or any(row.answer is not Answer.NOT_TESTED for row in shown)
    if not (shown and is_useful):
        return None
    more = sum(row.command is not None for row in rows if row not in shown)
    nothing_failed = "No run failed unexpectedly: refuted means that the setting breaks none of these runs."
    return Table(
        title="Hypotheses",
        said=() if any(map(failed, report.outcomes)) else (nothing_failed,),
        head=("hypothesis", "result", "without it", "with it", "because"),
        rows=tuple(_hypothesis_row(row, numbers) for row in shown),
        after=(words.untested_note(more),) if more else (),
    )


def tables(report: Report, playbook: Playbook) -> tuple[Table, ...]:
    """Return the tables after the runs, the most important first."""
    playbook = fitting(playbook, report.outcomes)
    candidates = (
        _decisions(report),
        _tree(report),
        _untested(report, playbook),
        _matrix(report, _numbers(report)),
        *_costs(report, _numbers(report)),
        _files(report),
    )
    return tuple(table for table in candidates if table is not None)


def _numbers(report: Report) -> dict[int, int]:
    return {id(outcome): number for number, outcome in enumerate(report.outcomes, start=1)}


def text(value: str) -> Cell:
    return (CellPart(text=value),)


def _answer(given: StrEnum, *, strong: bool) -> Cell:
    return (CellPart(text=given.value, strong=strong),)


def _command(words_of_shell: str | None) -> Cell:
    return (CellPart(text=words_of_shell, code=True),) if words_of_shell else ()


def _decisions(report: Report) -> Table | None:
    """Return the table of gates. A single run has it only if a gate fired."""
    counting = [outcome for outcome in report.outcomes if outcome.final]
    now, sure = fired(report.gates), tuple(_explained(counting))
    if not counting or (len(counting) == 1 and not now):
        return None
    if not now and not any(map(failed, counting)):
        return Table(title="Decisions", said=(_no_gate(counting), *_not_reached(report.gates)))
    shown = [gate for gate in report.gates if len(counting) > 1 or gate.state is GateState.FIRED]
    leading = [gate for gate in now if gate.leads]
    return Table(
        title="Decisions",
        said=(*sure, *(map(_first, leading) if sure or leading else [_nobody_says(report)])),
        command=leading[0].commands[0] if leading and leading[0].commands else None,
        head=("gate", "if", "answer", "runs", "then") if shown else (),
        rows=tuple(map(_decision_row, shown)),
    )


def _explained(counting: Sequence[Outcome]) -> Iterator[str]:
    """Yield the failures with a certain cause, and its remedy, which takes precedence over every gate."""
    remedies: dict[str, list[Outcome]] = {}
    for outcome, finding in explained(counting):
        remedies.setdefault(f"{finding.code}. {sentence(finding.advice)}", []).append(outcome)
    for remedy, outcomes in remedies.items():
        yield f"The cause of {named(outcomes)} is certain: {remedy}"


def _no_gate(counting: Sequence[Outcome]) -> str:
    statuses = Counter(outcome.verdict.status for outcome in counting)
    verdicts = " · ".join(f"{statuses[status]} {status.value}" for status in words.LOUDEST_FIRST if statuses[status])
    announced = statuses[Status.FAIL] or statuses[Status.HANG]
    runs = words.plural(len(counting), "run")
    return f"No gate fired: {runs}, {verdicts}{'; every failure was expected' if announced else ''}."


def _not_reached(gates: Sequence[GateAnswer]) -> Iterator[str]:
    codes = [gate.name for gate in gates if gate.state is GateState.NOT_REACHED]
    if codes:
        yield f"{len(codes)} of {len(gates)} gates were not reached by these runs: {' · '.join(codes)}."


def _nobody_says(report: Report) -> str:
    reason = "no gate names what to do" if report.gates else "nothing was agreed for them"
    return f"No gate fired, and runs failed: {reason}; what to do stands with each run."


def _first(gate: GateAnswer) -> str:
    because = f" Why: {gate.because}." if gate.because else ""
    return f"{gate.when[:1].upper()}{gate.when[1:]} ({gate.why}): {gate.then}.{because}"


def _decision_row(gate: GateAnswer) -> tuple[Cell, ...]:
    now = gate.state is GateState.FIRED
    then = (*text(gate.then), *(part for command in gate.commands for part in _command(command))) if now else ()
    return text(gate.name), text(gate.when), _answer(gate.state, strong=now), text(gate.why), then


def _tree(report: Report) -> Table | None:
    walk = report.tree
    if walk is None:
        return None
    commands = [step.command for step in walk.open if step.command]
    return Table(
        title="Decision tree",
        said=tuple(_led(walk)),
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


def _tree_row(step: TreeStep) -> tuple[Cell, ...]:
    leads: Cell = text(step.leads_to or "")
    if step.answer is TreeAnswer.OPEN:
        leads = _command(step.command) or text("no run here can be asked again")
    return text(step.question), _answer(step.answer, strong=step.answer is TreeAnswer.YES), text(step.why), leads


def _untested(report: Report, playbook: Playbook) -> Table | None:
    """Return the untested hypotheses, with the command that tests each and its least cost."""
    rows = answers(report.outcomes, playbook.hypotheses)
    rest = [row for row in rows if row.command and not worth_a_row(row)]
    if not rest:
        return None
    return Table(
        title="Not tested",
        said=("No two of these runs differ in just that. Each command makes both sides.",),
        head=("hypothesis", "tested by", "takes"),
        rows=tuple((text(row.hypothesis.text), _command(row.command), text(words.cost(row))) for row in rest),
        folded=True,
    )


def _hypothesis_row(row: HypothesisRow, numbers: dict[int, int]) -> tuple[Cell, ...]:
    because: Cell = text(words.hypothesis_reason(row))
    if row.command:
        because = (*because, *_command(row.command), *text(words.cost(row)))
    answer = _answer(row.answer, strong=row.answer is Answer.SUPPORTED)
    return text(row.hypothesis.text), answer, _side(row.control, numbers), _side(row.changed, numbers), because


def _side(side: Side | None, numbers: dict[int, int]) -> Cell:
    if side is None:
        return text("")
    counted = words.ending_counts(side.ended)
    return (*_run(side.run, numbers), *(text(counted) if counted else ()))


def _run(outcome: Outcome, numbers: dict[int, int]) -> Cell:
    verdict = outcome.verdict.status
    return (*text(outcome.spec.scenario), CellPart(text=verdict.value, run=numbers[id(outcome)], status=verdict))


def _matrix(report: Report, numbers: dict[int, int]) -> Table | None:
    matrix = config_matrix(report.outcomes)
    if matrix is None:
        return None
    same = " · ".join(f"{key}={value}" for key, value in matrix.same)
    return Table(
        title="Configuration matrix",
        folded=True,
        said=(
            "Down: what was set. Across: how the ranks worked together, or the setting that was varied most.",
            *([f"The same in all: {same}."] * bool(same)),
        ),
        head=("set", *matrix.columns),
        rows=tuple((text(row.name), *(_matrix_cell(runs, numbers) for runs in row.cells)) for row in matrix.rows),
    )


def _matrix_cell(runs: Sequence[Outcome], numbers: dict[int, int]) -> Cell:
    if not runs:
        return text("not run")
    parts = [
        CellPart(text=run.verdict.status.value, run=numbers[id(run)], status=run.verdict.status)
        for run in runs[:_RUNS_IN_A_CELL]
    ]
    more = len(runs) - len(parts)
    return tuple(parts) + (text(f"and {more} more") if more else ())


def _costs(report: Report, numbers: dict[int, int]) -> Iterator[Table]:
    """Yield a table of step costs, and how they grow, for each scenario that was swept."""
    swept: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        if outcome.final and outcome.cost is not None and "@" in outcome.spec.scenario:
            swept.setdefault(outcome.spec.scenario.partition("@")[0], []).append(outcome)
    for name, cells in swept.items():
        if len(cells) > 1:
            yield Table(
                title=f"What a step costs: {name}",
                said=(
                    "The median of the steps after the first; what the graph of the first keeps for its backward pass,"
                    " and its nodes.",
                ),
                head=COST_HEAD,
                rows=tuple((_run(cell, numbers), *map(text, cost_row(cell.cost))) for cell in cells if cell.cost),
                after=tuple(line for sweep in sweeps(cells) for line in fit_lines(sweep)),
            )


def _files(report: Report) -> Table | None:
    listed = [outcome for outcome in report.outcomes if outcome.artifacts]
    if len(listed) < 2:
        return None
    rows = tuple(
        (
            (CellPart(text=item.path, code=True),),
            text(f"{item.attempts} of {item.of}"),
            text(f"{item.entries}" if item.attempts else "none"),
            text("; ".join(f"{reason} ({count})" for reason, count in item.absent)),
        )
        for item in gathered(listed)
    )
    return Table(
        title="Files of all runs",
        folded=True,
        said=(f"Over {len(listed)} attempts; a number in brackets says how often that reason holds.",),
        head=("file", "in attempts:", "entries:", "not there, because"),
        rows=rows,
    )


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A file in all attempts together, with the reasons where it is missing."""

    path: str
    attempts: int  # attempts that have it
    of: int  # attempts that were started
    entries: int
    absent: tuple[tuple[str, int], ...]  # (reason, number of attempts), most frequent first


def gathered(outcomes: Sequence[Outcome]) -> tuple[Gathered, ...]:
    """Return a row for each file that an attempt lists, in the order of the lists."""
    listed: dict[str, list[Artifact]] = {}
    for outcome in outcomes:
        for item in outcome.artifacts:
            listed.setdefault(item.path, []).append(item)
    return tuple(_gathered(path, items) for path, items in listed.items())


def _gathered(path: str, items: Sequence[Artifact]) -> Gathered:
    there = [item for item in items if item.absent is None]
    reasons = Counter(item.absent for item in items if item.absent is not None)
    return Gathered(
        path=path,
        attempts=len(there),
        of=len(items),
        entries=sum(item.count or 0 for item in there),
        absent=tuple(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
    )
