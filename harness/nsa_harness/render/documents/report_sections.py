"""The sections of a complete report: one section per run, and tables that compare the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nsa_harness.core.comparison.config_matrix import config_matrix
from nsa_harness.core.comparison.decision_rules import has_failed, outcome_names
from nsa_harness.core.comparison.decisions import Playbook, explained_failures, matched_rules, playbook_for
from nsa_harness.core.comparison.hypotheses import Arm, HypothesisAnswer, HypothesisRow, hypothesis_rows, is_row_shown
from nsa_harness.core.comparison.sweeps import sweeps
from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.report import (
    Artifact,
    Outcome,
    Report,
    RuleAnswer,
    RuleState,
    Status,
    TreeAnswer,
    TreeStep,
    Walk,
    counts,
)
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render.answer import outcomes_in_full, sentence
from nsa_harness.render.costs import COST_HEAD, cost_row, fit_lines
from nsa_harness.render.documents.trials import answer_section, as_trials, first_of_each_failure, why_section
from nsa_harness.render.sections import (
    Command,
    File,
    Files,
    Heading,
    Line,
    Overview,
    Part,
    Search,
    Section,
    Sentence,
    Span,
    Table,
    join_texts,
    line,
    run_section,
)
from nsa_harness.render.text import link_target
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.texts import words

_RUNS_IN_A_CELL = 6
_RULE_RESULTS = {RuleState.MATCHED: "matched", RuleState.NOT_MATCHED: "not matched", RuleState.UNANSWERED: "undecided"}


def report_sections(
    report: Report,
    playbook: Playbook,
    search: BisectReport | None = None,
    claim: LedgerLine | None = None,
    why: WhyReport | None = None,
) -> Iterator[Section]:
    """Yield the sections of a report in reading order, with the bisection, claim or `why` that launched its runs."""
    is_experiment = search is not None or claim is not None or why is not None
    report = as_trials(report) if is_experiment else report
    in_full = outcomes_in_full(report)
    in_full = first_of_each_failure(in_full) if is_experiment else in_full
    alone = len(report.outcomes) == 1 and not is_experiment
    if not alone:
        yield _heading(report)
        yield from _interruption(report)
    if search is not None:
        yield Search(report=search)
    if claim is not None:
        yield answer_section(claim)
    if why is not None:
        yield why_section(why)
    hypotheses = () if alone else tuple(_hypotheses(report, playbook))
    yield from hypotheses if not in_full else ()
    if not alone:
        yield from _overview(report, frozenset(number for number, _ in in_full))
    for number, outcome in in_full:
        yield run_section(number, outcome, alone=alone)
    yield from hypotheses if in_full else ()
    if alone:
        yield from _interruption(report)
    yield from _chapters(report, playbook)
    yield from _files_over_all_attempts(report)
    yield from _origin(report)


def _heading(report: Report) -> Heading:
    """Return a heading such as "7 runs", with the number of runs with each verdict."""
    by_verdict = counts(report.outcomes)
    total, whole = sum(by_verdict.values()), words.counts_line(report)
    return Heading(
        text=words.plural(total, "run") if total else whole,
        tally=tuple((status.value, by_verdict[status]) for status in words.LOUDEST_FIRST if by_verdict[status]),
        whole=whole,
    )


def _interruption(report: Report) -> Iterator[Section]:
    if report.interrupted:
        yield Sentence(label="Interrupted.", line=line("Only the runs listed here were judged."))
    if report.not_run:
        yield Sentence(line=line(f"Not run: {join_texts(report.not_run)}"))


def _overview(report: Report, in_full: frozenset[int]) -> Iterator[Section]:
    if report.outcomes:
        yield Overview(runs=tuple(words.bad_news_first(report)), in_full=in_full)


def _files_over_all_attempts(report: Report) -> Iterator[Section]:
    """Yield a list of the output files that contain log lines from all attempts."""
    if report.files:
        yield Sentence(line=line("Collected from all attempts:"))
        yield Files(
            items=tuple(File(file.path, link_target(file.path), words.line_count(file)) for file in report.files)
        )


def _origin(report: Report) -> Iterator[Section]:
    """Yield a remark that names the run and the machine of the report, and the command that was run."""
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
    """Return a part of the report with sentences, a command, a table and remarks, without empty items."""
    sections: list[Section] = [Sentence(line=line(text)) for text in before]
    sections += [Command(text=command)] if command else []
    sections += [Table(title=title, head=head, rows=rows)] if rows else []
    sections += [Sentence(line=line(text), quiet=True) for text in after]
    return Part(title=title, sections=tuple(sections), chapter=True, folded=folded)


def _hypotheses(report: Report, playbook: Playbook) -> Iterator[Part]:
    """Yield a table of the hypotheses about the failures, and whether the runs support or refute each of them."""
    rows = hypothesis_rows(report.outcomes, playbook_for(playbook, report.outcomes).hypotheses)
    visible, numbers = [row for row in rows if is_row_shown(row)], _numbers(report)
    any_failed = any(map(has_failed, report.outcomes))
    if not visible or not (any_failed or any(row.answer is not HypothesisAnswer.NOT_TESTED for row in visible)):
        return
    more = sum(row.command is not None for row in rows if row not in visible)
    nothing_failed = "No run failed unexpectedly. Here, refuted means that the setting breaks none of these runs."
    yield _chapter(
        "Hypotheses",
        before=() if any_failed else (nothing_failed,),
        head=("hypothesis", "result", "without it", "with it", "because"),
        rows=tuple(_hypothesis_row(row, numbers) for row in visible),
        after=(words.untested_note(more),) if more else (),
    )


def _chapters(report: Report, playbook: Playbook) -> Iterator[Part]:
    """Yield the parts that follow the sections about the runs, with the most important part first."""
    playbook = playbook_for(playbook, report.outcomes)
    numbers = _numbers(report)
    yield from _decisions(report)
    yield from _tree(report)
    yield from _untested_hypotheses(report, playbook)
    yield from _matrix(report, numbers)
    yield from _costs(report, numbers)
    yield from _files(report)


def _numbers(report: Report) -> dict[int, int]:
    """Map the `id()` of each outcome in the report to its number, counted from 1."""
    return {id(outcome): number for number, outcome in enumerate(report.outcomes, start=1)}


def _answer(text: str, *, strong: bool) -> Line:
    return (Span(text, strong=strong),)


def _command(command: str | None) -> Line:
    return (Span(command, code=True),) if command else ()


def _decisions(report: Report) -> Iterator[Part]:
    """Yield a table of the decision rules and their results. For a single run, it has only the matching rules."""
    counting = [outcome for outcome in report.outcomes if outcome.final]
    matching, certain_causes = matched_rules(report.gates), tuple(_certain_causes(counting))
    if not counting or (len(counting) == 1 and not matching):
        return
    if not matching and not any(map(has_failed, counting)):
        yield _chapter("Decisions", before=(_no_rule_matched(counting), *_undecided_rules(report.gates)))
        return
    visible = [gate for gate in report.gates if len(counting) > 1 or gate.state is RuleState.MATCHED]
    leading = [gate for gate in matching if gate.leads]
    yield _chapter(
        "Decisions",
        before=(
            *certain_causes,
            *(map(_recommendation, leading) if certain_causes or leading else [_no_recommendation(report)]),
        ),
        command=leading[0].commands[0] if leading and leading[0].commands else None,
        head=("rule", "if", "result", "runs", "then") if visible else (),
        rows=tuple(map(_decision_row, visible)),
    )


def _certain_causes(counting: Sequence[Outcome]) -> Iterator[str]:
    """Yield one sentence for each cause that is known for certain, with its remedy."""
    by_remedy: dict[str, list[Outcome]] = {}
    for outcome, finding in explained_failures(counting):
        by_remedy.setdefault(f"{finding.code}. {sentence(finding.advice)}", []).append(outcome)
    for remedy, outcomes in by_remedy.items():
        yield f"The cause of {outcome_names(outcomes)} is certain: {remedy}"


def _no_rule_matched(counting: Sequence[Outcome]) -> str:
    by_verdict = [
        (status, sum(outcome.verdict.status is status for outcome in counting)) for status in words.LOUDEST_FIRST
    ]
    verdicts = join_texts([f"{number} {status.value}" for status, number in by_verdict if number])
    has_failures = any(outcome.verdict.status in (Status.FAIL, Status.HANG) for outcome in counting)
    runs = words.plural(len(counting), "run")
    return f"No decision rule matched: {runs}, {verdicts}{'; every failure was expected' if has_failures else ''}."


def _undecided_rules(gates: Sequence[RuleAnswer]) -> Iterator[str]:
    codes = [gate.name for gate in gates if gate.state is RuleState.UNANSWERED]
    if codes:
        yield f"These runs cannot decide {len(codes)} of {len(gates)} rules: {' · '.join(codes)}."


def _no_recommendation(report: Report) -> str:
    reason = "No decision rule matched these failures" if report.gates else "There are no decision rules for these runs"
    return f"{reason}. Each run's own section says what to do."


def _recommendation(gate: RuleAnswer) -> str:
    """Return the recommendation from a decision rule, as a sentence."""
    reason = f" Why: {gate.because}." if gate.because else ""
    return f"{gate.when[:1].upper()}{gate.when[1:]} ({gate.why}): {gate.then}.{reason}"


def _decision_row(gate: RuleAnswer) -> tuple[Line, ...]:
    matches = gate.state is RuleState.MATCHED
    then = (*line(gate.then), *(part for command in gate.commands for part in _command(command))) if matches else ()
    return line(gate.name), line(gate.when), _answer(_RULE_RESULTS[gate.state], strong=matches), line(gate.why), then


def _tree(report: Report) -> Iterator[Part]:
    """Yield the answered questions of the decision tree, and the command that answers the next question."""
    path = report.tree
    if path is None:
        return
    commands = [step.command for step in path.open if step.command]
    yield _chapter(
        "Decision tree",
        before=tuple(_path_end(path)),
        command=commands[0] if commands else None,
        head=("question", "answer", "answered by", "leads to") if path.steps else (),
        rows=tuple(map(_tree_row, path.steps)),
    )


def _path_end(path: Walk) -> Iterator[str]:
    """Yield sentences about the conclusion that the decision tree reached."""
    open_questions = words.plural(len(path.open), "question")
    if not path.steps:
        yield f"The tree is not needed: the cause of {path.made_from} is certain."
        return
    if path.leaf is None:
        reason = f"{open_questions} open." if path.open else "every question was answered no."
        yield f"The path reaches no conclusion: {reason}"
    elif path.open:
        are = "is" if len(path.open) == 1 else "are"
        yield f"The path leads to: {path.leaf}. Before that, {open_questions} {are} still open."
    else:
        yield f"The path leads to: {path.leaf}."
    yield f"It is based on these runs: {path.made_from}."


def _tree_row(step: TreeStep) -> tuple[Line, ...]:
    leads_to: Line = line(step.leads_to or "")
    if step.answer is TreeAnswer.OPEN:
        leads_to = _command(step.command) or line("no command here can answer this")
    return (
        line(step.question),
        _answer(step.answer.value, strong=step.answer is TreeAnswer.YES),
        line(step.why),
        leads_to,
    )


def _untested_hypotheses(report: Report, playbook: Playbook) -> Iterator[Part]:
    """Yield a table of the hypotheses that the report's runs do not test, with commands for testing them."""
    rows = hypothesis_rows(report.outcomes, playbook.hypotheses)
    rest = [row for row in rows if row.command and not is_row_shown(row)]
    if not rest:
        return
    yield _chapter(
        "Not tested",
        before=("No two of these runs differ in only this one point. Each command launches both sides.",),
        head=("hypothesis", "tested by", "takes"),
        rows=tuple((line(row.hypothesis.text), _command(row.command), line(words.cost(row))) for row in rest),
        folded=True,
    )


def _hypothesis_row(row: HypothesisRow, numbers: dict[int, int]) -> tuple[Line, ...]:
    because: Line = line(words.hypothesis_reason(row))
    if row.command:
        because = (*because, *_command(row.command), *line(words.cost(row)))
    answer = _answer(row.answer.value, strong=row.answer is HypothesisAnswer.SUPPORTED)
    return line(row.hypothesis.text), answer, _side(row.control, numbers), _side(row.changed, numbers), because


def _side(side: Arm | None, numbers: dict[int, int]) -> Line:
    if side is None:
        return line("")
    counts = words.ending_counts(side.counts)
    return (*_run(side.run, numbers), *(line(counts) if counts else ()))


def _run(outcome: Outcome, numbers: dict[int, int]) -> Line:
    verdict = outcome.verdict.status
    return (*line(outcome.spec.scenario), Span(verdict.value, run=numbers[id(outcome)], status=verdict))


def _matrix(report: Report, numbers: dict[int, int]) -> Iterator[Part]:
    """Yield a table with the verdict for each combination of settings and parallelism."""
    matrix = config_matrix(report.outcomes)
    if matrix is None:
        return
    same = " · ".join(f"{key}={value}" for key, value in matrix.same)
    yield _chapter(
        "Configuration matrix",
        folded=True,
        before=(
            "Rows: the settings. Columns: how the ranks were parallelized, or the setting with the most values.",
            *([f"Equal in all runs: {same}."] * bool(same)),
        ),
        head=("settings", *matrix.columns),
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
    """Yield tables that show how the cost of a training step grows with its size."""
    sweeps_by_name: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        if outcome.final and outcome.cost is not None and "@" in outcome.spec.scenario:
            sweeps_by_name.setdefault(outcome.spec.scenario.partition("@")[0], []).append(outcome)
    for name, cells in sweeps_by_name.items():
        if len(cells) > 1:
            yield _chapter(
                f"Cost of a step: {name}",
                before=(
                    "Times are the median of all steps after the first. Memory saved for backward and autograd nodes"
                    " are those of the first step.",
                ),
                head=COST_HEAD,
                rows=tuple((_run(cell, numbers), *map(line, cost_row(cell.cost))) for cell in cells if cell.cost),
                after=tuple(line for sweep in sweeps(cells) for line in fit_lines(sweep)),
            )


def _files(report: Report) -> Iterator[Part]:
    outcomes = [outcome for outcome in report.outcomes if outcome.artifacts]
    if len(outcomes) < 2:
        return
    yield _chapter(
        "Files of all runs",
        folded=True,
        before=(f"{len(outcomes)} attempts. A number in brackets is the number of attempts with this reason.",),
        head=("file", "in attempts:", "entries:", "not written, because"),
        rows=tuple(((Span(path, code=True),), *map(line, texts)) for path, *texts in file_rows(outcomes)),
    )


def file_rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, str, str]]:
    """Yield for each output file: its name, how many attempts have it, its entries, and why others lack it."""
    by_path: dict[str, list[Artifact]] = {}
    for outcome in outcomes:
        for item in outcome.artifacts:
            by_path.setdefault(item.path, []).append(item)
    for path, items in by_path.items():
        counts = [item.count or 0 for item in items if item.absent is None]
        reasons = Counter(item.absent for item in items if item.absent is not None)
        most_frequent = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
        absent = "; ".join(f"{reason} ({count})" for reason, count in most_frequent)
        yield path, f"{len(counts)} of {len(items)}", str(sum(counts)) if counts else "none", absent
