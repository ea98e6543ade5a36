"""Phrases that describe a bisection, such as its question and its answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from nsa_harness.core.experiment.statistics import interval
from nsa_harness.core.experiment.trial import SLOW, Signature
from nsa_harness.core.report import Status
from nsa_harness.core.scenario.yaml_tree import Plain
from nsa_harness.core.search.question import (
    CONTROLS,
    AnswerKind,
    ProbeResult,
    Purpose,
    SearchAnswer,
    Subset,
    Zone,
    last_index,
    spans_of,
)
from nsa_harness.core.search.report import BisectReport, ProbeReport
from nsa_harness.core.search.subject import (
    ENV,
    PACKAGE,
    Config,
    Subject,
    SubjectForm,
    describe_layers,
    format_override,
    plural,
)
from nsa_harness.texts import words

SEARCHING = (Purpose.RIGHT_EDGE, Purpose.LEFT_EDGE)
GC_LAYERS = "gc.layers"


def question(report: BisectReport) -> str:
    """Return the question of a bisection, such as "which checkpointed layers make it HANG?"."""
    subject = report.subject
    fail = "fail" if report.signature is None else report.signature.verdict
    nouns = plural(subject.noun)
    match subject.form:
        case SubjectForm.LAYERS if subject.key == GC_LAYERS:
            return f"which checkpointed layers make it {fail}?"
        case SubjectForm.VALUE:
            return f"at which {subject.noun} does it {'become slow' if fail == SLOW else f'start to {fail}'}?"
        case SubjectForm.COMMIT:
            return f"which {subject.noun} makes it {fail}?"
        case SubjectForm.PARTS:
            return f"which {nouns} of the attention make it {fail}?"
        case SubjectForm.KEYS | SubjectForm.FILE:
            return f"which of {words.plural(len(subject.items), subject.noun)} make it {fail}?"
    return f"which {nouns} make it {fail}?"


def failure_verb(signature: Signature | None) -> str:
    """Return the verb that describes a failure, such as "hangs" or "is slow"."""
    if signature is not None and signature.verdict == SLOW:
        return "is slow"
    return "hangs" if signature is not None and signature.verdict == Status.HANG else "fails"


def range_text(subject: Subject, open_: tuple[int, int]) -> str:
    """Return a half-open range of indices as short text, such as "[4,9)" for layers."""
    first, stop = open_
    if stop <= first:
        return "none"
    if subject.form is SubjectForm.VALUE:
        return f"({value_below(subject, first)}, {subject.label(stop - 1)}]"
    if subject.form is SubjectForm.LAYERS:
        low, high = subject.label(first), subject.items[stop - 1]
        return low if stop - first == 1 else f"[{low},{int(str(high)) + 1})"
    return str(first + 1) if stop - first == 1 else f"{first + 1}-{stop}"


def value_below(subject: Subject, index: int) -> str:
    """Return the value before the item at `index`. Before the first item, it is the known-good value."""
    if index > 0:
        return subject.label(index - 1)
    return subject.good if isinstance(subject.good, str) else "none" if subject.good is None else f"{subject.good}"


def last_value(subject: Subject, probe: ProbeReport) -> str:
    """Return the value with which this test run was launched."""
    last = last_index(probe.subset)
    return value_below(subject, 0) if last is None else subject.label(last)


def headline(report: BisectReport) -> str:
    """Return the answer of a bisection as a short phrase, such as "layer 7 alone"."""
    subject, answer = report.subject, report.answer
    match answer.kind:
        case AnswerKind.SINGLE:
            return f"{items_text(subject, answer.items)} alone"
        case AnswerKind.RANGE:
            indices = range(*answer.items)
            # With ranges it cannot be tested whether the items between both ends are needed.
            has_untested = subject.in_a_row and len(indices) > 2
            suffix = "and no smaller range" if has_untested else "all of them together"
            return f"{items_text(subject, indices)}, {suffix}"
        case AnswerKind.SET:
            return f"{items_text(subject, answer.items)}, only together"
        case AnswerKind.SEVERAL:
            return f"{'; '.join(items_text(subject, group) for group in answer.groups)}: each is enough on its own"
        case AnswerKind.THRESHOLD:
            return _threshold(subject, answer.items[0])
        case AnswerKind.COUNT:
            count = answer.items[0]
            if subject.in_a_row and count > 1:
                return f"any {count} consecutive {plural(subject.noun)}"
            return f"any {words.plural(count, subject.noun)}, whichever {'it is' if count == 1 else 'they are'}"
        case AnswerKind.CHOICE:
            passing = [index for index in range(len(subject.items)) if index not in (*answer.items, *answer.open)]
            return items_text(subject, answer.items) + (f", not {items_text(subject, passing)}" if passing else "")
        case AnswerKind.INDEPENDENT:
            return "the failure does not depend on what was varied"
        case AnswerKind.NONE:
            return "nothing to bisect"
        case AnswerKind.UNDECIDED:
            return f"not decided: {open_text(report)}"


def sentence(report: BisectReport) -> str:
    """Return the answer of a bisection as a full sentence."""
    verb, answer = failure_verb(report.signature), report.answer
    match answer.kind:
        case AnswerKind.NONE:
            return f"There is nothing to bisect: {answer.why or 'both ends have the same result'}."
        case AnswerKind.INDEPENDENT:
            return f"The failure does not depend on what was varied: {answer.why}."
        case AnswerKind.UNDECIDED if answer.zones:
            return f"It is not decided where the failure begins: it {zones_text(report)}."
        case AnswerKind.UNDECIDED:
            return f"The search did not reach an answer: {answer.why or open_text(report)}."
        case AnswerKind.THRESHOLD if report.subject.form is SubjectForm.COMMIT:
            return f"It {verb} since commit {report.subject.label(answer.items[0] - 1)}."
    return f"It {verb} with {headline(report)}."


def certainty_text(answer: SearchAnswer) -> str:
    """Return the confidence of an answer as text, such as "certain" or "97 % sure"."""
    if answer.kind is AnswerKind.UNDECIDED:
        return ""
    if answer.confidence >= 1:
        return words.certainty(answer.confidence)
    return f"{_percent(answer.confidence)} sure"


def failure_rate_text(report: BisectReport) -> str:
    """Return a text such as "hangs in 9 of 16 runs (30 % to 80 %) with layer 7", or "" if it is not flaky."""
    subject, answer = report.subject, report.answer
    if answer.p_bad is None and answer.kind is not AnswerKind.INDEPENDENT:
        return ""
    bad_end = frozenset(range(len(subject.items)))
    failing = bad_end if answer.failing is None or not count_failures(report, answer.failing)[1] else answer.failing
    at_bad = "at the bad end" if failing == bad_end else f"with {subject.describe(failing)}"
    ends = ((at_bad, count_failures(report, failing)), ("at the good end", count_failures(report, frozenset())))
    rates = [
        f"in {bad} of {judged} runs ({_rate_interval(bad, judged)}) {where}" for where, (bad, judged) in ends if judged
    ]
    return f"{failure_verb(report.signature)} {', '.join(rates)}" if rates else ""


def count_failures(report: BisectReport, indices: Subset) -> tuple[int, int]:
    """Return how many runs with exactly these items switched on failed, and how many were judged."""
    spans, judged_results = spans_of(indices), (ProbeResult.GOOD, ProbeResult.BAD)
    results = [
        probe.counts_as for probe in report.probes if probe.subset == spans and probe.counts_as in judged_results
    ]
    return results.count(ProbeResult.BAD), len(results)


def zones_text(report: BisectReport) -> str:
    """Describe which of the tested values pass and which fail, such as "passes up to 249, hangs from 250"."""
    subject, in_order = report.subject, report.answer.zones
    return ", ".join(f"{_zone_verb(report, zone)} {_zone_span(subject, zone, in_order[-1])}" for zone in in_order)


def effort_text(report: BisectReport) -> str:
    """Describe the effort of the search, such as "9 probes (4 for the search), 54 s in all"."""
    probes = words.plural(len(report.probes), "probe")
    return f"{probes} ({report.search_probes} for the search), {words.seconds(report.elapsed_s)} in all"


def setting_text(report: BisectReport) -> str:
    """Return the setting that reproduces the failure, such as "NSA_GC_RANGE=7:8", or "" if there is none."""
    subject, failing = report.subject, report.answer.failing
    if report.answer.kind not in _EXACT or not failing:
        return ""
    if subject.has_keys:
        return "; ".join(item_text(subject, index) for index in sorted(failing))
    if subject.key != GC_LAYERS:
        return ""
    numbers = sorted(int(str(subject.items[index])) for index in failing)
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"NSA_GC_RANGE={numbers[0]}:{numbers[-1] + 1}"
    return f"NSA_GC_LAYERS={','.join(map(str, numbers))}"


def open_indices(report: BisectReport) -> Collection[int]:
    """Return the indices of the items that can still belong to the answer of a bisection."""
    if report.answer.open or report.answer.known:
        return report.answer.open
    narrowed_ranges = [range(*range_left_open(probe, report)) for probe in report.probes if probe.purpose in SEARCHING]
    return narrowed_ranges[-1] if narrowed_ranges else range(len(report.subject.items))


def open_text(report: BisectReport) -> str:
    """Describe what is still undecided, such as "layers 6-11 [6:12] are still open"."""
    indices = sorted(open_indices(report))
    if report.answer.zones or report.subject.form is SubjectForm.COMMIT:
        first = f"the first {report.subject.noun} that {failure_verb(report.signature)}"
        return f"{first} can {_possible_first(report, indices)}"
    if report.subject.ordered:
        return f"{report.subject.key} {range_text(report.subject, (min(indices), max(indices) + 1))} is still open"
    if report.answer.known and not report.answer.open:
        return f"{_needed_text(report)}the proof is still open"
    still = f"{items_text(report.subject, indices)} {'is' if len(indices) == 1 else 'are'} still open"
    return f"{_needed_text(report)}{still}"


def _needed_text(report: BisectReport) -> str:
    """Describe the items that the failure needs, such as "layer 2 is needed; ", or return "" if they are unknown."""
    subject, answer = report.subject, report.answer
    if answer.known:
        return f"{items_text(subject, answer.known)} {'is' if len(answer.known) == 1 else 'are'} needed; "
    some = (answer.failing or frozenset()) - (answer.passing or frozenset())
    return (
        f"one of {items_text(subject, some)} is needed; " if some and answer.passing and some < {*answer.open} else ""
    )


def _possible_first(report: BisectReport, indices: Sequence[int]) -> str:
    """Return the end of a sentence about the first failing value, such as "only be 96"."""
    first, *others = [report.subject.label(index) for index in indices]
    if not others:
        return f"only be {first}"
    if report.subject.form is not SubjectForm.COMMIT:
        return f"be any value between {first} and {others[-1]}"
    more = [f"{len(others) - _MAX_NAMED} more"] if len(others) > _MAX_NAMED else []
    return f"be any of: {'; '.join([first, *others[:_MAX_NAMED], *more])}"


def range_left_open(probe: ProbeReport, report: BisectReport) -> tuple[int, int]:
    """Return the range of items that can still belong to the bisection's answer after a test run."""
    good, bad = (
        {other.subset for other in report.probes if other.counts_as is counts_as}
        for counts_as in (ProbeResult.GOOD, ProbeResult.BAD)
    )
    flaky = report.answer.p_bad is not None or bool(good & bad)
    if flaky or probe.counts_as not in (ProbeResult.GOOD, ProbeResult.BAD):
        return probe.open
    inside = set(range(*probe.open))
    still_open = inside & probe.indices if probe.counts_as is ProbeResult.BAD else inside - probe.indices
    return (min(still_open), max(still_open) + 1) if still_open else probe.open


def items_text(subject: Subject, indices: Collection[int]) -> str:
    """Return the items at `indices` as text, such as "layers 4-8 [4:9]"."""
    indices_in_order = sorted(indices)
    noun = subject.noun if len(indices_in_order) == 1 else plural(subject.noun)
    if subject.form is SubjectForm.LAYERS:
        return f"{noun} {describe_layers([int(str(subject.items[index])) for index in indices_in_order])}"
    return f"{noun} {words.listing([subject.label(index) for index in indices_in_order] or ['none'])}"


def item_text(subject: Subject, index: int) -> str:
    """Return the name of the item at `index`, such as "gc.mode: reentrant instead of non_reentrant"."""
    if not subject.has_keys:
        return subject.label(index)
    name = subject.label(index).removeprefix(ENV)
    good, bad = subject.good_values[index], subject.bad_values[index]
    if str(subject.items[index]).startswith(PACKAGE):
        bad_version, good_version = ("not installed" if version is None else version for version in (bad, good))
        return f"{name} {bad_version} instead of {good_version}"
    if str(subject.items[index]).startswith(ENV):
        return f"{name}={bad}" if good is None else f"{name}={bad} instead of {good}"
    bad_value, good_value = ("not set" if value is None else value_text(value) for value in (bad, good))
    return f"{name}: {bad_value} instead of {good_value}"


def value_text(value: Plain) -> str:
    """Return a value in the form used on the command line after KEY=."""
    return format_override("", value)[1:]


def config_text(config: Config) -> str:
    """Return a configuration as text, such as "gc.layers=4:9", or "nothing set"."""
    return " ".join(format_override(key, value) for key, value in config.items()) or "nothing set"


def round_text(purpose: Purpose) -> str:
    """Return a name for the test runs that are made for `purpose`, such as "controls first" or "proof"."""
    if purpose in CONTROLS:
        return "controls first"
    return PURPOSES.get(purpose, "one item" if purpose is Purpose.ALONE else "proof").partition(":")[0]


def _threshold(subject: Subject, length: int) -> str:
    index = length - 1
    if subject.form is SubjectForm.COMMIT:
        return f"{subject.noun} {subject.label(index)} is the first bad one"
    if subject.ordered:
        return f"{subject.noun} {subject.label(index)} and above, not {value_below(subject, index)}"
    return f"the first {words.plural(length, subject.noun)}"


def _zone_verb(report: BisectReport, zone: Zone) -> str:
    match zone.counts_as:
        case ProbeResult.GOOD:
            return "passes"
        case ProbeResult.BAD:
            return failure_verb(report.signature)
        case ProbeResult.UNRESOLVED:
            return "cannot be judged"
    inside = range(zone.start, zone.stop)
    others = [
        probe for probe in report.probes if probe.counts_as is ProbeResult.DIFFERENT and len(probe.indices) in inside
    ]
    names = dict.fromkeys(filter(None, map(_failure_name, others)))
    return f"fails in another way ({', '.join(names)})" if names else "fails in another way"


def _failure_name(probe: ProbeReport) -> str | None:
    """Return the exception class or the cause of a failed test run, or None if neither is known."""
    exception = _EXCEPTION.search(probe.summary)
    return exception[0] if exception else probe.cause


def _zone_span(subject: Subject, zone: Zone, last: Zone) -> str:
    low, high = (_short_value(subject, length) for length in (zone.start, zone.stop - 1))
    if zone.start == 0:
        return f"up to {high}"
    return f"from {low}" if zone is last else f"at {low}" if low == high else f"from {low} to {high}"


def _short_value(subject: Subject, length: int) -> str:
    whole = value_below(subject, length)
    return whole.partition(" ")[0] if subject.form is SubjectForm.COMMIT else whole


def _rate_interval(bad: int, judged: int) -> str:
    low, high = interval(bad, judged)
    return f"{low:.0%} to {high:.0%}".replace("%", " %")


def _percent(share: float) -> str:
    return f"{min(max(round(share * 100), 1), 99)} %"


_MAX_NAMED = 20  # after the first commit, at most this many possible commits are listed
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception)\b")
_WITHOUT_CULPRIT = (AnswerKind.NONE, AnswerKind.INDEPENDENT)
_EXACT = (AnswerKind.SINGLE, AnswerKind.RANGE, AnswerKind.SET)
PURPOSES = {
    Purpose.EACH: "each value",
    Purpose.GALLOP: "doubling",
    Purpose.RIGHT_EDGE: "right edge",
    Purpose.LEFT_EDGE: "left edge",
    Purpose.ENDS_ONLY: "only both ends",
    Purpose.WITHOUT_MIDDLE: "without the middle",
    Purpose.ELSEWHERE: "another set",
    Purpose.REDUCE: "smallest set",
    Purpose.REPEAT: "repeat",
    Purpose.AS_MANY: "proof: same size",
    Purpose.ONE_FEWER: "proof: one less",
    Purpose.RECHECK_GOOD: "both ends again",
    Purpose.RECHECK_BAD: "both ends again",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A piece of text with a label, such as the elapsed time with the label "took"."""

    label: str
    texts: tuple[str, ...]
    is_command: bool = False  # the text is a command to copy


def facts(report: BisectReport) -> Iterator[Fact]:
    """Yield the facts that all output files show below the answer of a bisection, in reading order."""
    answer, fails = report.answer, failure_verb(report.signature)
    open_ = answer.kind is AnswerKind.UNDECIDED
    commands = ((fails, report.commands.bad), ("passes", report.commands.good), ("alone", report.commands.alone))
    yield from (Fact(label=label, texts=(text,), is_command=True) for label, text in commands if text)
    text_by_label = {
        "note": ("interrupted: only the probes above were launched",) if report.interrupted else (),
        "rate": (failure_rate_text(report),),
        "proof": tuple(proven_claims(report)),
        "results": (zones_text(report),),
        "why": (answer.why,) if open_ or answer.kind in _WITHOUT_CULPRIT else (),
        "unusable": (_unjudged_text(report),) if open_ else (),
        "do": (advice(report),) if open_ or answer.kind is AnswerKind.NONE else (),
        "place": (" · ".join(place_parts(report)),) if answer.kind is not AnswerKind.NONE else (),
        "took": (effort_text(report),),
        "scope": (f"{report.what}; other configurations were not tried",) if report.what and not open_ else (),
        "not tried": (" · ".join(report.not_covered),),
    }
    for label, texts in text_by_label.items():
        if shown_texts := tuple(filter(None, texts)):
            yield Fact(label=label, texts=shown_texts)


def _unjudged_text(report: BisectReport) -> str:
    unjudged_count = sum(probe.counts_as is ProbeResult.UNRESOLVED for probe in report.probes)
    other = sum(probe.counts_as is ProbeResult.DIFFERENT for probe in report.probes)
    counts = ((unjudged_count, " not judged"), (other, " with another failure"))
    return " · ".join(f"{words.plural(count, 'probe')}{suffix}" for count, suffix in counts if count)


def step_time_text(step_s: float) -> str:
    """Return a step time as text, such as "12.4 ms"."""
    return f"{step_s * 1000:.3g} ms" if step_s < 0.9995 else words.seconds(step_s)


def slow_limit_text(slow_from_s: float, baseline_s: Sequence[float]) -> str:
    """Return which step times count as slow, compared with those of the runs with the good configuration."""
    took = f"{step_time_text(min(baseline_s))} to {step_time_text(max(baseline_s))}"
    runs = words.plural(len(baseline_s), "run")
    return f"a step of {step_time_text(slow_from_s)} or more counts as slow; in {runs} of the good end it takes {took}"


def _step_times(report: BisectReport) -> Iterator[str]:
    """Yield a sentence about the step times with the failing and the passing configuration."""
    texts = []
    for subset in (report.answer.failing, report.answer.passing):
        spans = None if subset is None else spans_of(subset)
        steps_s = [probe.step_s for probe in report.probes if probe.subset == spans and probe.step_s is not None]
        if subset is not None and steps_s:
            texts.append(f"{step_time_text(median(steps_s))} with {report.subject.describe(subset)}")
    if texts:
        yield f"a step takes {', '.join(texts)}"


def place_parts(report: BisectReport) -> tuple[str, ...]:
    """Return the module, source line and ranks at which the program failed, as text."""
    probe = failing_probe(report)
    if probe is None or (report.signature is not None and report.signature.verdict == SLOW):
        return ()
    ranks_text = words.ranks(probe.culprits) if probe.culprits else ""
    details = ", ".join(part for part in (ranks_text, probe.phase or "") if part)
    place = probe.place
    parts = (place.module, words.place_name(place), place.function) if place else ()
    return tuple(part for part in (*parts, details) if part)


def failing_probe(report: BisectReport) -> ProbeReport | None:
    """Return the last test run that shows the failure, preferably one that was not stopped early, or None."""
    bad = [probe for probe in report.probes if probe.counts_as is ProbeResult.BAD]
    bad = [probe for probe in bad if not probe.early] or bad
    spans = None if report.answer.failing is None else spans_of(report.answer.failing)
    exact = [probe for probe in bad if probe.subset == spans]
    return next(reversed(exact or bad), None)


def proven_claims(report: BisectReport) -> Iterator[str]:
    """Yield claims that the test runs prove, such as "with layer 7 it hangs: 3 of 3 under torchrun"."""
    answer, verb = report.answer, failure_verb(report.signature)
    if answer.kind is AnswerKind.UNDECIDED or answer.kind in _WITHOUT_CULPRIT:
        return
    yield from _step_times(report)
    if answer.kind is AnswerKind.CHOICE:
        yield from _each_value(report, verb)
        return
    groups = answer.groups or ((answer.failing,) if answer.failing is not None else ())
    yield from (_claim(report, group, ProbeResult.BAD, verb) for group in groups)
    rests = [] if answer.passing is None else [answer.passing]
    if report.subject.in_a_row:  # what remains without a range is several ranges
        proofs = [probe for probe in report.probes if probe.purpose is Purpose.PROOF_GOOD]
        rests += [probe.indices for probe in proofs if probe.counts_as is ProbeResult.GOOD]
    yield from (_claim(report, rest, ProbeResult.GOOD, "passes") for rest in dict.fromkeys(rests))
    dropped_subsets = {probe.subset for probe in report.probes if probe.purpose is Purpose.DROP_ONE}
    if dropped_subsets:
        good = {p.subset for p in report.probes if p.subset in dropped_subsets and p.counts_as is ProbeResult.GOOD}
        yield f"without any one of these items it passes: {len(good)} of {len(dropped_subsets)} tested"
    if answer.why:
        yield answer.why


def _each_value(report: BisectReport, verb: str) -> Iterator[str]:
    answer = report.answer
    for index in range(len(report.subject.items)):
        if index in answer.items:
            yield _claim(report, (index,), ProbeResult.BAD, verb)
        elif index not in answer.open:
            yield _claim(report, (index,), ProbeResult.GOOD, "passes")
        else:
            yield f"{report.subject.describe((index,))}: not decided"
    if answer.why:
        yield answer.why


def advice(report: BisectReport) -> str:
    """Return advice for the user if the bisection found no answer."""
    if report.answer.kind is AnswerKind.NONE:
        return "to find a rarer failure, launch it more often with --confidence 0.95 or higher"
    results = {probe.counts_as for probe in report.probes}
    good_ends = [probe for probe in report.probes if probe.purpose is Purpose.CONTROL_GOOD]
    if good_ends and good_ends[-1].counts_as is not ProbeResult.GOOD and not report.interrupted:
        if good_ends[-1].verdict == Status.PASS:
            return "let the program make at least three optimizer steps; with fewer its step time is unknown"
        return f"choose a good end that passes; this one does not: {good_ends[-1].summary}"
    if report.interrupted:
        return "give the same command again: finished probes are not repeated"
    if ProbeResult.UNRESOLVED in results:
        return "find out why probes could not be judged (see their remarks), then give the same command again"
    if ProbeResult.DIFFERENT in results:
        return "fix the other failure first, or count it as well with --outcome any"
    return "give the same command again with a larger --budget, or with --repeat"


def _claim(report: BisectReport, subset: Collection[int], counts_as: ProbeResult, verb: str) -> str:
    """Return a count of runs with the expected result, such as "with layer 7 it hangs: 3 of 3"."""
    spans = spans_of(subset)
    probes = [probe for probe in report.probes if probe.subset == spans]
    early = sum(probe.early for probe in probes)
    whole = [probe for probe in probes if not probe.early]
    with_result = [probe for probe in whole if probe.counts_as is counts_as]
    launchers = sorted({probe.launcher for probe in with_result})
    under = f" under {' and '.join(launchers)}" if launchers else ""
    configuration = report.subject.describe(subset)
    more = f", {early} more stopped early in the same wait" if early else ""
    return (
        f"with {configuration} it {verb}: {len(with_result)} of {len(whole)}{under}{more}"
        if whole
        else f"{configuration}: not launched on its own"
    )
