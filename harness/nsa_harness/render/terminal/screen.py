"""The lines printed for each event of a run, which depend only on the event and the width of the terminal."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.cells import cell_len

from nsa_harness.core.comparison.decisions import Playbook, next_commands, playbook_for
from nsa_harness.core.comparison.hypotheses import HypothesisAnswer, hypothesis_rows, is_row_shown
from nsa_harness.core.comparison.severity import silent_faults
from nsa_harness.core.comparison.sweeps import sweeps
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.experiment.why import ranks_part
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import RUNS_ON, Finding, MachineFacts, Outcome, Report, Status
from nsa_harness.render import answer, sections
from nsa_harness.render.costs import fit_lines
from nsa_harness.render.sections import Section, evidence_sections
from nsa_harness.render.terminal.answer import ANSWER_LABEL_WIDTH, answer_lines, headline, ranks_table
from nsa_harness.render.terminal.layout import NARROW, bar, command, labelled, paragraph, table
from nsa_harness.render.text import escape, escaped
from nsa_harness.texts import words
from nsa_harness.texts.measurements import vital_table

BAR_COLUMNS = 20
MIN_SHOWN_S = 2.0  # a shorter time without progress is normal and is not shown
_RESULT_WIDTH = 12  # fits "not tested"
MAX_ROWS = 16  # rows of a table; SUMMARY.md contains the whole table


def plan_lines(version: str, facts: MachineFacts, specs: Sequence[RunSpec | Skip], width: int) -> Iterator[str]:
    """Yield lines with the version of nsa-harness, the machine, the number of runs, and the notes of several runs."""
    facts, specs = escaped((facts, tuple(specs)))
    yield from paragraph(f"nsa-harness {version} · {words.machine_line(facts)}", width, "", "  ")
    skip_count = sum(isinstance(spec, Skip) for spec in specs)
    if len(specs) > 1:
        remark = f" · {skip_count} cannot run on this machine" if skip_count else ""
        yield from paragraph(f"{words.plural(len(specs) - skip_count, 'run')} to do{remark}", width)
        for text in shared_notes(specs).values():
            yield from paragraph(text, width, "  ", "    ")


def shared_notes(specs: Sequence[RunSpec | Skip]) -> dict[str, str]:
    """Map each note that several runs share to its text, such as "every run: CPU form, because it has no GPU"."""
    runs = [spec for spec in specs if isinstance(spec, RunSpec)]
    counts = Counter(note for spec in runs for note in spec.notes)
    names = {len(runs): "every run"}
    return {note: f"{names.get(count, f'{count} runs')}: {note}" for note, count in counts.items() if count > 1}


def launched_lines(spec: RunSpec, width: int) -> Iterator[str]:
    """Yield the lines to print at the start of a run."""
    spec = escaped(spec)
    launch = words.launch_line(spec.ranks, spec.backend, spec.subject)
    yield from paragraph(f"{spec.scenario}   {launch}", width, "", "  ")
    for note in spec.notes:
        yield from paragraph(note, width, " " * (len(spec.scenario) + 3) if width >= NARROW else "  ")


def news_line(attempt: str, phase: str, progress: Progress, width: int) -> Iterator[str]:
    """Yield a line about a running attempt that shows its phase, time and slowest rank."""
    limit = "" if progress.deadline_s is None else f" of at most {words.seconds(progress.deadline_s)}"
    waiting = [rank for rank in progress.ranks if (rank.no_progress_s or 0.0) >= MIN_SHOWN_S]
    slowest = max(waiting, key=lambda rank: rank.no_progress_s or 0.0, default=None)
    remark = f" · rank {slowest.rank}: no progress for {words.seconds(slowest.no_progress_s)}" if slowest else ""
    text = f"{escape(attempt)} · {escape(phase)} · {words.seconds(progress.elapsed_s)}{limit}{remark}"
    yield from paragraph(text, width, "  ", "    ")


def first_snapshot_lines(rows: Sequence[FirstSnapshot], width: int) -> Iterator[str]:
    """Yield the first stack snapshot of a job as a table, in which ranks at the same place share a row."""
    rows = escaped(tuple(rows))
    age_s = max((row.age_s for row in rows), default=None)
    yield from paragraph(
        f"first snapshot, {words.seconds(age_s)} after the start; a second one will show progress", width
    )
    cells = [
        (
            words.rank_numbers(row.ranks),
            row.blocked_in,
            " ".join(filter(None, (row.place, row.function))),
            words.seconds(row.idle_s),
            words.seconds(row.cpu_s),
        )
        for row in rows[:MAX_ROWS]
    ]
    yield from table(("rank:", "in", "at", "idle for:", "CPU time:"), cells, width)


def outcome_lines(outcome: Outcome, width: int, *, verbose: bool = False) -> Iterator[str]:
    """Yield lines about an ended run, its explanation last. `verbose`: with the evidence, unless it passed."""
    if outcome.verdict.status is Status.PASS:
        yield from _pass_lines(escaped(outcome), width)
        return
    if verbose:
        yield from _evidence(escaped(outcome), width)
        yield ""
    yield from answer_lines(outcome, width)


def _pass_lines(outcome: Outcome, width: int) -> Iterator[str]:
    yield from _times(outcome, width)
    yield from _measurements(outcome, width)
    yield from _lists(outcome, width)
    yield ""
    yield from paragraph(headline(outcome), width, "", "      ")
    yield from _silent_faults(outcome, width)


def _evidence(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield the same evidence as in SUMMARY.md, followed by the call stacks."""
    for section in evidence_sections(outcome):
        yield from _section_lines(section, outcome, width)
    for stack in outcome.stacks:
        yield ""
        for line in answer.stack_lines(stack):
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            yield from paragraph(line.lstrip(), width, indent, f"{indent}  ")


def _section_lines(section: Section, outcome: Outcome, width: int) -> Iterator[str]:
    match section:
        case sections.FactList(items=items):
            yield from paragraph(sections.join_texts((outcome.spec.scenario, *items)), width, "", "  ")
            yield from ranks_table(outcome, MAX_ROWS, width)
            yield ""
        case sections.Grounds(rows=rows):
            for label, items in rows:
                yield from labelled(label, sections.join_texts(items), width)
        case sections.FindingDetails(finding=finding):
            yield from _finding(outcome, finding, width)
        case sections.Table():
            yield from _measurements(outcome, width)
        case sections.Sentence(line=line):
            yield from paragraph(sections.plain(line), width, "  ")
        case _:
            raise AssertionError(section)


def _measurements(outcome: Outcome, width: int) -> Iterator[str]:
    head, rows = vital_table(outcome)
    if len(head) > 1:
        yield ""
        yield from table(head, rows[:MAX_ROWS], width)
    if len(rows) > MAX_ROWS:
        yield from paragraph(f"{len(rows) - MAX_ROWS} more ranks are in report.json", width, "  ")


def _times(outcome: Outcome, width: int) -> Iterator[str]:
    timing = outcome.timing
    launch_s, finish_s = timing.launch_s or 0.0, timing.teardown_s or 0.0
    in_table = "peak memory:" in vital_table(outcome)[0]
    running = sections.join_texts(
        text for text in words.numbers(outcome) if not (in_table and text.startswith("peak memory"))
    )
    rows = (
        ("launch", timing.launch_s, ""),
        ("run", max(timing.wall_s - launch_s - finish_s, 0.0), running),
        ("finish", timing.teardown_s, outcome.ending_text),
    )
    for name, took_s, remark in rows:
        if took_s is not None:
            share = took_s / timing.wall_s if timing.wall_s else 0.0
            line = f"  {name:<8} {bar(share, BAR_COLUMNS):<{BAR_COLUMNS}} {words.seconds(took_s):>8}"
            yield from _with_remark(line, remark, width)


def _with_remark(line: str, remark: str, width: int) -> Iterator[str]:
    """Yield the line with a remark after it, or below it on a narrow screen."""
    indent = " " * (len(line) + 3)
    if not remark or len(indent) + 24 > width:
        yield line
        yield from paragraph(remark, width, "    ") if remark else ()
    else:
        yield from paragraph(remark, width, f"{line}   ", indent)


def _finding(outcome: Outcome, finding: Finding, width: int) -> Iterator[str]:
    label = "cause" if finding.code == outcome.verdict.cause else "also"
    # The answer already has this sentence if the claim is the summary of the verdict.
    claim = "" if finding.claim == outcome.verdict.summary else f": {finding.claim}"
    yield from labelled(label, f"{finding.code} ({words.certainty(finding.confidence)}){claim}", width)
    for text in finding.left_open:
        yield from labelled("open", text, width)
    yield from labelled("do", finding.advice, width)
    for number, path in enumerate(finding.proof):
        yield from command("proof" if number == 0 else "", path, width)


def _lists(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield lines about the causes that a run rules out, the checks it passed, and what was not captured."""
    lists = (
        ("ruled out", outcome.ruled_out_causes),
        ("checked", outcome.passed_checks),
        ("not covered", outcome.spec.not_covered),
    )
    if outcome.verdict.status is Status.PASS and any(items for _, items in lists):
        yield ""
    for name, items in lists:
        yield from labelled(name, " · ".join(items), width)
    for trouble in outcome.trouble:
        yield from labelled("not captured", words.trouble(trouble), width)


def outcome_line(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield lines that briefly describe one of several runs."""
    outcome = escaped(outcome)
    if not answer.went_well(outcome) and outcome.verdict.status is not Status.PASS:
        yield from paragraph(headline(outcome), width, "", "      ")
        yield from paragraph(answer.sentence(outcome.verdict.summary), width, "      ")
        return
    if outcome.verdict.status is Status.SKIP:
        text = f"SKIP  {outcome.spec.scenario}   {outcome.verdict.summary}"
    elif outcome.rerun_answer:
        text = f"{headline(outcome)}   {outcome.rerun_answer}"
    else:
        text = " · ".join((headline(outcome), *words.main_numbers(outcome)))
    yield from paragraph(text, width, "", "      ")
    yield from _silent_faults(outcome, width)


def _silent_faults(outcome: Outcome, width: int) -> Iterator[str]:
    """Yield lines about faults found in a run that passed."""
    for finding in silent_faults(outcome):
        text = f"but {finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
        yield from paragraph(text, width, "      ")


MAX_FAILURES = 8  # failures that are listed after several runs
_MAX_ADVISED = 3  # if more runs failed, the list does not say what to do about each; the page does


def done_lines(report: Report, playbook: Playbook, run_dir: Path, width: int) -> Iterator[str]:
    """Yield the last lines: for several runs failures and counts, then the next commands and the HTML page."""
    report = escaped(report)
    if report.interrupted:
        yield from paragraph("Interrupted: only the runs listed here were judged.", width)
        yield ""
    if len(report.outcomes) != 1:
        yield from _failures(report, width)
        yield from paragraph(words.counts_line(report), width, "", "  ")
        if expectations := _expectations(report):
            yield from paragraph(expectations, width, "  ")
        yield from _hypotheses(report, playbook, width)
        growth = [line for sweep in sweeps(report.outcomes) for line in fit_lines(sweep)]
        yield from (row for line in growth for row in labelled("growth", line, width, ANSWER_LABEL_WIDTH))
    elif report.outcomes[0].verdict.status is Status.PASS:
        log = f"{run_dir}/{report.outcomes[0].dir}/output.log"
        yield from command("output", escape(log), width, ANSWER_LABEL_WIDTH)
    for label, next_command in _next_commands(report, playbook, run_dir):
        yield from command(label, escape(next_command), width, ANSWER_LABEL_WIDTH)
    if report.outcomes:
        yield from _page_line(f"{escape(str(run_dir))}/report.html", width)


def _page_line(path: str, width: int) -> Iterator[str]:
    both = f"{path} · SUMMARY.md"
    has_room = width >= NARROW and cell_len(both) + ANSWER_LABEL_WIDTH + 2 <= width
    yield from command("page", both if has_room else path, width, ANSWER_LABEL_WIDTH)


def _hypotheses(report: Report, playbook: Playbook, width: int) -> Iterator[str]:
    """Yield the hypotheses about the failures, as a table or as paragraphs on a narrow screen."""
    rows = [
        row
        for row in hypothesis_rows(report.outcomes, playbook_for(playbook, report.outcomes).hypotheses)
        if is_row_shown(row)
    ]
    if all(row.answer is HypothesisAnswer.NOT_TESTED for row in rows):
        return
    head = ("hypothesis", "result", "because")
    cells = [(row.hypothesis.text, row.answer.value, words.hypothesis_because(row)) for row in rows]
    lines = list(table(head, cells, width))
    yield ""
    if len(lines) == len(rows) + 1:
        yield from lines
    else:
        yield "  hypotheses"
        for result, group in groupby(rows, key=lambda row: row.answer):
            texts = [words.hypothesis_in_line(row) for row in group]
            yield from labelled(result.value, " · ".join(texts), width, _RESULT_WIDTH)
    yield ""


def _failures(report: Report, width: int) -> Iterator[str]:
    """Yield the full explanation of a single failure, or short descriptions of several."""
    bad = sorted(filter(_is_failure, report.outcomes), key=words.severity_key)
    if len(bad) == 1:
        yield from answer_lines(bad[0], width)
        yield ""
    elif bad:
        for outcome in bad[:MAX_FAILURES]:
            yield from outcome_line(outcome, width)
            advice = answer.advice(outcome)
            if advice and len(bad) <= _MAX_ADVISED:
                yield from paragraph(advice, width, "      do  ", " " * 10)
        if len(bad) > MAX_FAILURES:
            yield from paragraph(f"{len(bad) - MAX_FAILURES} more are in SUMMARY.md", width, "      ")
        yield ""


def _is_failure(outcome: Outcome) -> bool:
    """Return whether the outcome is final and not as expected."""
    return outcome.final and not outcome.expected and outcome.verdict.status is not Status.SKIP


def _expectations(report: Report) -> str:
    """Return the number of runs that ended as expected, such as "3 of 4 runs ended as expected"."""
    final = [outcome for outcome in report.outcomes if outcome.final and outcome.verdict.status is not Status.SKIP]
    as_expected = sum(outcome.expected for outcome in final)
    if not final:
        return "no run was judged"
    if as_expected == len(final):
        return "" if all(outcome.verdict.status is Status.PASS for outcome in final) else "every run ended as expected"
    return f"{as_expected} of {words.plural(len(final), 'run')} ended as expected"


def _next_commands(report: Report, playbook: Playbook, run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands that the user should run next, each with its label."""
    outcomes = [outcome for _, outcome in words.bad_news_first(report)]
    worst = next((outcome for outcome in outcomes if not outcome.expected), None)
    candidates = [worst] if worst else outcomes
    stored = next((outcome.next_command for outcome in candidates if outcome.next_command), None)
    if any(outcome.ending_text == RUNS_ON for outcome in outcomes):
        # nsa-harness did not start this job, so no command can repeat it
        if worst and answer.cause_of(worst):
            yield "next", explaining_command(worst, run_dir, None) or ""
        return
    if report.interrupted:
        yield "next", f"nsa-harness run --resume={shlex.quote(str(run_dir))}"
        return
    playbook = playbook_for(playbook, report.outcomes)
    path = run_dir / worst.dir if worst and len(outcomes) > 1 else run_dir
    if command := next(iter(next_commands(report.gates)), stored) or (
        worst and explaining_command(worst, run_dir, path if "watch" not in report.command.split()[:2] else None)
    ):
        yield "next", command
    elif worst is None and [outcome.verdict.status for outcome in outcomes] == [Status.PASS] and playbook.onward:
        yield "next", playbook.onward
    if worst and worst.repeat_command and worst.verdict.status in (Status.HANG, Status.FAIL):
        yield "fixed?", f"nsa-harness run --verify {shlex.quote(str(path))}"


def explaining_command(outcome: Outcome, run_dir: Path, path: Path | None) -> str | None:
    """Return the command that says more about an outcome that was not expected, or None if there is none.

    If the ranks took different ways, a recorded run shows why. If no rule identified the cause of a failure, or the run
    could not be judged, it prints the evidence. A run that passed against expectation is repeated, because it may fail
    only sometimes. `path`: what to launch again, the run or one of its attempts, or None for an observed job.
    """
    cause = answer.cause_of(outcome)
    is_raised = outcome.verdict.cause == Cause.EXCEPTION  # its traceback is the answer
    if path is not None and outcome.repeat_command and ranks_part(outcome, outcome.spec.ranks) and not is_raised:
        return f"nsa-harness why {shlex.quote(str(path))}"
    if cause is not None and cause.code != Cause.UNKNOWN:
        return f"nsa-harness explain {cause.code}"
    if outcome.verdict.status is not Status.PASS:
        return f"nsa-harness report -v {shlex.quote(str(run_dir))}"
    repeat = outcome.repeat_command
    return repeat and repeat.replace("nsa-harness run ", "nsa-harness run --repeat=5 ", 1)
