"""The effort of a search: its probes at worst, stage by stage and case by case, and the seconds that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from nsa_harness.core.experiment.statistics import Separation, tries
from nsa_harness.core.search.choice import most_rounds
from nsa_harness.core.search.exact_search import depth, probes_at_worst, zone_probes_at_worst
from nsa_harness.core.search.plan import HALF, SEEN_FAILING, SEEN_PASSING, with_half_the_doubt
from nsa_harness.core.search.question import (
    CONTROLS,
    PROOFS,
    CountsAs,
    Purpose,
    QuestionKind,
    Round,
    SearchQuestion,
    units,
)
from nsa_harness.core.search.report import ProbeReport


@dataclass(frozen=True, kw_only=True)
class Case:
    """A possible result of a search, and the probes that lead to it."""

    name: str
    probes: int
    more: bool = False  # the probes are added to those of the case before, each time it occurs
    about: bool = False  # the probes are expected, not the most: for flaky runs
    fails: float = 0.5  # roughly the share of probes that fail: they may take longer


_FLAKY = (("half", 0.5), ("a fifth", 0.2))


def cases(question: SearchQuestion) -> tuple[Case, ...]:
    """Return each possible result of a search with the probes that find and prove it, for --dry-run."""
    nothing = Case(name="the bad end never fails", probes=question.baseline + question.controls, fails=0.0)
    if question.kind is QuestionKind.CHOICE:
        values = len(units(question))
        nothing = Case(name="no value ever fails", probes=values * question.controls, fails=0.0)
        once = Case(name="each value fails always or never", probes=at_most(worst_case(question)))
        some = Case(name="values fail sometimes", probes=values * most_rounds(question.confidence))
        return (nothing, some) if question.flaky else (nothing, once, some)
    threshold = Case(name="there is a threshold", probes=at_most(worst_case(question)))
    answers = (threshold,) if question.kind is QuestionKind.ORDERED else _set_cases(question)
    flaky = (
        Case(name=f"it fails in {words} of its runs", probes=_flaky(question, rate), about=True, fails=rate / 2)
        for words, rate in _FLAKY
    )
    return nothing, *answers, *flaky


def _set_cases(question: SearchQuestion) -> tuple[Case, ...]:
    stages = {stage.name: stage.probes for stage in worst_case(question)}
    whole = at_most(worst_case(question))
    ranges = question.kind is QuestionKind.RANGE
    # One prefix search, the item alone, another item alone, both proofs.
    proofs = _to_fail(question) + (1 + ranges) * max(question.repeat, SEEN_PASSING)
    alone = stages["controls"] + stages["right edge"] + 2 + proofs + stages["controls again"]
    one = Case(name="one alone is enough", probes=min(alone, whole))
    if len(units(question)) == 1:
        return (one,)
    if ranges:
        return (
            one,
            Case(name="all of a range together", probes=whole),
            Case(name="each more range that is enough by itself", probes=stages["next range"], more=True),
            Case(name="only the length counts", probes=whole + stages["sizes"]),
        )
    return (
        one,
        Case(name="two or a range together", probes=whole),
        Case(name="each more of those together", probes=stages["next member"], more=True),
        Case(name="each more that is enough by itself", probes=stages["next culprit"], more=True),
        Case(name="only the number counts", probes=whole + stages["sizes"]),
    )


def _flaky(question: SearchQuestion, rate: float) -> int:
    """Return the expected probes if a set that should fail does so at `rate`, and a set that should pass always passes.

    First come the pairs of runs until both ends differ. Then come the bits of one place among all places and of the
    doubt that may be left, divided by the bits that a run gives (the capacity of a Z-channel). Then come the proofs,
    each until a failure would have shown; a set also needs the proof of a single item.
    """
    ends = 2 * _pairs_until_shown(rate, question.confidence)
    doubt = (1 - question.confidence) / 2
    bits = log2(len(units(question))) + log2(1 / doubt) / 2
    proofs = ceil(1 / rate) + tries(rate, question.confidence)
    proofs *= 1 if question.kind is QuestionKind.ORDERED else 2
    return ceil(ends + bits / _bits_a_run(rate) + proofs)


def _bits_a_run(rate: float) -> float:
    silent = 1 - rate
    return log2(1 + rate * silent ** (silent / rate))


def _pairs_until_shown(rate: float, confidence: float) -> int:
    ends = Separation()
    while not ends.shown(confidence):
        ends.learn(int((ends.pairs + 1) * rate) > int(ends.pairs * rate), False)
    return ends.pairs


_SHAPES = 4  # probes: alone, ends only, without middle, elsewhere


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a search. `only_if`: the case that adds these probes each time; empty: every search may need them."""

    name: str
    probes: int
    only_if: str = ""


def worst_case(question: SearchQuestion) -> tuple[Stage, ...]:
    """Return the stages with their most probes. Flaky or contradictory runs take more."""
    return _WORST_CASES[question.kind](question)


def at_most(parts: tuple[Stage, ...]) -> int:
    """Return the sum of the stages that every search may need."""
    return sum(part.probes for part in parts if not part.only_if)


def _choice(question: SearchQuestion) -> tuple[Stage, ...]:
    values = len(units(question))
    if question.flaky:
        return (Stage(name="until the rates part", probes=values * most_rounds(question.confidence)),)
    return (Stage(name="each value", probes=values), Stage(name="proof", probes=values * question.repeat))


def _ordered(question: SearchQuestion) -> tuple[Stage, ...]:
    gallop = depth(question.items) + 1 if question.unbounded else 0
    return (
        Stage(name="controls", probes=question.baseline + (0 if gallop else 1)),
        *([Stage(name="gallop", probes=gallop)] if gallop else []),
        Stage(name="edge", probes=probes_at_worst(question.items, question.at_once)),
        Stage(name="proof", probes=_to_fail(question) + max(question.repeat, tries(0.5, question.confidence) - 1)),
        Stage(name="controls again", probes=2),
        Stage(
            name="borders",
            probes=zone_probes_at_worst(question.items, question.at_once),
            only_if="another failure hides where it begins",
        ),
    )


def _to_fail(question: SearchQuestion) -> int:
    return max(question.repeat, SEEN_FAILING)


def _sets(question: SearchQuestion) -> tuple[Stage, ...]:
    """Return the stages for sets or for ranges.

    The rest beside a range is two ranges, and only its ends are dropped.
    """
    total, ranges = len(units(question)), question.kind is QuestionKind.RANGE
    right = probes_at_worst(total, question.at_once)
    left = probes_at_worst(max(total - 1, 1), question.at_once)
    sample = tries(HALF, with_half_the_doubt(question))
    if ranges:
        needed = 2 * -(-sample // 2) if total > 1 else 0  # both ends, more than once each
    else:
        # If members are few, each is dropped more than once; if they are many, a sample and both ends are dropped.
        needed = max((members * -(-sample // members) for members in range(2, min(sample + 2, total) + 1)), default=0)
    proof = _to_fail(question) + (1 + ranges) * max(question.repeat, SEEN_PASSING) + needed
    stages = (
        Stage(name="controls", probes=question.baseline + 1),
        Stage(name="right edge", probes=right),
        Stage(name="left edge", probes=left),
        Stage(name="shape", probes=2 if ranges else _SHAPES),
        Stage(name="proof", probes=proof),
        Stage(name="controls again", probes=2),
        Stage(name="sizes", probes=2 * sample, only_if="only the number may count"),
    )
    if ranges:
        return (*stages, Stage(name="next range", probes=right + left + 1 + proof, only_if="there are several"))
    return (
        *stages,
        Stage(name="next culprit", probes=right + left + _SHAPES + proof, only_if="there are several"),
        Stage(name="next member", probes=right + 1 + needed, only_if="more than two interact"),
    )


_WORST_CASES = {
    QuestionKind.SET: _sets,
    QuestionKind.ORDERED: _ordered,
    QuestionKind.RANGE: _sets,
    QuestionKind.CHOICE: _choice,
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The mean time of a probe, by how it ends."""

    good_s: float
    bad_s: float
    proof_s: float  # a bad probe that runs to its verdict


def costs(probes: Sequence[ProbeReport], early_s: float | None) -> Costs | None:
    """Return the costs, or None while no probe passed or none failed.

    `early_s`: when a probe without progress is ended.
    """
    good = [probe.wall_s for probe in probes if probe.counts_as is CountsAs.GOOD]
    early = [probe.wall_s for probe in probes if probe.early]
    whole = [probe.wall_s for probe in probes if probe.counts_as is CountsAs.BAD and not probe.early]
    if not good or not whole:
        return None
    good_s, proof_s = _mean(good), _mean(whole)
    expected_s = proof_s if early_s is None else min(proof_s, good_s + early_s)
    return Costs(good_s=good_s, bad_s=_mean(early) if early else expected_s, proof_s=proof_s)


_RECHECKS = frozenset({Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
_SHAPE = frozenset({Purpose.ALONE, Purpose.ENDS_ONLY, Purpose.WITHOUT_MIDDLE, Purpose.ELSEWHERE, Purpose.REDUCE})
# The stages of `worst_case` in order: their names, the purposes of their probes, how likely each probe is needed, and
# the share of the probes that is bad.
_STAGES: tuple[tuple[frozenset[str], frozenset[Purpose], float, float], ...] = (
    (frozenset({"controls"}), CONTROLS, 1.0, 0.5),
    (frozenset({"each value"}), frozenset({Purpose.EACH}), 1.0, 0.5),
    (frozenset({"gallop"}), frozenset({Purpose.GALLOP}), 0.5, 0.2),
    (frozenset({"edge", "right edge"}), frozenset({Purpose.RIGHT_EDGE}), 1.0, 0.5),
    (frozenset({"left edge"}), frozenset({Purpose.LEFT_EDGE}), 0.5, 0.5),  # a single culprit has no left edge
    (frozenset({"shape"}), _SHAPE, 0.5, 0.5),
    (frozenset({"proof"}), PROOFS - _RECHECKS, 0.5, 0.0),  # the proof that it fails is added apart
    (frozenset({"controls again"}), _RECHECKS, 1.0, 0.5),
)


def time_left_s(
    stages: Sequence[Stage], probes: Sequence[ProbeReport], running: Round, each: Costs, repeat: int
) -> float:
    """Return the expected time of the rest of the search: the probes still to come, times their likelihood and cost.

    `repeat`: how often the answer is proven to fail by a run to its verdict. Stages that only some searches need do not
    count.
    """
    at = next((number for number, row in enumerate(_STAGES) if running.purpose in row[1]), 0)
    left_s = 0.0
    for number, (names, purposes, chance, bad) in enumerate(_STAGES):
        most = sum(stage.probes for stage in stages if stage.name in names and not stage.only_if)
        if number < at or most == 0:
            continue
        made = sum(probe.purpose in purposes for probe in probes)
        expected = max(chance * most - made, 0.0)
        if number == at:
            expected = max(expected, len(running.subsets), running.left + len(running.subsets) if running.left else 0)
        left_s += expected * (bad * each.bad_s + (1 - bad) * each.good_s)
    proven = sum(probe.purpose is Purpose.PROOF_BAD for probe in probes)
    return left_s + max(repeat - proven, 0) * each.proof_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
