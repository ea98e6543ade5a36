"""What the terminal shows, as lines: pure functions of the values and the width."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.cells import cell_len

from nsa_harness.core.comparison.decisions import Playbook, decided, fired, fitting
from nsa_harness.core.comparison.severity import silent_faults
from nsa_harness.core.evidence.live import Progress
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import Finding, MachineFacts, Outcome, Place, Report, Status
from nsa_harness.render import words
from nsa_harness.render.terminal.layout import NARROW, bar, command, cropped, labelled, padded, paragraph, table
from nsa_harness.render.text import escape, escaped
from nsa_harness.render.words import meaning

BAR_COLUMNS = 20
STANDINGS = 16  # rows of a table; SUMMARY.md has all


def plan_lines(version: str, facts: MachineFacts, specs: Sequence[RunSpec | Skip], width: int) -> Iterator[str]:
    facts, planned = escaped((facts, tuple(specs)))
    yield from paragraph(f"nsa-harness {version} · {words.machine_line(facts)}", width, "", "  ")
    skipped = sum(isinstance(spec, Skip) for spec in planned)
    if len(planned) > 1:
        remark = f" · {skipped} cannot run here" if skipped else ""
        yield from paragraph(f"{words.plural(len(planned) - skipped, 'run')} to do{remark}", width)


def launched_lines(spec: RunSpec, width: int) -> Iterator[str]:
    spec = escaped(spec)
    what = words.launch_line(spec.ranks, spec.backend, spec.subject)
    yield from paragraph(f"{spec.scenario}   {what}", width, "", "  ")
    for note in spec.notes:
        yield from paragraph(note, width, " " * (len(spec.scenario) + 3) if width >= NARROW else "  ")


def news_line(attempt: str, phase: str, progress: Progress, width: int) -> Iterator[str]:
    """Where each line stays: the phase, the time against the deadline, and the rank that is quiet for longest."""
    limit = "" if progress.deadline_s is None else f" of at most {words.seconds(progress.deadline_s)}"
    known = [rank for rank in progress.ranks if rank.quiet_s is not None]
    quietest = max(known, key=lambda rank: rank.quiet_s or 0.0, default=None)
    quiet = f" · rank {quietest.rank} quiet for {words.seconds(quietest.quiet_s)}" if quietest else ""
    text = f"{escape(attempt)} · {escape(phase)} · {words.seconds(progress.elapsed_s)}{limit}{quiet}"
    yield from paragraph(text, width, "  ", "    ")


def outcome_lines(outcome: Outcome, width: int) -> Iterator[str]:
    outcome = escaped(outcome)
    if outcome.verdict.status is not Status.PASS:
        yield from _not_passed(outcome, width)
        return
    yield from _times(outcome, width)
    yield from _vitals(outcome, width)
    yield from _lists(outcome, width)
    yield ""
    yield from paragraph(headline(outcome), width, "", "      ")
    yield from _silent_faults(outcome, width)


def files_lines(outcome: Outcome, run_dir: Path, width: int) -> Iterator[str]:
    """Where the proof lies, for an outcome that someone will want to look into."""
    if outcome.verdict.status not in (Status.PASS, Status.SKIP):
        yield from command("files", escape(f"{run_dir}/{outcome.dir}"), width)


def headline(outcome: Outcome) -> str:
    """ "HANG  NAME   deadlock · proven · 5.2 s after the last progress"."""
    status, timing = outcome.verdict.status, outcome.timing
    parts = [words.headline_tag(outcome)]
    if status is not Status.HANG:
        parts += [words.wall_time(outcome)]
    elif timing.detected_s is None:
        parts += ["proven"]
    else:
        parts += ["proven", f"{words.seconds(timing.detected_s)} after the last progress"]
    return f"{status.value}  {outcome.scenario}   {' · '.join(p for p in (*parts, *words.remarks(outcome)) if p)}"


def _not_passed(outcome: Outcome, width: int) -> Iterator[str]:
    yield from paragraph(headline(outcome), width, "", "      ")
    yield ""
    yield from paragraph(outcome.verdict.summary, width, "  ")
    if outcome.culprit and outcome.culprit.place:
        yield ""
        yield from _place(outcome.culprit.place, outcome.culprit.step, width)
    yield from _standings(outcome, width)
    yield from _vitals(outcome, width)
    yield ""
    if outcome.why:
        yield from labelled("why a hang", outcome.why, width)
    elif outcome.verdict.status is not Status.SKIP:
        yield from labelled("meaning", meaning(outcome), width)
    for finding in outcome.findings:
        yield from _finding(outcome, finding, width)
    yield from _lists(outcome, width)
    yield from labelled("ended", outcome.ended, width)
    yield from command("repeat", outcome.repeat or "", width)


def _place(place: Place, step: int | None, width: int) -> Iterator[str]:
    name, details = words.place_name(place), words.place_details(place, step)
    one_line = f"    {name}   {details}" if name and details else f"    {name}{details}"
    if cell_len(one_line) <= width or not details:
        yield one_line
    else:
        if name:
            yield f"    {name}"
        yield from paragraph(details, width, "      ")
    yield from (cropped(f"    {line}", width) for line in words.source_lines(place))


def _standings(outcome: Outcome, width: int) -> Iterator[str]:
    # Culprits are never among the rows that are left out.
    shown = sorted(outcome.standings, key=lambda row: not row.culprit)[:STANDINGS]
    rows = [
        (
            words.standing_rank(row),
            row.stands_in,
            row.waits_for,
            words.seconds(row.quiet_s),
            "◀ culprit" if row.culprit else "",
        )
        for row in sorted(shown, key=lambda row: row.rank)
    ]
    if rows:
        yield ""
        yield from table(("rank:", "stands in", "waits for", "quiet:", ""), rows, width)
    if len(outcome.standings) > len(rows):
        yield from paragraph(f"{len(outcome.standings) - len(rows)} more ranks stand in SUMMARY.md", width, "  ")


def _vitals(outcome: Outcome, width: int) -> Iterator[str]:
    head, rows = words.vital_table(outcome)
    if len(head) > 1:
        yield ""
        yield from table(head, rows[:STANDINGS], width)
    if len(rows) > STANDINGS:
        yield from paragraph(f"{len(rows) - STANDINGS} more ranks stand in SUMMARY.md", width, "  ")


def _times(outcome: Outcome, width: int) -> Iterator[str]:
    timing = outcome.timing
    launch_s, finish_s = timing.launch_s or 0.0, timing.teardown_s or 0.0
    running = " · ".join(words.numbers(outcome))
    rows = (
        ("launch", timing.launch_s, ""),
        ("run", max(timing.wall_s - launch_s - finish_s, 0.0), running),
        ("finish", timing.teardown_s, outcome.ended),
    )
    for name, took_s, remark in rows:
        if took_s is not None:
            drawn = bar(took_s / timing.wall_s if timing.wall_s else 0.0, BAR_COLUMNS)
            first = f"  {name:<8} {drawn:<{BAR_COLUMNS}} {words.seconds(took_s):>8}"
            yield from _with_remark(first, remark, width)


def _with_remark(line: str, remark: str, width: int) -> Iterator[str]:
    indent = " " * (len(line) + 3)
    if not remark or len(indent) + 24 > width:
        yield line
        yield from paragraph(remark, width, "    ") if remark else ()
    else:
        yield from paragraph(remark, width, f"{line}   ", indent)


def _finding(outcome: Outcome, finding: Finding, width: int) -> Iterator[str]:
    label = "cause" if finding.code == outcome.verdict.cause else "also"
    # The sentence at the top of the screen is not said twice.
    claim = "" if finding.claim == outcome.verdict.summary else f": {finding.claim}"
    yield from labelled(label, f"{finding.code} ({words.certainty(finding.confidence)}){claim}", width)
    yield from labelled("do", finding.advice, width)
    for number, path in enumerate(finding.proof):
        yield from command("proof" if number == 0 else "", path, width)


def _lists(outcome: Outcome, width: int) -> Iterator[str]:
    lists = (("ruled out", outcome.ruled_out), ("checked", outcome.checked), ("not covered", outcome.not_covered))
    if outcome.verdict.status is Status.PASS and any(items for _, items in lists):
        yield ""
    for name, items in lists:
        yield from labelled(name, " · ".join(items), width)
    for trouble in outcome.trouble:
        yield from labelled("not captured", words.trouble(trouble), width)


_SENTENCE_COLUMNS = 28  # beside the row; with less room it stands below
_LINES_BESIDE, _LINES_BELOW = 2, 4
_LABEL_WIDTH = 11


def needs_a_screen(outcome: Outcome) -> bool:
    """Among several outcomes, one that passed or did not run is told in a line, and so is a look into another one."""
    if outcome.deepening and outcome.showed:
        return False
    went_well = outcome.verdict.status in (Status.PASS, Status.SKIP)
    return not went_well or not outcome.expected or outcome.flaky


def outcome_line(outcome: Outcome, width: int) -> Iterator[str]:
    outcome = escaped(outcome)
    if outcome.verdict.status is Status.SKIP:
        text = f"SKIP  {outcome.scenario}   {outcome.verdict.summary}"
    elif outcome.showed:
        text = f"{headline(outcome)}   {outcome.showed}"
    else:
        text = " · ".join((headline(outcome), *words.numbers(outcome)))
    yield from paragraph(text, width, "", "      ")
    yield from _silent_faults(outcome, width)


def _silent_faults(outcome: Outcome, width: int) -> Iterator[str]:
    """Under a PASS, which they do not change; the whole of each stands in SUMMARY.md."""
    for finding in silent_faults(outcome):
        text = f"but {finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
        yield from _short(text, width, "      ", _LINES_BESIDE)


def done_lines(report: Report, playbook: Playbook, run_dir: Path, width: int) -> Iterator[str]:
    """The verdicts in order where there are several, the counts, where everything lies, and how to go on."""
    report = escaped(report)
    if report.interrupted:
        yield from paragraph("Interrupted: only what is listed was judged.", width)
        yield ""
    if len(report.outcomes) != 1:
        yield from _verdicts(report, width)
        yield from paragraph(words.counts_line(report), width, "", "  ")
        yield ""
        yield from _labelled("expected", _expectations(report), width)
    yield from _labelled("artifacts", _artifacts(report), width)
    yield from command("report", f"{escape(str(run_dir))}/SUMMARY.md", width, _LABEL_WIDTH)
    yield from command("page", f"{escape(str(run_dir))}/report.html", width, _LABEL_WIDTH)
    yield from command("next", escape(_next(report, playbook, run_dir) or ""), width, _LABEL_WIDTH)


def _verdicts(report: Report, width: int) -> Iterator[str]:
    """The sentence beside its row, or below it where the line is narrow or a name long."""
    names = [_name(outcome) for outcome in report.outcomes]
    times = [words.wall_time(outcome) for outcome in report.outcomes]
    longest, time_columns = max(map(cell_len, names), default=0), max(map(cell_len, times), default=0)
    digits = len(str(len(report.outcomes)))
    room = width - digits - time_columns - 13  # for the name
    beside = longest + 3 + _SENTENCE_COLUMNS <= room
    name_columns = min(longest, max(room, 1))
    for number, (outcome, name, took) in enumerate(zip(report.outcomes, names, times, strict=True), start=1):
        head = f"  {number:>{digits}}  {outcome.verdict.status:<5}  "
        row = f"{head}{padded(cropped(name, name_columns), name_columns)}  {took:>{time_columns}}"
        sentence = _sentence(outcome)
        if not (beside and sentence):
            yield cropped(row.rstrip(), width)
        first, most = (f"{row}   ", _LINES_BESIDE) if beside else (" " * len(head), _LINES_BELOW)
        yield from _short(sentence, width, first, most)
    if report.outcomes:
        yield ""


def _short(sentence: str, width: int, first: str, most: int) -> Iterator[str]:
    """The sentence in at most so many lines; SUMMARY.md has the whole."""
    lines = list(paragraph(sentence, width, first, " " * cell_len(first))) if sentence else []
    kept = lines[:most]
    if len(lines) > most:
        kept[-1] += " …"
    yield from (cropped(line, width) for line in kept)


def _name(outcome: Outcome) -> str:
    return outcome.scenario if outcome.attempt == 1 and outcome.final else f"{outcome.scenario} ~{outcome.attempt}"


def _sentence(outcome: Outcome) -> str:
    """What was expected, then what was seen; of a PASS its numbers."""
    bad = outcome.verdict.status not in (Status.PASS, Status.SKIP)
    expected = "as expected" if bad and outcome.expected else "" if outcome.expected else "not as expected"
    remarks = ("does not count" if not outcome.final else "", "flaky" if outcome.flaky else "")
    if outcome.showed:
        return f"does not count · {outcome.showed}"
    return " · ".join(part for part in (expected, *remarks, words.row_sentence(outcome)) if part)


def _expectations(report: Report) -> str:
    final = [outcome for outcome in report.outcomes if outcome.final and outcome.verdict.status is not Status.SKIP]
    met = sum(outcome.expected for outcome in final)
    if not final:
        return "no run"
    return "every run" if met == len(final) else f"{met} of {words.plural(len(final), 'run')}"


def _artifacts(report: Report) -> str:
    every = [artifact for outcome in report.outcomes for artifact in outcome.artifacts]
    absent = sum(artifact.absent is not None for artifact in every)
    if not every:
        return ""
    reason = f" · {absent} absent, each with its reason in SUMMARY.md" if absent else ""
    return f"{len(every) - absent} written{reason}"


def _labelled(label: str, text: str, width: int) -> Iterator[str]:
    if text:
        yield from paragraph(text, width, f"  {label:<{_LABEL_WIDTH}}", " " * (_LABEL_WIDTH + 2))


def _next(report: Report, playbook: Playbook, run_dir: Path) -> str | None:
    """The command that goes on: with what was cut short, with what the gates ask, with the first surprise."""
    if report.interrupted:
        return f"nsa-harness run --resume={shlex.quote(str(run_dir))}"
    playbook = fitting(playbook, report.outcomes)
    asked = (one.answer.command for one in fired(decided(report.outcomes, playbook.gates)))
    outcomes = sorted((one for _, one in words.bad_news_first(report)), key=lambda one: one.expected)
    offered = (one.next or (None if one.expected else one.repeat) for one in outcomes)
    return next(filter(None, (*asked, *offered)), playbook.onward if len(report.outcomes) == 1 else None)
