"""The report of a bisection, with its question, its test runs, and its answer."""

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
    """One test run of a bisection, with its configuration, its purpose, and its result."""

    n: int  # number from 1, in the order in which the search requested the probes
    subset: Spans  # indices in Subject.items of the items that are switched on
    purpose: Purpose
    open: tuple[int, int]  # half-open range of the items that might belong to the answer before this probe
    left: int  # the largest number of probes that could follow, when this probe was launched
    in_full: bool  # must run under torchrun with the full time limits: a forked launch does not answer it
    launcher: str  # torchrun, fork or plain; none if it could not be launched
    verdict: str | None  # None: it could not be launched, or was stopped early
    kind: HangKind | None
    cause: str | None
    summary: str  # one sentence; the reason if the configuration cannot be launched
    place: Place | None
    culprits: tuple[int, ...]  # ranks
    phase: str | None
    counts_as: ProbeResult
    wall_s: float
    longest_quiet_s: float | None  # longest time without progress of any rank; None: not observed
    dir: str | None  # the attempt's directory, relative to the run directory
    spec_hash: str | None
    early: bool = False  # stopped before a verdict because it waited like an earlier, proven hang; counts as bad
    # When it was launched, on the clock of the search, which does not run while the search is interrupted. None: not
    # stored.
    started_s: float | None = None
    step_s: float | None = None  # of the slowest rank; None: not looking for slow runs, or fewer than two steps

    @property
    def indices(self) -> Subset:
        """The indices of the switched-on items in `Subject.items`."""
        return indices_in(self.subset)

    @property
    def was_launched(self) -> bool:
        """Whether the program could be launched in this configuration."""
        return self.verdict is not None or self.early


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Shell commands that reproduce the answer of a bisection. Each is None if its configuration is not known."""

    bad: str | None  # runs the failing configuration
    good: str | None  # runs the passing configuration
    alone: str | None  # runs the failing configuration without nsa-harness: torchrun with a script in repro/


@dataclass(frozen=True, kw_only=True)
class SearchDetail:
    """Everything in a bisection report except its test runs, as stored under "detail" in bisect.json."""

    run_id: str
    harness: str  # version of nsa-harness
    machine: MachineFacts
    command: str  # as the user typed it
    scenario: str
    what: str  # "2 ranks · gloo · shape ci (12 layers, dim 128, T 256, fp32)"
    subject: Subject
    search_probes: int  # number of probes without controls and proofs
    wall_s: float  # sum over all probes
    interrupted: bool
    notes: tuple[str, ...]  # decisions that nsa-harness made for the user
    not_covered: tuple[str, ...]
    answer: SearchAnswer


@dataclass(frozen=True, kw_only=True)
class BisectReport(SearchDetail):
    """The report of a bisection, whether running or finished."""

    signature: Signature | None  # the failure that counts as bad; None until the first failure
    probes: tuple[ProbeReport, ...]
    commands: Commands
    floor_probes: int  # the fewest probes that any search needs: log2 of the number of possible answers

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of the first test run to the end of the last one, without interruptions."""
        starts_s = [probe.started_s for probe in self.probes if probe.started_s is not None]
        return ended_s(self.probes) - min(starts_s) if len(starts_s) == len(self.probes) > 0 else self.wall_s


def ended_s(probes: Iterable[ProbeReport]) -> float:
    """Return the time at which the last of these test runs ended, in seconds."""
    return max((probe.started_s + probe.wall_s for probe in probes if probe.started_s is not None), default=0.0)


def with_outcome(probe: ProbeReport, outcome: Outcome) -> ProbeReport:
    """Return a copy of the test run `probe`, completed with the verdict and other results in `outcome`."""
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
    """Return the base-2 logarithm of the possible answers of this kind: the fewest runs of any search."""
    sizes = {
        AnswerKind.RANGE: items * (items + 1) // 2,
        AnswerKind.SET: math.comb(items, len(answer.items)),
        AnswerKind.SEVERAL: math.comb(items, len(answer.items)),
        AnswerKind.CHOICE: 1 << items,
    }
    return math.ceil(math.log2(max(1, sizes.get(answer.kind, items))))


# Probes that were launched by the fork server, and whose results differ under torchrun.


def contradicted_fork(new: ProbeReport, before: Sequence[ProbeReport]) -> ProbeReport | None:
    """Return the forked test run that `new` contradicts and that must be repeated, or None if there is none.

    This is either a forked run of the known-good or known-bad configuration with an unexpected result, or the forked
    one of two contradictory runs. If one launcher gave different results for one configuration, the program is flaky,
    and None is returned.
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
    """Return the test runs, with the results of forked runs replaced with UNRESOLVED."""
    reason = "a forked launch of this program ends differently than under torchrun"
    return [
        replace(probe, counts_as=ProbeResult.UNRESOLVED, summary=reason) if probe.launcher == Launcher.FORK else probe
        for probe in probes
    ]


_EXPECTED_RESULT = {Purpose.CONTROL_GOOD: ProbeResult.GOOD, Purpose.CONTROL_BAD: ProbeResult.BAD}


def _contradict(larger: ProbeReport, smaller: ProbeReport) -> bool:
    """Return whether one configuration both passed and failed, or `larger` passed although `smaller` failed."""
    if ProbeResult.UNRESOLVED in (larger.counts_as, smaller.counts_as) or "none" in (larger.launcher, smaller.launcher):
        return False
    if larger.subset == smaller.subset:
        return larger.counts_as is not smaller.counts_as
    answers = (larger.counts_as, smaller.counts_as)
    return answers == (ProbeResult.GOOD, ProbeResult.BAD) and smaller.indices <= larger.indices
