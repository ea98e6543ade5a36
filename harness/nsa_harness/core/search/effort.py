"""The effort of a search: its probes at worst, stage by stage and case by case, and the seconds that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from nsa_harness.core.experiment.statistics import RateDifferenceTest, runs_to_show
from nsa_harness.core.search.choice import max_rounds
from nsa_harness.core.search.exact_search import halvings, worst_case_probes, worst_case_zone_probes
from nsa_harness.core.search.plan import HALF_RATE, MIN_FAILURES, MIN_PASSES, half_doubt_confidence
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
    """A possible result of a search, and the probes that lead to it."""

    name: str
    probes: int
    is_additional: bool = False  # the probes are added to those of the case before, each time it occurs
    is_estimate: bool = False  # the probes are expected, not the most: for flaky runs
    failing_share: float = 0.5  # roughly the share of probes that fail: they may take longer


_FLAKY = (("half", 0.5), ("a fifth", 0.2))


def possible_cases(question: SearchQuestion) -> tuple[EffortCase, ...]:
    """Return each possible result of a search with the probes that find and prove it, for --dry-run."""
    nothing = EffortCase(
        name="the bad end never fails", probes=question.baseline + question.controls, failing_share=0.0
    )
    if question.kind is QuestionKind.CHOICE:
        values = len(group_units(question))
        nothing = EffortCase(name="no value ever fails", probes=values * question.controls, failing_share=0.0)
        once = EffortCase(name="each value fails always or never", probes=total_probes(worst_case_stages(question)))
        some = EffortCase(name="values fail sometimes", probes=values * max_rounds(question.confidence))
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
    # One prefix search, the item alone, another item alone, both proofs.
    proofs = _failing_proofs(question) + (1 + is_range) * max(question.repeat, MIN_PASSES)
    alone = stages["controls"] + stages["right edge"] + 2 + proofs + stages["controls again"]
    single_case = EffortCase(name="one alone is enough", probes=min(alone, whole))
    if len(group_units(question)) == 1:
        return (single_case,)
    if is_range:
        return (
            single_case,
            EffortCase(name="all of a range together", probes=whole),
            EffortCase(
                name="each more range that is enough by itself", probes=stages["next range"], is_additional=True
            ),
            EffortCase(name="only the length counts", probes=whole + stages["sizes"]),
        )
    return (
        single_case,
        EffortCase(name="two or a range together", probes=whole),
        EffortCase(name="each more of those together", probes=stages["next member"], is_additional=True),
        EffortCase(name="each more that is enough by itself", probes=stages["next culprit"], is_additional=True),
        EffortCase(name="only the number counts", probes=whole + stages["sizes"]),
    )


def _expected_flaky_probes(question: SearchQuestion, rate: float) -> int:
    """Return the expected probes if a set that should fail does so at `rate`, and a set that should pass always passes.

    First come the pairs of runs until both ends differ. Then come the bits of one place among all places and of the
    doubt that may be left, divided by the bits that a run gives (the capacity of a Z-channel). Then come the proofs,
    each until a failure would have shown; a set also needs the proof of a single item.
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


_SHAPE_PROBES = 4  # probes: alone, ends only, without middle, elsewhere


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a search. `only_if`: the case that adds these probes each time; empty: every search may need them."""

    name: str
    probes: int
    only_if: str = ""


def worst_case_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    """Return the stages with their most probes. Flaky or contradictory runs take more."""
    return _WORST_CASES[question.kind](question)


def total_probes(stages: tuple[Stage, ...]) -> int:
    """Return the sum of the stages that every search may need."""
    return sum(stage.probes for stage in stages if not stage.only_if)


def _choice_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    values = len(group_units(question))
    if question.flaky:
        return (Stage(name="until the rates part", probes=values * max_rounds(question.confidence)),)
    return (Stage(name="each value", probes=values), Stage(name="proof", probes=values * question.repeat))


def _ordered_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    gallop = halvings(question.items) + 1 if question.unbounded else 0
    return (
        Stage(name="controls", probes=question.baseline + (0 if gallop else 1)),
        *([Stage(name="gallop", probes=gallop)] if gallop else []),
        Stage(name="edge", probes=worst_case_probes(question.items, question.at_once)),
        Stage(
            name="proof",
            probes=_failing_proofs(question) + max(question.repeat, runs_to_show(0.5, question.confidence) - 1),
        ),
        Stage(name="controls again", probes=2),
        Stage(
            name="borders",
            probes=worst_case_zone_probes(question.items, question.at_once),
            only_if="another failure hides where it begins",
        ),
    )


def _failing_proofs(question: SearchQuestion) -> int:
    return max(question.repeat, MIN_FAILURES)


def _set_stages(question: SearchQuestion) -> tuple[Stage, ...]:
    """Return the stages for sets or for ranges.

    The rest beside a range is two ranges, and only its ends are dropped.
    """
    total, is_range = len(group_units(question)), question.kind is QuestionKind.RANGE
    right_edge = worst_case_probes(total, question.at_once)
    left_edge = worst_case_probes(max(total - 1, 1), question.at_once)
    sample = runs_to_show(HALF_RATE, half_doubt_confidence(question))
    if is_range:
        drop_probes = 2 * -(-sample // 2) if total > 1 else 0  # both ends, more than once each
    else:
        # If members are few, each is dropped more than once; if they are many, a sample and both ends are dropped.
        drop_probes = max(
            (members * -(-sample // members) for members in range(2, min(sample + 2, total) + 1)), default=0
        )
    proof = _failing_proofs(question) + (1 + is_range) * max(question.repeat, MIN_PASSES) + drop_probes
    stages = (
        Stage(name="controls", probes=question.baseline + 1),
        Stage(name="right edge", probes=right_edge),
        Stage(name="left edge", probes=left_edge),
        Stage(name="shape", probes=2 if is_range else _SHAPE_PROBES),
        Stage(name="proof", probes=proof),
        Stage(name="controls again", probes=2),
        Stage(name="sizes", probes=2 * sample, only_if="only the number may count"),
    )
    if is_range:
        return (
            *stages,
            Stage(name="next range", probes=right_edge + left_edge + 1 + proof, only_if="there are several"),
        )
    return (
        *stages,
        Stage(name="next culprit", probes=right_edge + left_edge + _SHAPE_PROBES + proof, only_if="there are several"),
        Stage(name="next member", probes=right_edge + 1 + drop_probes, only_if="more than two interact"),
    )


_WORST_CASES = {
    QuestionKind.SET: _set_stages,
    QuestionKind.ORDERED: _ordered_stages,
    QuestionKind.RANGE: _set_stages,
    QuestionKind.CHOICE: _choice_stages,
}


@dataclass(frozen=True, kw_only=True)
class ProbeCosts:
    """The mean time of a probe, by how it ends."""

    good_s: float
    bad_s: float
    proof_s: float  # a bad probe that runs to its verdict


def costs(probes: Sequence[ProbeReport], early_s: float | None) -> ProbeCosts | None:
    """Return the costs, or None while no probe passed or none failed.

    `early_s`: when a probe without progress is ended.
    """
    good = [probe.wall_s for probe in probes if probe.counts_as is ProbeResult.GOOD]
    early = [probe.wall_s for probe in probes if probe.early]
    whole = [probe.wall_s for probe in probes if probe.counts_as is ProbeResult.BAD and not probe.early]
    if not good or not whole:
        return None
    good_s, proof_s = _mean(good), _mean(whole)
    estimated_bad_s = proof_s if early_s is None else min(proof_s, good_s + early_s)
    return ProbeCosts(good_s=good_s, bad_s=_mean(early) if early else estimated_bad_s, proof_s=proof_s)


_RECHECKS = frozenset({Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
_SHAPE_PURPOSES = frozenset(
    {Purpose.ALONE, Purpose.ENDS_ONLY, Purpose.WITHOUT_MIDDLE, Purpose.ELSEWHERE, Purpose.REDUCE}
)
# The stages of `worst_case` in order: their names, the purposes of their probes, how likely each probe is needed, and
# the share of the probes that is bad.
_STAGES: tuple[tuple[frozenset[str], frozenset[Purpose], float, float], ...] = (
    (frozenset({"controls"}), CONTROLS, 1.0, 0.5),
    (frozenset({"each value"}), frozenset({Purpose.EACH}), 1.0, 0.5),
    (frozenset({"gallop"}), frozenset({Purpose.GALLOP}), 0.5, 0.2),
    (frozenset({"edge", "right edge"}), frozenset({Purpose.RIGHT_EDGE}), 1.0, 0.5),
    (frozenset({"left edge"}), frozenset({Purpose.LEFT_EDGE}), 0.5, 0.5),  # a single culprit has no left edge
    (frozenset({"shape"}), _SHAPE_PURPOSES, 0.5, 0.5),
    (frozenset({"proof"}), PROOFS - _RECHECKS, 0.5, 0.0),  # the proof that it fails is added apart
    (frozenset({"controls again"}), _RECHECKS, 1.0, 0.5),
)


def time_left_s(
    stages: Sequence[Stage], probes: Sequence[ProbeReport], running: Round, costs: ProbeCosts, repeat: int
) -> float:
    """Return the expected time of the rest of the search: the probes still to come, times their likelihood and cost.

    `repeat`: how often the answer is proven to fail by a run to its verdict. Stages that only some searches need do not
    count.
    """
    current = next((number for number, row in enumerate(_STAGES) if running.purpose in row[1]), 0)
    left_s = 0.0
    for number, (names, purposes, chance, bad) in enumerate(_STAGES):
        most = sum(stage.probes for stage in stages if stage.name in names and not stage.only_if)
        if number < current or most == 0:
            continue
        finished = sum(probe.purpose in purposes for probe in probes)
        remaining = max(chance * most - finished, 0.0)
        if number == current:
            remaining = max(
                remaining,
                len(running.subsets),
                running.probes_left + len(running.subsets) if running.probes_left else 0,
            )
        left_s += remaining * (bad * costs.bad_s + (1 - bad) * costs.good_s)
    proven = sum(probe.purpose is Purpose.PROOF_BAD for probe in probes)
    return left_s + max(repeat - proven, 0) * costs.proof_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
