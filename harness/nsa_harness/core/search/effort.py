"""Estimates of the number of test runs that a bisection needs and of the time left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import fmean

from nsa_harness.core.experiment.statistics import RateDifferenceTest, runs_to_show
from nsa_harness.core.search.choice import max_rounds
from nsa_harness.core.search.exact_search import (
    MIN_FAILURES,
    MIN_PASSES,
    halvings,
    worst_case_probes,
    worst_case_zone_probes,
)
from nsa_harness.core.search.plan import HALF_RATE, half_doubt_confidence
from nsa_harness.core.search.question import (
    CONTROLS,
    PROOFS,
    ProbeResult,
    Purpose,
    QuestionKind,
    Round,
    SearchQuestion,
    group_units,
)
from nsa_harness.core.search.report import ProbeReport


@dataclass(frozen=True, kw_only=True)
class EffortCase:
    """A possible result of a bisection, with the number of test runs needed to find and prove it."""

    name: str
    probes: int
    is_additional: bool = False  # the probes are added to those of the previous case, once per occurrence
    is_estimate: bool = False  # `probes` is an expected number, not a maximum; for flaky programs
    failing_share: float = 0.5  # approximate share of the probes that fail; they may take longer


_FLAKY = (("half", 0.5), ("a fifth", 0.2))


def possible_cases(question: SearchQuestion) -> tuple[EffortCase, ...]:
    """Return every possible result of a bisection with its number of test runs, for `bisect --dry-run`."""
    nothing = EffortCase(
        name="the bad end never fails", probes=question.baseline + question.controls, failing_share=0.0
    )
    if question.kind is QuestionKind.CHOICE:
        values = len(group_units(question))
        nothing = EffortCase(name="no value ever fails", probes=values * question.controls, failing_share=0.0)
        once = EffortCase(
            name="each value always fails or always passes", probes=total_probes(worst_case_stages(question))
        )
        some = EffortCase(name="some values fail only sometimes", probes=values * max_rounds(question.confidence))
        return (nothing, some) if question.flaky else (nothing, once, some)
    threshold = EffortCase(name="there is a threshold", probes=total_probes(worst_case_stages(question)))
    answers = (threshold,) if question.kind is QuestionKind.ORDERED else _set_cases(question)
    flaky = (
        EffortCase(
            name=f"it fails in {words} of its runs",
            probes=_expected_flaky_probes(question, rate),
            is_estimate=True,
            failing_share=rate / 2,
        )
        for words, rate in _FLAKY
    )
    return nothing, *answers, *flaky


def _set_cases(question: SearchQuestion) -> tuple[EffortCase, ...]:
    stages = {stage.name: stage.probes for stage in worst_case_stages(question)}
    whole = total_probes(worst_case_stages(question))
    is_range = question.kind is QuestionKind.RANGE
    # One search by prefixes, the item alone, another item alone, and both proofs.
    proofs = _failing_proofs(question) + (1 + is_range) * max(question.repeat, MIN_PASSES)
    alone = stages["controls"] + stages["right edge"] + 2 + proofs + stages["controls again"]
    single_case = EffortCase(name="one item is enough", probes=min(alone, whole))
    if len(group_units(question)) == 1:
        return (single_case,)
    if is_range:
        return (
            single_case,
            EffortCase(name="a whole range is needed", probes=whole),
            EffortCase(
                name="each further range that is enough on its own", probes=stages["next range"], is_additional=True
            ),
            EffortCase(name="only the length matters", probes=whole + stages["sizes"]),
        )
    return (
        single_case,
        EffortCase(name="two items or a range are needed", probes=whole),
        EffortCase(name="each further item that is needed with them", probes=stages["next member"], is_additional=True),
        EffortCase(
            name="each further item that is enough on its own", probes=stages["next culprit"], is_additional=True
        ),
        EffortCase(name="only the number of items matters", probes=whole + stages["sizes"]),
    )


def _expected_flaky_probes(question: SearchQuestion, rate: float) -> int:
    """Return the expected number of test runs for a program whose failure rate is `rate`.

    Passing configurations never fail. The runs are: pairs of runs until the failure rates with all items on and off
    differ, then the bits needed to locate one item divided by the bits that one run gives (the capacity of a
    Z-channel), then the proofs.
    """
    ends = 2 * _pairs_until_shown(rate, question.confidence)
    doubt = (1 - question.confidence) / 2
    bits = log2(len(group_units(question))) + log2(1 / doubt) / 2
    proofs = ceil(1 / rate) + runs_to_show(rate, question.confidence)
    proofs *= 1 if question.kind is QuestionKind.ORDERED else 2
    return ceil(ends + bits / _bits_per_run(rate) + proofs)


def _bits_per_run(rate: float) -> float:
    silent = 1 - rate
    return log2(1 + rate * silent ** (silent / rate))


def _pairs_until_shown(rate: float, confidence: float) -> int:
    ends = RateDifferenceTest()
    while not ends.is_shown(confidence):
        ends.add_pair(int((ends.pairs + 1) * rate) > int(ends.pairs * rate), False)
    return ends.pairs


_SHAPE_PROBES = 4  # the probes with the purposes ALONE, ENDS_ONLY, WITHOUT_MIDDLE and ELSEWHERE


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a bisection, with its maximum number of test runs and the case in which it is needed."""

    name: str
    probes: int
    only_if: str = ""


def worst_case_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    """Return the stages of a bisection with their maximum numbers of test runs. Flaky programs can need more."""
    return _WORST_CASES[question.kind](question)


def total_probes(stages: tuple[Stage, ...]) -> int:
    """Return the total number of test runs, excluding stages that only some bisections need."""
    return sum(stage.probes for stage in stages if not stage.only_if)


def _choice_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    values = len(group_units(question))
    if question.flaky:
        return (Stage(name="until the rates differ", probes=values * max_rounds(question.confidence)),)
    return (Stage(name="each value", probes=values), Stage(name="proof", probes=values * question.repeat))


def _ordered_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    gallop = halvings(question.items) + 1 if question.unbounded else 0
    return (
        Stage(name="controls", probes=question.baseline + (0 if gallop else 1)),
        *([Stage(name="doubling", probes=gallop)] if gallop else []),
        Stage(name="edge", probes=worst_case_probes(question.items, question.at_once)),
        Stage(
            name="proof",
            probes=_failing_proofs(question) + max(question.repeat, runs_to_show(0.5, question.confidence) - 1),
        ),
        Stage(name="controls again", probes=2),
        Stage(
            name="borders",
            probes=worst_case_zone_probes(question.items, question.at_once)
            + 2 * runs_to_show(HALF_RATE, half_doubt_confidence(question)),  # both borders are proven more often
            only_if="another failure hides where it begins",
        ),
    )


def _failing_proofs(question: SearchQuestion) -> int:
    return max(question.repeat, MIN_FAILURES)


def _set_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    """Return the stages of a bisection in which items can be switched on in any combination or in ranges."""
    total, is_range = len(group_units(question)), question.kind is QuestionKind.RANGE
    right_edge = worst_case_probes(total, question.at_once)
    left_edge = worst_case_probes(max(total - 1, 1), question.at_once)
    sample = runs_to_show(HALF_RATE, half_doubt_confidence(question))
    if is_range:
        drop_probes = 2 * -(-sample // 2) if total > 1 else 0  # both ends, more than once each
    else:
        # If there are few members, each is tested several times; if there are many, a sample and both ends are.
        drop_probes = max(
            (members * -(-sample // members) for members in range(2, min(sample + 2, total) + 1)), default=0
        )
    proof = _failing_proofs(question) + (1 + is_range) * max(question.repeat, MIN_PASSES) + drop_probes
    stages = (
        Stage(name="controls", probes=question.baseline + 1),
        Stage(name="right edge", probes=right_edge),
        Stage(name="left edge", probes=left_edge),
        Stage(name="special sets", probes=2 if is_range else _SHAPE_PROBES),
        Stage(name="proof", probes=proof),
        Stage(name="controls again", probes=2),
        Stage(name="sizes", probes=2 * sample, only_if="only the number may matter"),
    )
    if is_range:
        return (
            *stages,
            Stage(name="next range", probes=right_edge + left_edge + 1 + proof, only_if="there are several culprits"),
        )
    return (
        *stages,
        Stage(
            name="next culprit",
            probes=right_edge + left_edge + _SHAPE_PROBES + proof,
            only_if="there are several culprits",
        ),
        Stage(name="next member", probes=right_edge + 1 + drop_probes, only_if="more than two items interact"),
    )


_WORST_CASES = {
    QuestionKind.SET: _set_stages,
    QuestionKind.ORDERED: _ordered_stages,
    QuestionKind.RANGE: _set_stages,
    QuestionKind.CHOICE: _choice_stages,
}


@dataclass(frozen=True, kw_only=True)
class ProbeCosts:
    """The mean duration of a test run, depending on how it ends."""

    good_s: float
    bad_s: float
    proof_s: float  # a failing probe that runs until its verdict


def costs(probes: Sequence[ProbeReport], early_s: float | None) -> ProbeCosts | None:
    """Return the mean durations of passing and failing runs, or None. `early_s`: when runs are stopped early."""
    good = [probe.wall_s for probe in probes if probe.counts_as is ProbeResult.GOOD]
    early = [probe.wall_s for probe in probes if probe.early]
    whole = [probe.wall_s for probe in probes if probe.counts_as is ProbeResult.BAD and not probe.early]
    if not good or not whole:
        return None
    good_s, proof_s = fmean(good), fmean(whole)
    estimated_bad_s = proof_s if early_s is None else min(proof_s, good_s + early_s)
    return ProbeCosts(good_s=good_s, bad_s=fmean(early) if early else estimated_bad_s, proof_s=proof_s)


_RECHECKS = frozenset({Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
_SHAPE_PURPOSES = frozenset(
    {Purpose.ALONE, Purpose.ENDS_ONLY, Purpose.WITHOUT_MIDDLE, Purpose.ELSEWHERE, Purpose.REDUCE}
)
# For each stage of `worst_case_stages` in order: its names, the purposes of its probes, the probability that a probe is
# needed, and the share of the probes that fails.
_STAGES: tuple[tuple[frozenset[str], frozenset[Purpose], float, float], ...] = (
    (frozenset({"controls"}), CONTROLS, 1.0, 0.5),
    (frozenset({"each value"}), frozenset({Purpose.EACH}), 1.0, 0.5),
    (frozenset({"doubling"}), frozenset({Purpose.GALLOP}), 0.5, 0.2),
    (frozenset({"edge", "right edge"}), frozenset({Purpose.RIGHT_EDGE}), 1.0, 0.5),
    (frozenset({"left edge"}), frozenset({Purpose.LEFT_EDGE}), 0.5, 0.5),  # a single culprit has no left edge
    (frozenset({"special sets"}), _SHAPE_PURPOSES, 0.5, 0.5),
    (frozenset({"proof"}), PROOFS - _RECHECKS, 0.5, 0.0),  # the failing proofs are added separately
    (frozenset({"controls again"}), _RECHECKS, 1.0, 0.5),
)


def time_left_s(
    stages: Sequence[Stage], probes: Sequence[ProbeReport], running: Round, costs: ProbeCosts, repeat: int
) -> float:
    """Return the expected remaining time of a bisection, in seconds.

    Each remaining test run counts with its probability times its mean duration. `running` is the current round, and
    `repeat` the number of failing proofs. Stages that only some bisections need do not count.
    """
    current = next((number for number, row in enumerate(_STAGES) if running.purpose in row[1]), 0)
    left_s = 0.0
    for number, (names, purposes, chance, bad) in enumerate(_STAGES):
        most = sum(stage.probes for stage in stages if stage.name in names and not stage.only_if)
        if number < current or most == 0:
            continue
        finished_count = sum(probe.purpose in purposes for probe in probes)
        remaining = max(chance * most - finished_count, 0.0)
        if number == current:
            remaining = max(
                remaining,
                len(running.subsets),
                running.probes_left + len(running.subsets) if running.probes_left else 0,
            )
        left_s += remaining * (bad * costs.bad_s + (1 - bad) * costs.good_s)
    proven = sum(probe.purpose is Purpose.PROOF_BAD for probe in probes)
    return left_s + max(repeat - proven, 0) * costs.proof_s
