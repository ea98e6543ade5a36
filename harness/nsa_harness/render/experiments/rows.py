"""The rows of a search: what each probe asked and what it showed, for every picture of it to lay out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.experiment.signature import SLOW, Signature, line_word, same
from nsa_harness.core.report import Status
from nsa_harness.core.search.question import CONTROLS, CountsAs, Purpose, Round, Subset
from nsa_harness.core.search.report import BisectReport, ProbeReport
from nsa_harness.core.search.subject import Form, Subject, layer_spans
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.texts import words

ON, OFF, PARTLY = "■", "·", "▒"
NO_VERDICT, EARLY = "none", "wait"

Next = Round | ProbeReport  # what is asked after a probe


@dataclass(frozen=True, kw_only=True)
class Row:
    """One probe in words. Of what was not launched neither the items nor the time are shown."""

    n: int
    step: str  # "[0,12) → [6,12)" where it narrows the search, else what it was for
    why: str  # "right edge, fork"
    chosen: Subset  # the items that were switched on
    open: tuple[int, int]  # those still open before it
    value: str  # of items in order the one that was asked; else empty
    config: str
    launched: bool
    verdict: str  # EARLY where it was ended before one, NO_VERDICT where there is none
    counts_as: CountsAs
    took: str
    remark: str  # whether it is the failure that is sought, or why it could not be judged
    dir: str | None

    def signs(self, pools: Sequence[range]) -> list[str]:
        """One for each column of items."""
        return [sign([place in self.chosen for place in pool]) for pool in pools]

    @property
    def title(self) -> str:
        """All of it in a line."""
        parts = (f"probe {self.n}", self.step, self.config, self.verdict, self.took, self.value, self.remark)
        return " · ".join(filter(None, parts))


def rows(report: BisectReport) -> Iterator[Row]:
    for index, probe in enumerate(report.probes):
        # Probes of one round stand together; the first of another says what this one has left.
        following = (other for other in report.probes[index + 1 :] if _round(other) != _round(probe))
        yield row(report, probe, next(following, None))


def row(report: BisectReport, probe: ProbeReport, following: Next | None) -> Row:
    """`following` is what is asked next, None where nothing is or where nobody knows yet."""
    subject = report.subject
    return Row(
        n=probe.n,
        step=_step(report, probe, following),
        why=f"{probe.purpose.value.replace('_', ' ')}, {probe.launcher}",
        chosen=probe.places,
        open=probe.open,
        value=bisect_words.last_value(subject, probe) if subject.ordered else "",
        config=bisect_words.config_words(subject.config(probe.places)),
        launched=probe.launched,
        verdict=EARLY if probe.early else probe.verdict or NO_VERDICT,
        counts_as=probe.counts_as,
        took=words.seconds(probe.wall_s) if probe.launched else "",
        remark=", ".join(filter(None, (_pace(probe), _showed(report, probe), _how_many(report, probe)))),
        dir=probe.dir,
    )


def pooled(count: int, most: int) -> tuple[range, ...]:
    """The items of each of at most so many columns: one where they fit, else as few as do."""
    size = max(1, -(-count // most))
    return tuple(range(start, min(start + size, count)) for start in range(0, count, size))


def sign(on: Sequence[bool]) -> str:
    return ON if all(on) else PARTLY if any(on) else OFF


def _round(probe: ProbeReport) -> tuple[Purpose, tuple[int, int], int]:
    return probe.purpose, probe.open, probe.left


def _step(report: BisectReport, probe: ProbeReport, following: Next | None) -> str:
    subject = report.subject
    if probe.purpose not in bisect_words.SEARCHING:
        return _purpose(subject, probe)
    before = bisect_words.span(subject, probe.open)
    # The round that follows says what is left; after the last one of a search, its own answer does.
    goes_on = following is not None and following.purpose is probe.purpose and _inside(following.open, probe.open)
    left = following.open if following is not None and goes_on else bisect_words.left_open(probe, report)
    after = bisect_words.span(subject, left)
    return before if after == before else f"{before} → {after}"


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _purpose(subject: Subject, probe: ProbeReport) -> str:
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
    return bisect_words.PURPOSES[probe.purpose]


def _few(subject: Subject, places: Sequence[int]) -> str:
    """Items in a narrow column: numbers, or names where they are short."""
    if subject.form is Form.LAYERS:
        shorter = layer_spans([int(str(subject.items[place])) for place in places])
        return shorter if len(shorter) <= 8 else f"{len(places)}"
    return ", ".join(str(place + 1) for place in places) if len(places) <= 3 else f"{len(places)}"


def _pace(probe: ProbeReport) -> str:
    return "" if probe.step_s is None else f"{bisect_words.pace_word(probe.step_s)} a step"


def _showed(report: BisectReport, probe: ProbeReport) -> str:
    if probe.early:
        return "same wait, ended early"
    if probe.counts_as is CountsAs.UNRESOLVED and probe.verdict == Status.PASS:
        return "not judged: fewer than two optimizer steps were seen, so it has no time a step"
    if probe.counts_as is CountsAs.UNRESOLVED:
        reason = "not judged" if probe.launched else "could not be launched"
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
