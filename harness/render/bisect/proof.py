"""What each probe of a bisection showed, and what all of them prove of its answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nsa_harness.core.bisect.question import CONTROLS, AnswerKind, CountsAs, Purpose
from nsa_harness.core.bisect.report import BisectTold, ProbeTold
from nsa_harness.core.bisect.signature import Signature, line_word, same
from nsa_harness.core.bisect.spans import spans_of
from nsa_harness.render import words
from nsa_harness.render.bisect.words import fails_word


def remark(told: BisectTold, probe: ProbeTold) -> str:
    """What stands beside a verdict: whether it is the failure that is sought, or why it could not be judged."""
    parts = [_same(told, probe), _how_many(told, probe)]
    return "   ".join(part for part in parts if part)


def place_line(told: BisectTold) -> tuple[str, ...]:
    """Where the failure stands: module, source line, and who; of the last probe that showed it."""
    probe = failing_probe(told)
    if probe is None:
        return ()
    who = words.ranks(probe.culprits) if probe.culprits else ""
    details = ", ".join(part for part in (who, probe.phase or "") if part)
    place = probe.place
    known = (place.module, words.place_name(place), place.function) if place else ()
    return tuple(part for part in (*known, details) if part)


def failing_probe(told: BisectTold) -> ProbeTold | None:
    """The last probe of the configuration that fails, else the last one that failed so."""
    return _last(told, CountsAs.BAD, told.answer.failing)


def passing_probe(told: BisectTold) -> ProbeTold | None:
    return _last(told, CountsAs.GOOD, told.answer.passing)


def proven(told: BisectTold) -> Iterator[str]:
    """What the probes show of the answer, each claim with how often, and what nobody asked."""
    answer, verb = told.answer, fails_word(told.sought)
    if answer.kind in (AnswerKind.NONE, AnswerKind.UNDECIDED):
        return
    groups = answer.groups or ((answer.failing,) if answer.failing is not None else ())
    yield from (_claim(told, group, CountsAs.BAD, verb) for group in groups)
    if answer.passing is not None:
        yield _claim(told, answer.passing, CountsAs.GOOD, "passes")
    dropped = {probe.subset for probe in told.probes if probe.purpose is Purpose.DROP_ONE}
    if dropped:
        good = {p.subset for p in told.probes if p.subset in dropped and p.counts_as is CountsAs.GOOD}
        yield f"without one member it passes: {len(good)} of {len(dropped)} asked"
    if answer.why:
        yield answer.why


def where_proven(told: BisectTold) -> str:
    return f"proven at {told.what}" if told.what else ""


def what_decides(told: BisectTold) -> str:
    """What would decide an answer that is open."""
    causes = {probe.counts_as for probe in told.probes}
    good_ends = [probe for probe in told.probes if probe.purpose is Purpose.CONTROL_GOOD]
    if good_ends and good_ends[-1].counts_as is not CountsAs.GOOD and not told.interrupted:
        return f"name a good end that passes; this one: {good_ends[-1].summary}"
    if told.interrupted:
        return "give the same command again: finished probes are not repeated"
    if CountsAs.UNRESOLVED in causes:
        return "look at the probes that could not be judged; when they can, give the same command again"
    if CountsAs.DIFFERENT in causes:
        return "mend the other failure first, or let it count: --outcome any"
    return "give the same command again with a larger --budget, or with --repeat"


def _same(told: BisectTold, probe: ProbeTold) -> str:
    if probe.counts_as is CountsAs.UNRESOLVED:
        reason = "could not be launched" if probe.verdict is None else "not judged"
        return f"{reason}: {probe.summary}" if probe.summary else reason
    if probe.counts_as is CountsAs.DIFFERENT:
        return f"another failure: {probe.cause or 'cause not known'}, {probe.summary}"
    if probe.counts_as is CountsAs.GOOD:
        return ""
    if probe.purpose in CONTROLS or not _earlier_bad(told, probe):
        return _where(probe)
    seen = Signature(verdict=probe.verdict or "", cause=probe.cause, place=line_word(probe.place))
    return "same" if told.sought is None or same(seen, told.sought) else f"counts too: {seen}"


def _where(probe: ProbeTold) -> str:
    layer = probe.place.layer if probe.place else None
    parts = (probe.phase, None if layer is None else f"layer {layer}", probe.cause if layer is None else None)
    return ", ".join(part for part in parts if part)


def _earlier_bad(told: BisectTold, probe: ProbeTold) -> bool:
    return any(other.n < probe.n and other.counts_as is CountsAs.BAD for other in told.probes)


def _how_many(told: BisectTold, probe: ProbeTold) -> str:
    """ "2 of 3": so often this configuration has ended so, of the times it was asked up to here."""
    alike = [other for other in told.probes if other.subset == probe.subset and other.n <= probe.n]
    so = sum(other.counts_as is probe.counts_as for other in alike)
    return f"{so} of {len(alike)}" if len(alike) > 1 else ""


def _claim(told: BisectTold, subset: Collection[int], counts_as: CountsAs, verb: str) -> str:
    """ "with layer 7 it hangs: 3 of 3 under torchrun"."""
    spans = spans_of(subset)
    asked = [probe for probe in told.probes if probe.subset == spans]
    so = [probe for probe in asked if probe.counts_as is counts_as]
    launchers = sorted({probe.launcher for probe in so})
    under = f" under {' and '.join(launchers)}" if launchers else ""
    what = told.subject.told(subset)
    return f"with {what} it {verb}: {len(so)} of {len(asked)}{under}" if asked else f"{what}: not run by itself"


def _last(told: BisectTold, counts_as: CountsAs, subset: Collection[int] | None) -> ProbeTold | None:
    found = [probe for probe in told.probes if probe.counts_as is counts_as]
    spans = None if subset is None else spans_of(subset)
    exact = [probe for probe in found if probe.subset == spans]
    return next(reversed(exact or found), None)
