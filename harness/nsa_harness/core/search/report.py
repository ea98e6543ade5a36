"""The report of a bisection: the question, each probe, the answer, and the commands that show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.experiment.trial import Signature
from nsa_harness.core.plan import Launcher
from nsa_harness.core.report import HangKind, MachineFacts, Outcome, Place
from nsa_harness.core.search.question import AnswerKind, ProbeResult, Purpose, SearchAnswer, Spans, Subset, indices_in
from nsa_harness.core.search.subject import Subject


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """One probe: its configuration and purpose, and its result."""

    n: int  # from 1, in the order of the requests
    subset: Spans  # places in Subject.items that are switched on
    purpose: Purpose
    open: tuple[int, int]  # the items that were still open before it, half-open
    left: int  # the most probes still to come, before it was launched
    in_full: bool  # requested under torchrun with the full limits: a fork cannot answer it
    launcher: str  # torchrun, fork or plain; none where it could not be launched
    verdict: str | None  # None: it could not be launched, or was ended early
    kind: HangKind | None
    cause: str | None
    summary: str  # one sentence; for a configuration that cannot be launched, why
    place: Place | None
    culprits: tuple[int, ...]  # ranks
    phase: str | None
    counts_as: ProbeResult
    wall_s: float
    longest_quiet_s: float | None  # of any rank; None: not observed
    dir: str | None  # of the attempt, relative to the run directory
    spec_hash: str | None
    early: bool = False  # ended before a verdict, in a wait that was proven to hang before; it counts as bad
    started_s: float | None = None  # on the clock of the search, which stops between its sessions; None: not stored
    step_s: float | None = None  # of the slowest rank; None: slow is not sought, or fewer than two steps were done

    @property
    def indices(self) -> Subset:
        return indices_in(self.subset)

    @property
    def was_launched(self) -> bool:
        return self.verdict is not None or self.early


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The commands to type in the working directory; None: there is no such configuration."""

    bad: str | None
    good: str | None
    alone: str | None  # the failing configuration without the harness: torchrun and a script in repro/


@dataclass(frozen=True, kw_only=True)
class SearchDetail:
    """The keys below "detail" in bisect.json."""

    run_id: str
    harness: str  # version
    machine: MachineFacts
    command: str  # as the user typed it
    scenario: str
    what: str  # "2 ranks · gloo · shape ci (12 layers, dim 128, T 256, fp32)"
    subject: Subject
    search_probes: int  # number of probes without controls and proofs
    wall_s: float  # sum over all probes
    interrupted: bool
    notes: tuple[str, ...]  # choices made on the user's behalf
    not_covered: tuple[str, ...]
    answer: SearchAnswer


@dataclass(frozen=True, kw_only=True)
class BisectReport(SearchDetail):
    signature: Signature | None  # None until a failure was seen
    probes: tuple[ProbeReport, ...]
    commands: Commands
    floor_probes: int  # the least probes that any search needs: log2 of the possible answers

    @property
    def elapsed_s(self) -> float:
        """The time that the user waited, from the start of the first probe to the end of the last one."""
        starts_s = [probe.started_s for probe in self.probes if probe.started_s is not None]
        return ended_s(self.probes) - min(starts_s) if len(starts_s) == len(self.probes) > 0 else self.wall_s


def ended_s(probes: Iterable[ProbeReport]) -> float:
    """Return the time on the clock of the search after these probes."""
    return max((probe.started_s + probe.wall_s for probe in probes if probe.started_s is not None), default=0.0)


def with_outcome(probe: ProbeReport, outcome: Outcome) -> ProbeReport:
    """Return the probe with the verdict and the details of its launch's outcome."""
    culprit, verdict = outcome.culprit, outcome.verdict
    gaps_s = [vital.longest_gap_s for vital in outcome.rank_summaries if vital.longest_gap_s is not None]
    return replace(
        probe,
        verdict=verdict.status.value,
        kind=verdict.kind,
        cause=verdict.cause,
        summary=verdict.summary,
        place=culprit.place if culprit else None,
        culprits=culprit.ranks if culprit else (),
        phase=outcome.phase,
        wall_s=outcome.timing.wall_s,
        longest_quiet_s=max(gaps_s, default=None),
        dir=outcome.dir,
        spec_hash=outcome.spec.spec_hash,
    )


def floor_probes(answer: SearchAnswer, items: int) -> int:
    """Return the fewest probes that any search needs: the bits in an answer of this kind."""
    sizes = {
        AnswerKind.RANGE: items * (items + 1) // 2,
        AnswerKind.SET: math.comb(items, len(answer.items)),
        AnswerKind.SEVERAL: math.comb(items, len(answer.items)),
        AnswerKind.CHOICE: 1 << items,
    }
    return math.ceil(math.log2(max(1, sizes.get(answer.kind, items))))


# Forked probes that torchrun contradicts.


def contradicted_fork(new: ProbeReport, before: Sequence[ProbeReport]) -> ProbeReport | None:
    """Return a forked probe that should be launched again under torchrun; None: the launcher explains nothing here.

    That is a forked control with the wrong result, or the forked one of two contradictory probes of which the other was
    not forked. A configuration that passed and failed under one launcher is never returned.
    """
    repeats = [probe for probe in before if (probe.subset, probe.launcher) == (new.subset, new.launcher)]
    if any(probe.counts_as is not new.counts_as for probe in repeats):
        return None
    is_forked = new.launcher == Launcher.FORK
    if is_forked and _EXPECTED_RESULT.get(new.purpose, new.counts_as) is not new.counts_as:
        return new
    candidates = (probe for probe in before if probe.n != new.n and (probe.launcher == Launcher.FORK) is not is_forked)
    contradicting = next((probe for probe in candidates if _contradict(probe, new) or _contradict(new, probe)), None)
    return new if contradicting is not None and is_forked else contradicting


def without_forks(probes: Iterable[ProbeReport]) -> list[ProbeReport]:
    """Return the probes with every forked probe unresolved, because forks of this program behave differently."""
    reason = "a fork does not show here what torchrun does"
    return [
        replace(probe, counts_as=ProbeResult.UNRESOLVED, summary=reason) if probe.launcher == Launcher.FORK else probe
        for probe in probes
    ]


_EXPECTED_RESULT = {Purpose.CONTROL_GOOD: ProbeResult.GOOD, Purpose.CONTROL_BAD: ProbeResult.BAD}


def _contradict(larger: ProbeReport, smaller: ProbeReport) -> bool:
    """Whether one configuration both passed and failed, or a failing one passes with more items."""
    if ProbeResult.UNRESOLVED in (larger.counts_as, smaller.counts_as) or "none" in (larger.launcher, smaller.launcher):
        return False
    if larger.subset == smaller.subset:
        return larger.counts_as is not smaller.counts_as
    answers = (larger.counts_as, smaller.counts_as)
    return answers == (ProbeResult.GOOD, ProbeResult.BAD) and smaller.indices <= larger.indices
