"""Words for a bisection: what was asked, what each probe showed, what was found, and how sure that is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from statistics import median

from nsa_harness.core.bisect.question import CONTROLS, AnswerKind, CountsAs, Purpose, SearchAnswer, last_place, spans_of
from nsa_harness.core.bisect.report import BisectReport, ProbeReport
from nsa_harness.core.bisect.signature import SLOW, Signature, line_word, same
from nsa_harness.core.bisect.subject import ENV, PACKAGE, Config, Form, Subject, layer_spans, override_word
from nsa_harness.core.bisect.subject import plural as plural
from nsa_harness.core.report import Status
from nsa_harness.core.scenario.yaml_tree import Plain
from nsa_harness.render import words

SEARCHING = (Purpose.RIGHT_EDGE, Purpose.LEFT_EDGE)
GC_LAYERS = "gc.layers"


def question(report: BisectReport) -> str:
    """ "which checkpointed layers make it HANG?"."""
    subject = report.subject
    fail = "fail" if report.signature is None else report.signature.verdict  # once one was seen
    does_it = "is it slow" if fail == SLOW else f"does it {fail}"
    nouns = plural(subject.noun)
    match subject.form:
        case Form.LAYERS if subject.key == GC_LAYERS:
            return f"which checkpointed layers make it {fail}?"
        case Form.VALUE:
            return f"from which {subject.noun} on {does_it}?"
        case Form.COMMIT:
            return f"since which {subject.noun} {does_it}?"
        case Form.PARTS:
            return f"which {nouns} of the attention make it {fail}?"
        case Form.KEYS | Form.FILE:
            return f"which of {counted(len(subject.items), subject.noun)} make it {fail}?"
    return f"which {nouns} make it {fail}?"


def fails_word(signature: Signature | None) -> str:
    """The verb: "hangs", "fails" or "is slow"."""
    if signature is not None and signature.verdict == SLOW:
        return "is slow"
    return "hangs" if signature is not None and signature.verdict == Status.HANG else "fails"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else plural(noun)}"


def span(subject: Subject, open_: tuple[int, int]) -> str:
    """The items that are open, in few signs: "[4,9)", "7", "(64, 128]"; names by their numbers from 1."""
    first, stop = open_
    if stop <= first:
        return "none"
    if subject.form is Form.VALUE:
        return f"({value_before(subject, first)}, {subject.label(stop - 1)}]"
    if subject.form is Form.LAYERS:
        low, high = subject.label(first), subject.items[stop - 1]
        return low if stop - first == 1 else f"[{low},{int(str(high)) + 1})"
    return str(first + 1) if stop - first == 1 else f"{first + 1}-{stop}"


def value_before(subject: Subject, place: int) -> str:
    """The value below the item: the one before it, or that of the good end."""
    if place > 0:
        return subject.label(place - 1)
    return subject.good if isinstance(subject.good, str) else "none" if subject.good is None else f"{subject.good}"


def last_value(subject: Subject, probe: ProbeReport) -> str:
    """Of items in order: the value that was asked."""
    last = last_place(probe.subset)
    return value_before(subject, 0) if last is None else subject.label(last)


def headline(report: BisectReport) -> str:
    """The answer in a few words: "layer 7 alone", "layers 3 and 8 together", "any 5 layers"."""
    subject, answer = report.subject, report.answer
    match answer.kind:
        case AnswerKind.SINGLE:
            return f"{named(subject, answer.items)} alone"
        case AnswerKind.RANGE:
            return f"{named(subject, range(*answer.items))}, all of them together"
        case AnswerKind.SET:
            return f"{named(subject, answer.items)}, only together"
        case AnswerKind.SEVERAL:
            return f"{'; '.join(named(subject, group) for group in answer.groups)}: each is enough"
        case AnswerKind.THRESHOLD:
            return _threshold(subject, answer.items[0])
        case AnswerKind.COUNT:
            count = answer.items[0]
            return f"any {counted(count, subject.noun)}, whichever {'it is' if count == 1 else 'they are'}"
        case AnswerKind.CHOICE:
            fine = [place for place in range(len(subject.items)) if place not in (*answer.items, *answer.open)]
            return named(subject, answer.items) + (f", not {named(subject, fine)}" if fine else "")
        case AnswerKind.INDEPENDENT:
            return "it does not depend on what was varied"
        case AnswerKind.NONE:
            return "nothing to bisect"
        case AnswerKind.UNDECIDED:
            return f"not decided: {open_word(report)}"


def sentence(report: BisectReport) -> str:
    """The answer in one sentence."""
    verb, answer = fails_word(report.signature), report.answer
    match answer.kind:
        case AnswerKind.NONE:
            return f"There is nothing to bisect: {answer.why or 'both ends end the same way'}."
        case AnswerKind.INDEPENDENT:
            return f"It does not depend on what was varied: {answer.why}."
        case AnswerKind.UNDECIDED:
            return f"It is not decided: {answer.why or open_word(report)}."
        case AnswerKind.THRESHOLD if report.subject.form is Form.COMMIT:
            return f"It {verb} since {report.subject.label(answer.items[0] - 1)}."
    return f"It {verb} with {headline(report)}."


def sureness(answer: SearchAnswer) -> str:
    """ "certain", or a number: "97 % sure"; nothing for what is not decided."""
    if answer.kind is AnswerKind.UNDECIDED:
        return ""
    if answer.confidence >= 1:
        return words.certainty(answer.confidence)
    return f"{_percent(answer.confidence)} sure"


def how_often(report: BisectReport) -> str:
    """Of a flaky answer: "hangs in about 50 % of runs"."""
    rate = report.answer.p_bad
    return "" if rate is None else f"{fails_word(report.signature)} in about {_percent(rate)} of runs"


def effort(report: BisectReport) -> str:
    """ "4 search probes · 9 probes and 54 s in all"."""
    search = words.plural(report.search_probes, "search probe")
    return f"{search} · {words.plural(len(report.probes), 'probe')}, {words.seconds(report.wall_s)} in all"


def setting_word(report: BisectReport) -> str:
    """The answer as it is set: "NSA_GC_RANGE=7:8", "gc.mode: reentrant instead of non_reentrant"; empty elsewhere."""
    subject, failing = report.subject, report.answer.failing
    if report.answer.kind not in _EXACT or not failing:
        return ""
    if subject.keyed:
        return "; ".join(item_word(subject, place) for place in sorted(failing))
    if subject.key != GC_LAYERS:
        return ""
    numbers = sorted(int(str(subject.items[place])) for place in failing)
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"NSA_GC_RANGE={numbers[0]}:{numbers[-1] + 1}"
    return f"NSA_GC_LAYERS={','.join(map(str, numbers))}"


def open_word(report: BisectReport) -> str:
    """ "layers 6-11 [6:12] are still open"; of a search that was cut short what its last probe left."""
    narrowed = [range(*left_open(probe, report)) for probe in report.probes if probe.purpose in SEARCHING]
    places = report.answer.open or (narrowed[-1] if narrowed else range(len(report.subject.items)))
    if report.subject.ordered:
        return f"{report.subject.key} {span(report.subject, (min(places), max(places) + 1))} is still open"
    return f"{named(report.subject, places)} {'is' if len(places) == 1 else 'are'} still open"


def left_open(probe: ProbeReport, report: BisectReport) -> tuple[int, int]:
    """What the answer of one probe leaves open, where one answer decides."""
    flaky = report.answer.p_bad is not None or any(one.purpose is Purpose.REPEAT for one in report.probes)
    if flaky or probe.counts_as not in (CountsAs.GOOD, CountsAs.BAD):
        return probe.open
    inside = set(range(*probe.open))
    left = inside & probe.places if probe.counts_as is CountsAs.BAD else inside - probe.places
    return (min(left), max(left) + 1) if left else probe.open


def named(subject: Subject, places: Collection[int]) -> str:
    """Items for people: "layers 4-8 [4:9]", "variable NCCL_P2P_DISABLE", "keys gc.mode and train.batch"."""
    ordered = sorted(places)
    if subject.form is Form.LAYERS:
        numbers = [int(str(subject.items[place])) for place in ordered]
        return f"{subject.noun if len(ordered) == 1 else plural(subject.noun)} {layer_spans(numbers)}"
    noun = subject.noun if len(ordered) == 1 else plural(subject.noun)
    return f"{noun} {_listed([subject.label(place) for place in ordered])}"


def item_word(subject: Subject, place: int) -> str:
    """One item, with what it is set to and what it is otherwise."""
    name = subject.label(place)
    if not subject.keyed:
        return name
    good, bad = subject.good_values[place], subject.bad_values[place]
    if str(subject.items[place]).startswith(PACKAGE):
        return f"{name} {'away' if bad is None else bad} instead of {'away' if good is None else good}"
    if str(subject.items[place]).startswith(ENV):
        return f"{name}={bad}" if good is None else f"{name}={bad} instead of {good}"
    return f"{name}: {'not set' if bad is None else shown(bad)} instead of {'not set' if good is None else shown(good)}"


def shown(value: Plain) -> str:
    return override_word("", value)[1:]


def config_words(config: Config) -> str:
    """ "gc.layers=4:9"; for a configuration that changes nothing "nothing set"."""
    return " ".join(override_word(key, value) for key, value in config.items()) or "nothing set"


def purpose_word(subject: Subject, probe: ProbeReport) -> str:
    """What a probe was for, where it did not narrow the search."""
    match probe.purpose:
        case Purpose.CONTROL_GOOD | Purpose.CONTROL_BAD:
            return "control"
        case Purpose.ALONE:
            return f"shape: {_few(subject, sorted(probe.places))} alone"
        case Purpose.DROP_ONE:
            missing = sorted(set(range(*probe.open)) - probe.places)
            return f"proof: without {_few(subject, missing)}" if len(missing) == 1 else "proof: one removed"
        case Purpose.PROOF_BAD | Purpose.PROOF_GOOD:
            return f"proof, {probe.launcher}"
    return _PURPOSES[probe.purpose]


def round_word(purpose: Purpose) -> str:
    """What runs now, where it does not narrow the search."""
    if purpose in CONTROLS:
        return "controls first"
    return _PURPOSES.get(purpose, "shape" if purpose is Purpose.ALONE else "proof").partition(":")[0]


def _threshold(subject: Subject, length: int) -> str:
    place = length - 1
    if subject.form is Form.COMMIT:
        return f"{subject.noun} {subject.label(place)} is the first one"
    if subject.ordered:
        return f"{subject.noun} {subject.label(place)} and above, not {value_before(subject, place)}"
    return f"the first {counted(length, subject.noun)}"


def _few(subject: Subject, places: Sequence[int]) -> str:
    """Items in a narrow column: numbers, or names where they are short."""
    if subject.form is Form.LAYERS:
        shorter = layer_spans([int(str(subject.items[place])) for place in places])
        return shorter if len(shorter) <= 8 else f"{len(places)}"
    return ", ".join(str(place + 1) for place in places) if len(places) <= 3 else f"{len(places)}"


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else "none"


def _percent(share: float) -> str:
    """Never 100 % of what is not certain, and never 0 % of what was seen."""
    return f"{min(max(round(share * 100), 1), 99)} %"


_EXACT = (AnswerKind.SINGLE, AnswerKind.RANGE, AnswerKind.SET)
_PURPOSES = {
    Purpose.EACH: "each value",
    Purpose.GALLOP: "gallop",
    Purpose.RIGHT_EDGE: "right edge",
    Purpose.LEFT_EDGE: "left edge",
    Purpose.ENDS_ONLY: "shape: ends only",
    Purpose.WITHOUT_MIDDLE: "shape: no middle",
    Purpose.ELSEWHERE: "shape: others",
    Purpose.REDUCE: "smallest set",
    Purpose.REPEAT: "repeat",
    Purpose.AS_MANY: "proof: as many",
    Purpose.ONE_FEWER: "proof: one fewer",
    Purpose.RECHECK_GOOD: "both ends again",
    Purpose.RECHECK_BAD: "both ends again",
}


def remark(report: BisectReport, probe: ProbeReport) -> str:
    """What stands beside a verdict: whether it is the failure that is sought, or why it could not be judged."""
    pace = "" if probe.step_s is None else f"{pace_word(probe.step_s)} a step"
    parts = [pace, _same(report, probe), _how_many(report, probe)]
    return "   ".join(part for part in parts if part)


def pace_word(step_s: float) -> str:
    """ "12.4 ms"; from a second on as any other time."""
    return f"{step_s * 1000:.3g} ms" if step_s < 0.9995 else words.seconds(step_s)


def slow_word(slow_from_s: float, baseline_s: Sequence[float]) -> str:
    """Where slow begins, and why there; `baseline_s` is a step of each run of the good end."""
    took = f"{pace_word(min(baseline_s))} to {pace_word(max(baseline_s))}"
    runs = words.plural(len(baseline_s), "run")
    return f"slow is a step of {pace_word(slow_from_s)} or more: it takes {took} in {runs} of the good end"


def _paces(report: BisectReport) -> Iterator[str]:
    """What a step takes with the answer and without."""
    found = []
    for subset in (report.answer.failing, report.answer.passing):
        spans = None if subset is None else spans_of(subset)
        took = [one.step_s for one in report.probes if one.subset == spans and one.step_s is not None]
        if subset is not None and took:
            found.append(f"{pace_word(median(took))} with {report.subject.describe(subset)}")
    if found:
        yield f"a step takes {', '.join(found)}"


def place_line(report: BisectReport) -> tuple[str, ...]:
    """Where the failure stands: module, source line, and who; of the last probe that showed it."""
    probe = failing_probe(report)
    if probe is None or (report.signature is not None and report.signature.verdict == SLOW):
        return ()
    who = words.ranks(probe.culprits) if probe.culprits else ""
    details = ", ".join(part for part in (who, probe.phase or "") if part)
    place = probe.place
    known = (place.module, words.place_name(place), place.function) if place else ()
    return tuple(part for part in (*known, details) if part)


def failing_probe(report: BisectReport) -> ProbeReport | None:
    """The last probe of the configuration that fails, else the last one that failed so."""
    found = [probe for probe in report.probes if probe.counts_as is CountsAs.BAD]
    spans = None if report.answer.failing is None else spans_of(report.answer.failing)
    exact = [probe for probe in found if probe.subset == spans]
    return next(reversed(exact or found), None)


def proven(report: BisectReport) -> Iterator[str]:
    """What the probes show of the answer, each claim with how often, and what nobody asked."""
    answer, verb = report.answer, fails_word(report.signature)
    if answer.kind in (AnswerKind.NONE, AnswerKind.INDEPENDENT, AnswerKind.UNDECIDED):
        return
    yield from _paces(report)
    if answer.kind is AnswerKind.CHOICE:
        yield from _each_value(report, verb)
        return
    groups = answer.groups or ((answer.failing,) if answer.failing is not None else ())
    yield from (_claim(report, group, CountsAs.BAD, verb) for group in groups)
    if answer.passing is not None:
        yield _claim(report, answer.passing, CountsAs.GOOD, "passes")
    dropped = {probe.subset for probe in report.probes if probe.purpose is Purpose.DROP_ONE}
    if dropped:
        good = {p.subset for p in report.probes if p.subset in dropped and p.counts_as is CountsAs.GOOD}
        yield f"without one member it passes: {len(good)} of {len(dropped)} asked"
    if answer.why:
        yield answer.why


def _each_value(report: BisectReport, verb: str) -> Iterator[str]:
    answer = report.answer
    for place in range(len(report.subject.items)):
        if place in answer.items:
            yield _claim(report, (place,), CountsAs.BAD, verb)
        elif place not in answer.open:
            yield _claim(report, (place,), CountsAs.GOOD, "passes")
        else:
            yield f"{report.subject.describe((place,))}: open"
    if answer.why:
        yield answer.why


def where_proven(report: BisectReport) -> str:
    return f"proven at {report.what}" if report.what else ""


def what_decides(report: BisectReport) -> str:
    """What would decide an answer that is open."""
    causes = {probe.counts_as for probe in report.probes}
    good_ends = [probe for probe in report.probes if probe.purpose is Purpose.CONTROL_GOOD]
    if good_ends and good_ends[-1].counts_as is not CountsAs.GOOD and not report.interrupted:
        if good_ends[-1].verdict == Status.PASS:
            return "let the program do three optimizer steps or more: with fewer it has no time a step"
        return f"name a good end that passes; this one: {good_ends[-1].summary}"
    if report.interrupted:
        return "give the same command again: finished probes are not repeated"
    if CountsAs.UNRESOLVED in causes:
        return "look at the probes that could not be judged; when they can, give the same command again"
    if CountsAs.DIFFERENT in causes:
        return "mend the other failure first, or let it count: --outcome any"
    return "give the same command again with a larger --budget, or with --repeat"


def _same(report: BisectReport, probe: ProbeReport) -> str:
    if probe.counts_as is CountsAs.UNRESOLVED:
        if probe.verdict == Status.PASS:
            return "not judged: fewer than two optimizer steps were seen, so it has no time a step"
        reason = "could not be launched" if probe.verdict is None else "not judged"
        return f"{reason}: {probe.summary}" if probe.summary else reason
    if probe.counts_as is CountsAs.DIFFERENT:
        return f"another failure: {probe.cause or 'cause not known'}, {probe.summary}"
    if probe.counts_as is CountsAs.GOOD:
        return ""
    if report.signature is not None and report.signature.verdict == SLOW:
        return "slow"
    seen_before = any(other.n < probe.n and other.counts_as is CountsAs.BAD for other in report.probes)
    if probe.purpose in CONTROLS or not seen_before:
        return _where(probe)
    seen = Signature(verdict=probe.verdict or "", cause=probe.cause, place=line_word(probe.place))
    return "same" if report.signature is None or same(seen, report.signature) else f"counts too: {seen}"


def _where(probe: ProbeReport) -> str:
    layer = probe.place.layer if probe.place else None
    parts = (probe.phase, None if layer is None else f"layer {layer}", probe.cause if layer is None else None)
    return ", ".join(part for part in parts if part)


def _how_many(report: BisectReport, probe: ProbeReport) -> str:
    """ "2 of 3": so often this configuration has ended so, of the times it was asked up to here."""
    alike = [other for other in report.probes if other.subset == probe.subset and other.n <= probe.n]
    so = sum(other.counts_as is probe.counts_as for other in alike)
    return f"{so} of {len(alike)}" if len(alike) > 1 else ""


def _claim(report: BisectReport, subset: Collection[int], counts_as: CountsAs, verb: str) -> str:
    """ "with layer 7 it hangs: 3 of 3 under torchrun"."""
    spans = spans_of(subset)
    asked = [probe for probe in report.probes if probe.subset == spans]
    so = [probe for probe in asked if probe.counts_as is counts_as]
    launchers = sorted({probe.launcher for probe in so})
    under = f" under {' and '.join(launchers)}" if launchers else ""
    what = report.subject.describe(subset)
    return f"with {what} it {verb}: {len(so)} of {len(asked)}{under}" if asked else f"{what}: not run by itself"
