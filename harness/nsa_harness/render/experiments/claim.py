"""The terminal output of `nsa-harness claim`, and for the verification of a fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nsa_harness.core.experiment.claim import (
    ClaimReport,
    ClaimResult,
    Effect,
    FailureCount,
    FixStatus,
    Spread,
    VerificationResult,
    VerifyReport,
    difference_text,
    effects,
    fix_status,
    format_share,
)
from nsa_harness.core.experiment.statistics import passes_to_show
from nsa_harness.render.experiments.live import ExperimentScreen
from nsa_harness.render.terminal.layout import beside_or_below, command, labelled, paragraph
from nsa_harness.render.text import escape, escaped, markdown
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.texts import words

SIDES = ("without it", "with it")
_LABEL = 12
_ROW = 11  # width of the name of a side
_BELOW = " " * 5  # in front of what does not fit beside a row


def header_lines(report: ClaimReport, width: int) -> Iterator[str]:
    """Yield the lines of the header, which say what is compared and how the claim is decided."""
    report, terms = escaped(report), report.terms
    yield from paragraph(f"CLAIM  {report.scenario}   {report.text}", width, "", "       ")
    for name, label in zip(SIDES, report.labels, strict=True):
        yield from labelled(name, label, width, _LABEL)
    equal_text = "all other settings, the code, the environment and the machine"
    yield from labelled("equal", equal_text, width, _LABEL)
    budget = "" if report.budget_s is None else f", or {words.seconds(report.budget_s)} of runs"
    terms_text = (
        f"both sides run in pairs, in random order, until {percent(terms.confidence)} sure, at most"
        f" {terms.max_pairs} pairs{budget};"
        " a change that prevents less than half of the failures is no mitigation"
    )
    yield from labelled("rules", terms_text, width, _LABEL)
    counts_text = "2/2 against 0/1: failed so far in 2 of 2 runs without it and in 0 of 1 runs with it"
    yield from labelled("rows", counts_text, width, _LABEL)
    for note in report.notes:
        yield from labelled("note", note, width, _LABEL)
    yield ""


def trial_lines(report: ClaimReport, width: int) -> Iterator[str]:
    """Yield a row such as "  3  without it  HANG  14.5 s   2/2 against 0/1", and below it what does not fit."""
    trial = escaped(report.trials[-1])
    first, second = report.counts
    verdict, _, rest = trial.end.partition(" · ")
    is_pair_complete = first.judged == second.judged < report.terms.max_pairs
    left_at_most = left_text(report) if is_pair_complete else ""
    row = f"{len(report.trials):>3}  {SIDES[trial.config]:<{_ROW}} {verdict:<5} {words.seconds(trial.wall_s):>7}"
    counts_text = f"{first.bad}/{first.judged} against {second.bad}/{second.judged}"
    remark = "   ".join(filter(None, (rest, left_at_most)))
    yield from beside_or_below(f"{row}   {counts_text}", f"   {remark}", width, _BELOW)


def left_text(report: ClaimReport) -> str:
    """Return the longest remaining duration of the test, such as "at most 9 more pairs, 2 min"."""
    pairs = max(0, report.terms.max_pairs - min(count.judged for count in report.counts))
    time_left = "" if report.left_s is None else f", {words.whole_seconds(report.left_s)}"
    return f"at most {words.plural(pairs, 'more pair')}{time_left}"


def progress_text(report: ClaimReport, side: int) -> str:
    """Return a status message, such as "run 4, with it; at most 9 more pairs, 2 min"."""
    return f"run {len(report.trials) + 1}, {SIDES[side]}; {left_text(report)}"


def answer_lines(report: ClaimReport, run_dir: Path, ledger: Path | None, width: int) -> Iterator[str]:
    """Yield the lines that report the result of a claim test, and the `ledger` to which it was added, if any."""
    report = escaped(report)
    assert report.conclusion is not None
    conclusion = report.conclusion
    sure = f"   ({percent(report.terms.confidence)} sure)" if conclusion.is_by_counts else ""
    yield from paragraph(f"{conclusion.result.value.upper()}  {conclusion.why}{sure}", width, "", "  ")
    yield ""
    yield from labelled("order", order_text(report), width, _LABEL)
    for name, side_count in zip(SIDES, report.counts, strict=True):
        yield from labelled(name, count_text(side_count, report.terms.confidence), width, _LABEL)
    yield from labelled("fixed", fixed_text(report), width, _LABEL)
    yield from labelled("computes", computes_text(report), width, _LABEL)
    for effect in effects(report.trials):
        yield from labelled(effect.name, effect_text(effect), width, _LABEL)
    runs = words.plural(len(report.trials), "run")
    yield from labelled("took", f"{runs}, {words.seconds(report.took_s)} in total", width, _LABEL)
    if ledger is not None:
        yield from command("ledger", escape(str(ledger)), width, _LABEL)
    yield from command("page", escape(f"{run_dir}/report.html"), width, _LABEL)


def deadline_text(counts: Sequence[FailureCount]) -> str:
    """Return the reason why a claim is undecided if only the deadline made the difference between its sides."""
    sides = (
        f"{side_count.slow} of {side_count.judged} runs {name}"
        f" ({'at least ' if side_count.slow else ''}{words.seconds(side_count.wall_s)})"
        for name, side_count in zip(SIDES, counts, strict=True)
    )
    return (
        "the deadline, not a hang or a crash, made the difference: it was reached by"
        f" {' and '.join(sides)}; raise limits.deadline_s to see whether both sides end"
    )


def order_text(report: ClaimReport) -> str:
    """Return which side counts as the change, if the claim is refuted and may hold the other way round."""
    (without, with_it), (first, second) = report.labels, report.counts
    is_refuted = report.conclusion is not None and report.conclusion.result is ClaimResult.REFUTED
    if not (is_refuted and first.rate is not None and second.rate is not None and second.rate > first.rate):
        return ""
    return f"{with_it} counts as the change here; if {without} is the change, give both in the other order"


def count_text(side_count: FailureCount, confidence: float) -> str:
    """Return a text such as "failed 4 of 30 (4 % to 31 %): 3 HANG · deadlock, 1 FAIL · raised"."""
    low, high = side_count.interval(confidence)
    unjudged_text = f"; {words.plural(side_count.unjudged, 'run')} not judged" if side_count.unjudged else ""
    ends = ", ".join(f"{often} {end}" for end, often in side_count.ends.items())
    return f"failed {side_count} ({percent(low)} to {percent(high)}){f': {ends}' if ends else ''}{unjudged_text}"


def fixed_text(report: ClaimReport) -> str:
    """Return whether the change has fixed the failure, not only made it rarer, and why, or "" if it never failed."""
    first, second = report.counts
    confidence = report.terms.confidence
    is_fixed = fix_status(first, second, confidence)
    if is_fixed is None:
        return ""
    if is_fixed is FixStatus.NO:
        return f"no: it still fails with it ({second} runs)"
    needed_passes = passes_to_show(first.bad, first.judged, confidence)
    passes = words.plural(needed_passes, "pass")
    would_show = f"a failure as frequent as without it ({first}) would show within {passes}"
    if is_fixed is FixStatus.YES:
        return f"yes: {words.plural(second.judged, 'pass')}; {would_show}"
    highest_rate = percent(second.interval(confidence)[1])
    missing = needed_passes - second.judged
    return (
        f"not yet: {second} still allows a failure rate of {highest_rate}; {would_show}, so {missing} more"
        f" {'is' if missing == 1 else 'are'} needed"
    )


def computes_text(report: ClaimReport) -> str:
    """Return a phrase that says whether the program computes the same numbers with the change."""
    comparison, must_be_same = report.number_comparison, report.terms.must_compute_same
    if comparison.is_same is None:
        sides_with_numbers = {trial.config for trial in report.trials if trial.computed}
        sides_without = [name for side, name in enumerate(SIDES) if side not in sides_with_numbers]
        if len(sides_without) == 1:
            return f"not known: no step was finished {sides_without[0]}"
        return "not known: no step was finished, or the program reports neither its loss nor its gradient norm"
    if comparison.is_same:
        steps = words.plural(comparison.steps, "step")
        return f"the same: gradients and loss of {steps} differ by at most {format_share(comparison.difference)}"
    caveat = "" if must_be_same else "; this may be intended and does not refute the claim"
    return f"different numbers: {difference_text(comparison)}{caveat}"


def effect_text(effect: Effect) -> str:
    """Return a text such as "1.2 s (3 passes) without it, 1.5 s (3 passes) with it: +25 %"."""
    first, second = (_spread(effect, spread) for spread in (effect.first, effect.second))
    change = effect.change
    change_text = "" if change is None else f": {change:+.0%}".replace("%", " %")
    within = ", but runs of one side differ as much" if effect.overlaps and change is not None else ""
    return f"{first} without it, {second} with it{change_text}{within}"


def _spread(effect: Effect, spread: Spread | None) -> str:
    if spread is None:
        return words.UNKNOWN
    middle, low, high = (_quantity(effect.unit, value) for value in (spread.middle, spread.low, spread.high))
    spans = f"{low} to {high}, " if low != high else ""
    return f"{middle} ({spans}{words.plural(spread.count, 'pass')})"


def _quantity(unit: str, value: float) -> str:
    if unit == "s":
        return words.seconds(value)
    return words.size(int(value)) if unit == "bytes" else words.loss(value)


def percent(value: float) -> str:
    """Return the fraction `value` as a percentage, such as "95 %"."""
    return f"{value * 100:.{int(0.99 < value < 1)}f} %"


def plan_lines(report: ClaimReport, commands: Sequence[str], pair_s: float | None, width: int) -> Iterator[str]:
    """Yield the output of `claim --dry-run`. `pair_s`: the seconds for one run of each side, if known."""
    yield from header_lines(report, width)
    for name, text in zip(SIDES, commands, strict=True):
        yield from command(name, escape(text), width, _LABEL)
    most = min(report.terms.max_pairs, _LONGEST_PLAN)
    if pair_s is None:
        takes = "the time is not known until a run of each side is stored"
    else:
        shortest, longest = words.seconds(pair_s * FEWEST_PAIRS), words.seconds(pair_s * most)
        takes = f"{shortest} to {longest}, estimated from stored runs"
    fewest = f"{FEWEST_PAIRS} pairs if every run fails without it and none with it"
    yield from labelled("takes", f"{fewest}, at most {report.terms.max_pairs}; {takes}", width, _LABEL)
    yield from labelled("launched", "nothing", width, _LABEL)


FEWEST_PAIRS = 5  # for 95 %: four pairs with a failure on the same side occur by chance in one of sixteen claims
_LONGEST_PLAN = 10**6


# Verification of a fix.


def verify_header(report: VerifyReport, width: int) -> Iterator[str]:
    """Yield the lines of the header of a verification, with the failure and the number of passes needed."""
    report = escaped(report)
    yield from paragraph(f"VERIFY  {report.scenario} of {report.run_id}   {report.end}", width, "", "        ")
    (bad, of), (more_bad, more) = report.count_in_run, report.count_in_all_runs
    in_all_text = f"; {more_bad} of {more} in all stored runs of this launch" if more > of else ""
    yield from labelled("failed", f"{bad} of {words.plural(of, 'attempt')} in that run{in_all_text}", width, _LABEL)
    yield from labelled("needs", needs_text(report), width, _LABEL)
    yield ""


def needs_text(report: VerifyReport) -> str:
    """Return the number of passes needed to show that the failure is fixed, and the reason for this number."""
    bad, of = report.lowest_count
    return (
        f"{words.plural(report.passes_needed, 'pass')} without a failure to count as fixed: a failure as frequent as"
        f" before ({bad} of {of}) would then have shown with {percent(report.confidence)} confidence"
    )


def verify_lines(report: VerifyReport, width: int) -> Iterator[str]:
    """Yield one row about the latest trial, such as "  3  PASS   7.6 s   3 of 14 passes"."""
    verdict, _, rest = escape(report.last_end).partition(" · ")
    took = words.seconds(report.trials[-1].wall_s)
    row = f"{len(report.trials):>3}  {verdict:<5} {took:>7}   {report.passes} of {report.passes_needed} passes"
    yield from beside_or_below(row, f"   {rest}", width, _BELOW)


def verify_why(report: VerifyReport) -> str:
    """Return the reason for the result of a verification."""
    passed_text = f"{report.passes} of {report.passes_needed} times"
    if report.result is VerificationResult.FIXED:
        return f"it passed {passed_text}"
    if report.result is VerificationResult.NOT_FIXED:
        return f"run {len(report.trials)} failed in the same way: {report.last_end}"
    if report.result is VerificationResult.FAILS_OTHERWISE:
        return f"run {len(report.trials)} failed in another way: {report.last_end}"
    return f"interrupted, passed {passed_text}" if report.interrupted else f"not judged, passed {passed_text}"


def verify_answer(report: VerifyReport, run_dir: Path, ledger: Path | None, width: int) -> Iterator[str]:
    """Yield the result of a verification, and the paths of its output files."""
    report = escaped(report)
    result = report.result or VerificationResult.UNDECIDED
    yield from paragraph(f"{result.value.upper()}  {verify_why(report)}", width, "", "  ")
    if result is VerificationResult.FAILS_OTHERWISE:
        yield from labelled("before", report.end, width, _LABEL)
    yield ""
    if ledger is not None:
        yield from command("ledger", escape(str(ledger)), width, _LABEL)
    yield from command("page", escape(f"{run_dir}/report.html"), width, _LABEL)


# The ledger.

_SURE = (ClaimResult.SUPPORTED, ClaimResult.REFUTED, VerificationResult.FIXED)  # results with a confidence
_HEAD = ("date", "claim", "result", "without it", "with it", "fixed", "computes", "sure", "commit", "runs")


def ledger_lines(lines: Iterable[LedgerLine]) -> Iterator[str]:
    """Yield the ledger of claims as a Markdown table, with the latest claim last."""
    yield f"| {' | '.join(_HEAD)} |"
    yield f"| {' | '.join('---' for _ in _HEAD)} |"
    for line in lines:
        counts = [f"{side.failed} of {side.of}" for side in line.sides]
        commit = f"{line.commit[:9]}{'+' if line.dirty else ''}" if line.commit else ""
        cells = (
            line.at[:16].replace("T", " "), line.text, _result_text(line), *(counts + [""] * 2)[:2], line.fixed or "",
            line.computes, percent(line.confidence) if line.result in _SURE else "", commit, ", ".join(line.runs),
        )  # fmt: skip
        yield f"| {' | '.join(map(markdown, cells))} |"


def _result_text(line: LedgerLine) -> str:
    is_untested = line.result == ClaimResult.NOT_COMPARABLE and not line.attempts
    return f"not tested here: {line.why.rpartition(': ')[2]}" if is_untested else line.result


# The screen.

STYLES = (
    (r"(?<=  )PASS(?= |$)", "green"),
    (r"(?<=  )(HANG|FAIL)(?= |$)", "bold red"),
    (r"(?<=  )(ERROR|SKIP)(?= |$)", "yellow"),
    (r"^(CLAIM|VERIFY)(?=  )", "bold"),
    (r"^(SUPPORTED|FIXED)(?=  )", "bold white on green"),
    (r"^(REFUTED|NOT FIXED|FAILS OTHERWISE)(?=  )", "bold white on red"),
    (r"^(UNDECIDED|NOT COMPARABLE)(?=  )", "bold black on yellow"),
)


class TrialScreen(ExperimentScreen):
    """The terminal output of a running claim test or verification."""

    styles = STYLES
