"""The terminal output of `nsa-harness why`: what it will launch, one row per run, and the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nsa_harness.core.experiment.why import SUCCESSES, Proof, RunResult, WhyReport, WhyResult
from nsa_harness.core.recording.explanation import Candidate
from nsa_harness.core.report import Status
from nsa_harness.render.experiments.live import ExperimentScreen
from nsa_harness.render.terminal.layout import beside_or_below, command, labelled, paragraph, table
from nsa_harness.render.text import escape, escaped
from nsa_harness.texts import why as texts
from nsa_harness.texts import words

_LABEL = 9
_SOURCE_COLUMNS = 60  # of a source line next to its location
_CERTAINTY = {
    WhyResult.CERTAIN: "certain, by experiment",
    WhyResult.DECISION: "decision certain, by experiment; origin likely",
    WhyResult.LIKELY: "likely",
}
_PROOFS = {
    Proof.ORIGIN: "every rank went on",
    Proof.DECISION: "every rank went on; this proves the decision, not its origin",
    Proof.DROPPED: "failed nevertheless: not the origin",
    Proof.SECOND_CAUSE: "got past this point, and failed somewhere else",
    Proof.RACE: "the program also goes on without this change",
    Proof.OTHERWISE: "failed in another way, so it shows nothing",
    Proof.NONE: "shows nothing",
}
_RECORDED = {
    RunResult.SAME: "the same failure",
    RunResult.PASSED: "did not fail",
    RunResult.OTHERWISE: "another failure",
    RunResult.UNJUDGED: "could not be judged",
}


def header_lines(
    report: WhyReport, width: int, python: str | None = None, usual_s: float | None = None
) -> Iterator[str]:
    """Yield the lines that say, before anything starts, what is launched and which side effects that has.

    `python`: the interpreter of the program, or None for the one that the first run used. `usual_s`: the seconds that
    the failed run took, or None if unknown.
    """
    report = escaped(report)
    first = report.first
    namer = texts.namer_of([first.place])
    place = namer(first.place) if first.place else None
    end = " · ".join(filter(None, (first.verdict.value, first.cause, place)))
    yield from paragraph(f"WHY  {report.scenario} of {first.run_id}   {end}", width, "", "     ")
    yield from labelled("runs", _runs_text(report, usual_s), width, _LABEL)
    effects = "the program does everything again that it does in a run: it writes its files again"
    yield from command("in", report.directory, width, _LABEL)
    yield from labelled("effects", f"{effects}, and contacts the services that it uses", width, _LABEL)
    values = "each statement of your code, its calls to other ranks and exceptions"
    values += ", and the values of the names in it" if report.values else ", but no values"
    yield from labelled("records", f"{values}; loops of pure Python become much slower", width, _LABEL)
    yield from command("python", escape(python or ""), width, _LABEL)
    for note in report.notes:
        yield from labelled("note", note, width, _LABEL)
    yield ""


def _runs_text(report: WhyReport, usual_s: float | None) -> str:
    purpose = "to record it"
    purpose += ", then to test the answer by experiments" if report.experiments and report.max_runs > 1 else ""
    budget = "" if report.budget_s is None else f"; no new run starts after {words.seconds(report.budget_s)}"
    which = "first" if report.first.verdict is Status.PASS else "failed"
    each = "" if usual_s is None else f"; the {which} run took {words.seconds(usual_s)}"
    return f"at most {words.plural(report.max_runs, 'run')}, {purpose}{budget}{each}"


def run_lines(report: WhyReport, width: int) -> Iterator[str]:
    """Yield one row about the latest run, such as "  1  recorded    HANG   7.6 s   the same failure"."""
    run = escaped(report).runs[-1]
    verdict, _, rest = run.end.partition(" · ")
    what = "experiment" if run.experiment else "recorded"
    row = f"{len(report.runs):>3}  {what:<10}  {verdict:<5} {words.seconds(run.wall_s):>7}"
    refused = f", because the change could not be made ({run.reason})" if run.reason else ""
    shown = f"{run.change}: {_PROOFS[run.proof]}{refused}" if run.experiment else _RECORDED[run.result]
    if report.first.verdict is Status.PASS and run.result is RunResult.SAME:
        shown = "the same difference"
    yield from beside_or_below(row, f"   {shown}{'' if run.experiment or not rest else f' ({rest})'}", width, " " * 5)


def answer_lines(report: WhyReport, run_dir: Path, width: int) -> Iterator[str]:
    """Yield the answer: the lines from the origin to the effect, the values that differ, and what to do."""
    report = escaped(report)
    yield from paragraph("   ".join(filter(None, (headline(report), took_text(report)))), width, "", "  ")
    yield ""
    explanation, origin = report.explanation, report.origin
    if report.has_origin and explanation is not None and origin is not None:
        namer = texts.namer_of(texts.places_of(explanation))
        yield from paragraph(" ".join(texts.sentences(explanation, origin, namer)), width, "  ")
        yield ""
        yield from _path_lines(list(texts.path_rows(explanation, origin, namer)), width)
        head, rows = texts.value_table(explanation, origin)
        if rows:
            yield ""
            yield from table(head, rows, width)
        yield ""
        yield from labelled("do", texts.remedy(origin, namer), width, _LABEL)
        for other in report.others:
            yield from labelled("maybe", other_text(other, namer), width, _LABEL)
    else:
        yield from labelled("why", " ".join(not_answered_texts(report)), width, _LABEL)
        yield from labelled("do", report.first.advice, width, _LABEL)
        yield from labelled("maybe", other_origin_text(report), width, _LABEL)
    for proof in proof_texts(report):
        yield from labelled("proof", proof, width, _LABEL)
    for note in note_texts(report):
        yield from labelled("note", note, width, _LABEL)
    yield from command("page", escape(f"{run_dir}/report.html"), width, _LABEL)
    yield from command("next", escape(next_command(report, run_dir)), width, _LABEL)


def _path_lines(rows: list[tuple[str, str, str]], width: int) -> Iterator[str]:
    longest = max((len(name) for name, _, _ in rows), default=0)
    sources = [words.middle(source, _SOURCE_COLUMNS) for _, source, _ in rows]
    column = max(map(len, sources), default=0)
    for (name, _, remark), source in zip(rows, sources, strict=True):
        line = f"  {name:<{longest}}  {source:<{column}}"
        yield from beside_or_below(
            line if remark else line.rstrip(), f"   {remark}" if remark else "", width, " " * (longest + 6)
        )


def headline(report: WhyReport) -> str:
    """Return the answer in a few words, such as "CERTAIN  value computed from rank-local data at train.py:52"."""
    origin = report.origin
    if report.result in _CERTAINTY and origin is not None:
        at = texts.namer_of([origin.place])(origin.place)
        return f"ANSWER  {texts.title(origin.kind)} at {at} · {_CERTAINTY[report.result]}"
    return {
        WhyResult.FIRST_LINE: "ANSWER  the line of the first run stands",
        WhyResult.NOT_EXPLAINED: "NOT EXPLAINED  the recorded run shows no origin of the difference",
        WhyResult.PASSED: f"NOT REPEATED  {_rate_text(report)}",
        WhyResult.OTHERWISE: f"NOT REPEATED  {_rate_text(report)}",
    }.get(report.result, "UNDECIDED  no recorded run was finished and judged")


def _rate_text(report: WhyReport) -> str:
    ends = [run.result for run in report.recorded_runs]
    failed = ends.count(RunResult.OTHERWISE)
    otherwise = f", {failed} failed otherwise" if failed else ""
    return f"0 of {words.plural(len(ends), 'recorded run')} failed in this way{otherwise}"


def took_text(report: WhyReport) -> str:
    """Return the number of runs and the time they took together, such as "(2 runs, 38.0 s)"."""
    return f"({words.plural(len(report.runs), 'run')}, {words.seconds(report.took_s)})" if report.runs else ""


def other_text(candidate: Candidate, namer: texts.Namer) -> str:
    """Return a further candidate as a sentence."""
    return f"{namer(candidate.place)} {texts.makes(candidate, namer)}"


def other_origin_text(report: WhyReport) -> str:
    """Return the origin of the difference that a recorded run shows although the answer is another, or ""."""
    if report.explanation is None or report.origin is None:
        return ""
    namer = texts.namer_of(texts.places_of(report.explanation))
    text = " ".join(texts.sentences(report.explanation, report.origin, namer))
    return f"The other failure: {text}" if report.result is WhyResult.OTHERWISE else text


def not_answered_texts(report: WhyReport) -> Iterator[str]:
    """Yield the sentences for an answer without an origin."""
    first, namer = report.first, texts.namer_of([report.first.place])
    at = f" at {namer(first.place)}" if first.place else ""
    match report.result:
        case WhyResult.FIRST_LINE if first.verdict is Status.PASS:
            yield f"The first run has already named the line: it calls the model past DDP{at}."
        case WhyResult.FIRST_LINE:
            yield (
                f"The ranks wait because of `{first.cause}`{at}. Such a wait has its cause at this line or at the line"
                " that should end it, not in a value that differs between the ranks."
            )
        case WhyResult.NOT_EXPLAINED:
            verb = "differed" if first.verdict is Status.PASS else "failed"
            yield f"The ranks {verb} as in the first run ({first.cause or first.verdict.value}{at})."
            yield "No recorded statement or value before the failure explains it; the answer of the first run remains."
        case WhyResult.PASSED:
            yield "The failure depends on timing or chance, or recording has changed the timing that it needs."
            yield "More repeats may catch it."
        case WhyResult.OTHERWISE:
            yield f"The first run ended with {first.cause or first.verdict.value}{at}; the recorded runs did not."
            yield "The failure depends on timing or chance, or the program has changed. More repeats may catch it."
        case _:
            yield "The same command continues with what is missing."


def proof_texts(report: WhyReport) -> Iterator[str]:
    """Yield what the runs prove, with their directories."""
    recorded = next((run for run in report.recorded_runs if run.result is RunResult.SAME), None)
    for run in report.runs:
        if run.proof in SUCCESSES and recorded is not None:
            same = [one.dir for one in report.recorded_runs if one.result is RunResult.SAME]
            count = f"{len(same)} of {words.plural(len(report.recorded_runs), 'recorded run')}"
            yield f"Unchanged, the program failed in {count} ({', '.join(same)})."
            limit = "" if run.proof is Proof.ORIGIN else "; this proves the decision, not its origin"
            yield f"When {run.change}, every rank went on ({run.dir}){limit}."
        elif run.proof is Proof.SECOND_CAUSE:
            at = f" at {texts.namer_of([run.next_place])(run.next_place)}" if run.next_place else ""
            yield f"When {run.change}, every rank got past this point, and the ranks stopped{at} ({run.dir})."
        elif run.proof is Proof.DROPPED and run.candidate is not None and report.explanation is not None:
            place = report.explanation.candidates[run.candidate].place
            dropped = texts.namer_of([place])(place)
            yield f"When {run.change}, the program failed nevertheless ({run.dir}): {dropped} is dropped."


def note_texts(report: WhyReport) -> Iterator[str]:
    """Yield what limits the answer."""
    yield from (texts.text_of_note(code) for code in (report.explanation.notes if report.explanation else ()))
    if report.result is WhyResult.LIKELY:
        yield _why_likely(report)
    if report.interrupted:
        yield "Interrupted; the same command continues."


def _why_likely(report: WhyReport) -> str:
    """Return the reason why an answer is only likely."""
    if report.is_flaky:
        same = sum(run.result is RunResult.SAME for run in report.recorded_runs)
        rate = f"{same} of {words.plural(len(report.unchanged_runs), 'unchanged run')}"
        return f"The program fails only sometimes ({rate}), so a run that goes on proves nothing."
    if any(run.proof is Proof.SECOND_CAUSE for run in report.runs):
        return "Two causes: without this difference the run fails later, so the origin is likely, not certain."
    if any(run.proof in SUCCESSES for run in report.runs):
        return "The unchanged program was not launched once more, so the origin is likely, not certain."
    made = any(run.experiment for run in report.runs)
    reason = "No experiment let the run go on" if made else "No experiment was made"
    return f"{reason}: the origin is likely, not certain."


def next_command(report: WhyReport, run_dir: Path) -> str:
    """Return the command that the reader most likely wants to give next."""
    beside = f"{run_dir.parent}/{report.first.run_id}"
    first = beside if report.first.path.endswith(f"/{beside}") else report.first.path
    if report.interrupted:
        return f"nsa-harness why {first}"
    if report.result in (WhyResult.PASSED, WhyResult.OTHERWISE):
        return f"nsa-harness why {first} --repeat {max(5, 2 * len(report.recorded_runs))}"
    if any(run.proof in SUCCESSES for run in report.runs):
        return f"nsa-harness why --patch {run_dir}"
    if report.first.verdict is Status.PASS:  # nothing that `--verify` could see fail again
        return f"nsa-harness report {first}"
    return f"nsa-harness run --verify {first}"


class WhyScreen(ExperimentScreen):
    """The terminal output while `why` launches runs."""

    styles = (
        (r"(?<=  )PASS(?= |$)", "green"),
        (r"(?<=  )(HANG|FAIL)(?= |$)", "bold red"),
        (r"(?<=  )(ERROR|SKIP)(?= |$)", "yellow"),
        (r"^WHY(?=  )", "bold"),
        (r"^ANSWER(?=  )", "bold white on green"),
        (r"^(UNDECIDED|NOT EXPLAINED|NOT REPEATED)(?=  )", "bold black on yellow"),
    )
