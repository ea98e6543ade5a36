"""The complete course of a bisection, from the first checks to the proof of its answer.

The ends of a bisection are two configurations: all items switched off, which is known to be good, and all items
switched on, which is known to be bad.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from nsa_harness.core.experiment.statistics import RateDifferenceTest, runs_to_show
from nsa_harness.core.search.answers import (
    UNTESTED,
    count_text,
    culprits_answer,
    sets_without,
    size_order,
    undecided_answer,
)
from nsa_harness.core.search.bayesian import BayesianSearch, Inconclusive
from nsa_harness.core.search.choice import among_values
from nsa_harness.core.search.exact_search import (
    MIN_FAILURES,
    MIN_PASSES,
    Chain,
    Contradiction,
    ExactSearch,
    UnjudgedGap,
    make_zones,
)
from nsa_harness.core.search.minimal import (
    FailingSet,
    Judge,
    LiteralJudge,
    SetJudge,
    ddmin,
    drop_unneeded,
    drop_unneeded_ends,
    find_failing_part,
    judge_one_other_set,
    judge_other_sets,
    judge_set,
    only_count_matters,
    only_length_matters,
    shortest_failing_span,
    shrink_range,
    tests_every_window,
)
from nsa_harness.core.search.question import (
    BAD,
    GOOD,
    AnswerKind,
    OutOfBudget,
    Probe,
    ProbeCache,
    ProbeResult,
    Purpose,
    QuestionKind,
    SearchAnswer,
    SearchQuestion,
    Subset,
)

_SMALLEST_DIFFERENCE = 0.2  # if the failure rates of both ends differ by less, there is nothing to search for
_MAX_UNJUDGED = 5  # an end may have this many more unjudged than judged runs
_FLAKY_ATTEMPTS = 4  # searches of a flaky program, before a last search whose reason for failing is reported
# After _MIN_PAIRS pairs of runs the answer may be that both ends fail equally often. After _MAX_PAIRS pairs the search
# reports that their rates are too close together.
_MIN_PAIRS, _MAX_PAIRS = 20, 100
HALF_RATE = 0.5  # samples are large enough to show an exception that occurs in half of the sets or runs
_FAILURES = (BAD, ProbeResult.DIFFERENT)


def find_smallest_difference(question: SearchQuestion, probe: Probe) -> SearchAnswer:
    """Search for the smallest set of items for which the program fails, and prove it.

    If the search cannot decide, or the probe raises OutOfBudget, the answer is UNDECIDED and contains what is known so
    far. Any other exception of `probe` is passed on.
    """
    probes = ProbeCache(question, probe)
    try:
        return _between_ends(probes)
    except OutOfBudget as reason:
        return undecided_answer(probes, str(reason) or "the budget was used up before an answer was found and proven")
    except Inconclusive as reason:
        return undecided_answer(probes, str(reason), reason.open_units)


def _between_ends(probes: ProbeCache) -> SearchAnswer:
    """Run the program with all items off and all items on, and search only if the results differ."""
    if probes.question.kind is QuestionKind.CHOICE:
        return among_values(probes)
    if probes.question.flaky:
        return _among_flaky_runs(probes, _gallop(probes) or probes.all_units)
    list(probes.launch([frozenset()] * (probes.question.baseline - 1), Purpose.CONTROL_GOOD, probes.all_units))
    good_end = _launch_control(probes, frozenset(), Purpose.CONTROL_GOOD, GOOD)
    if good_end is not GOOD:
        return undecided_answer(probes, f"the good end does not pass: {_how_often(probes, frozenset(), good_end)}")
    end = _gallop(probes) or probes.all_units
    failing_results = [counts_as for counts_as in probes.answers(frozenset(end)) if counts_as in _FAILURES]
    bad_end = (
        failing_results[0] if failing_results else _launch_control(probes, frozenset(end), Purpose.CONTROL_BAD, BAD)
    )
    if bad_end is GOOD:
        return _never_failed_answer(probes, frozenset(end))
    if bad_end is not BAD:
        return undecided_answer(
            probes, f"the bad end does not show the failure: {_how_often(probes, frozenset(end), bad_end)}"
        )
    return _search(probes, end)


def _never_failed_answer(probes: ProbeCache, end: Subset) -> SearchAnswer:
    """Return an answer saying that the program never failed with all items switched on."""
    times, confidence = len(probes.answers(end)), probes.question.confidence
    rarer = 1 - (1 - confidence) ** (1 / times)
    return SearchAnswer(
        kind=AnswerKind.NONE,
        confidence=confidence,
        why=f"the bad end passed {times} of {times} times; it may still fail in less than {rarer:.0%} of its runs",
        passing=probes.items(end),
    )


def _search(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search for the items that make the program fail, assuming that the program always ends the same way."""
    if BAD in probes.answers(frozenset()) or GOOD in probes.answers(frozenset(end)):
        return _among_flaky_runs(probes, end)
    with suppress(Contradiction):  # one configuration both passed and failed
        try:
            return _find_and_prove(probes, ExactSearch(probes), end)
        except Contradiction as contradiction:
            if not _is_flaky(probes, contradiction):
                return _search_without_order(probes, end)
        except UnjudgedGap as gap:
            return _search_around_unjudged(probes, end, gap)
    return _among_flaky_runs(probes, end)


def _find_and_prove(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """Find the items that make the program fail, prove it, and check that all items on and off end as before."""
    is_ordered = probes.question.kind is QuestionKind.ORDERED
    answer = _find_threshold(probes, judge, end) if is_ordered else _find_culprits(probes, judge)
    _recheck_ends(probes, judge, end)
    judge.reach_confidence(half_doubt_confidence(probes.question))
    if judge.comes_in_bursts:
        answer = replace(answer, why=_BURSTS_TEXT)
    return replace(answer, confidence=answer.confidence * judge.confidence)


_BURSTS_TEXT = "failures in bursts"  # consecutive runs end alike more often than independent runs


def half_doubt_confidence(question: SearchQuestion) -> float:
    """Return the confidence that each of two steps needs if both together must reach the question's confidence."""
    return 1 - (1 - question.confidence) / 2


def _find_threshold(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """Find the first value for which the program fails, prove it, and return it as the answer."""
    length = judge.first_failing_length(Chain(base=frozenset(), order=end), Purpose.RIGHT_EDGE)
    failing, passing = frozenset(end[:length]), frozenset(end[: length - 1])
    # The last passing value is run most: one pass by chance would move the answer.
    at_least = max(runs_to_show(HALF_RATE, probes.question.confidence) - 1, _min_runs(probes, MIN_PASSES))
    _launch_proofs_together(probes, judge, failing, passing, at_least=at_least, end=end)
    _require_failure(probes, judge, failing)
    if _launch_rest(probes, judge, passing, at_least) is not GOOD:
        raise Inconclusive(f"value number {length} fails, but the one before it was not seen to pass")
    return SearchAnswer(
        kind=AnswerKind.THRESHOLD,
        items=(length,),
        p_bad=judge.failure_rate,
        passing=probes.items(range(length - 1)),
        failing=probes.items(range(length)),
    )


def _find_culprits(probes: ProbeCache, judge: Judge) -> SearchAnswer:
    """Find and prove every minimal set of items that makes the program fail on its own."""
    if probes.question.kind is QuestionKind.RANGE:
        return _find_ranges(probes, judge)
    sample = runs_to_show(HALF_RATE, half_doubt_confidence(probes.question))
    sample_confidence = 1 - HALF_RATE**sample
    culprits: list[FailingSet] = []
    rest, counts_as = probes.all_units, BAD
    while counts_as is BAD:
        members = find_failing_part(judge, rest)
        if not culprits and not probes.question.together and only_count_matters(judge, members, rest, sample):
            return _prove_count(probes, judge, members, sample_confidence)
        culprit = drop_unneeded(judge, members, sample, _min_runs(probes, 1))
        # If one run passed by chance, "any N items" looks like "exactly these items".
        if not (culprits or probes.question.together):
            others = judge_other_sets(judge, culprit.members, rest, sample)
            if others is BAD:
                return _prove_count(probes, judge, culprit.members, sample_confidence)
            if others is not GOOD:
                raise Inconclusive(count_text(len(culprit.members)), frozenset(rest))
        rest = tuple(unit for unit in rest if unit not in culprit.members)
        _launch_proofs_together(
            probes, judge, culprit.members, frozenset(rest), end=() if culprits else probes.all_units
        )
        culprits.append(_prove_alone(probes, judge, culprit))
        counts_as = _launch_rest(probes, judge, rest)
        if counts_as is not BAD and (unexplained_set := _unexplained_set(judge, culprits)) is not None:
            # This set shares members with the known culprits. It may have failed by chance, so launch it again.
            _require_failure(probes, judge, unexplained_set)
            rest, counts_as = tuple(sorted(unexplained_set)), BAD
    return culprits_answer(probes, judge, culprits, counts_as is GOOD, sample_confidence)


def _unexplained_set(judge: Judge, culprits: Sequence[FailingSet]) -> Subset | None:
    """Return the smallest failing set that the culprits do not explain, or None if there is no such set."""
    others = (subset for subset in judge.failing_sets() if not any(culprit.members <= subset for culprit in culprits))
    return min(others, key=size_order, default=None)


def _find_ranges(probes: ProbeCache, judge: Judge) -> SearchAnswer:
    """Find and prove every minimal range of items that makes the program fail on its own."""
    sample = runs_to_show(HALF_RATE, half_doubt_confidence(probes.question))
    counts_as = cache(partial(_launch_rest, probes, judge))
    culprits: list[FailingSet] = []
    failing: Subset | None = frozenset(probes.all_units)
    while failing is not None:
        members = frozenset(shortest_failing_span(judge, tuple(sorted(failing))))
        if not culprits and only_length_matters(judge, members, len(probes.units), sample):
            is_exhaustive = tests_every_window(len(probes.units), len(members), sample)
            return _prove_count(probes, judge, members, 1.0 if is_exhaustive else 1 - HALF_RATE**sample)
        culprit = drop_unneeded_ends(judge, members, sample, _min_runs(probes, 1))
        if not culprits:
            _launch_proofs_together(probes, judge, culprit.members, *sets_without(probes, [culprit]))
        newest = _prove_alone(probes, judge, culprit)
        culprits = [*(culprit for culprit in culprits if not newest.members <= culprit.members), newest]
        failing = next((rest for rest in sets_without(probes, culprits) if counts_as(rest) is BAD), None)
        if failing is None and (failing := _unexplained_set(judge, culprits)) is not None:
            _require_failure(probes, judge, failing)
    rest_passes = all(counts_as(rest) is GOOD for rest in sets_without(probes, culprits))
    return culprits_answer(probes, judge, sorted(culprits, key=lambda culprit: min(culprit.members)), rest_passes, 1.0)


def _prove_count(probes: ProbeCache, judge: Judge, first: Subset, sample_confidence: float) -> SearchAnswer:
    """Prove and return an answer saying that only the number of items matters."""
    one_fewer = frozenset(sorted(first)[1:])
    _launch_proofs_together(probes, judge, first, one_fewer, end=probes.all_units)
    _require_failure(probes, judge, first)
    _launch_rest(probes, judge, one_fewer)
    return SearchAnswer(
        kind=AnswerKind.COUNT,
        items=(len(first),),
        confidence=sample_confidence,
        p_bad=judge.failure_rate,
        why="" if sample_confidence == 1 else "only a sample of the sets of this size was launched",
        passing=probes.items(range(1, len(first))),
        failing=probes.items(range(len(first))),
    )


def _prove_alone(probes: ProbeCache, judge: Judge, culprit: FailingSet) -> FailingSet:
    """Run the program with only the items of `culprit`. Raise Inconclusive if it passes or a member was not judged."""
    _require_failure(probes, judge, culprit.members)
    if culprit.unjudged:
        raise Inconclusive(
            "these items fail together, but without some of them the result could not be judged", culprit.members
        )
    return culprit


def _min_runs(probes: ProbeCache, usual: int) -> int:
    """Return the runs of a proof: `usual`, or more after unusable probes, which hide that a program is flaky."""
    if all(answer.counts_as in (GOOD, BAD) for answer in probes.observations):
        return usual
    return runs_to_show(HALF_RATE, half_doubt_confidence(probes.question))


def _launch_proofs_together(
    probes: ProbeCache,
    judge: SetJudge,
    failing: Subset,
    *passing: Subset,
    at_least: int = MIN_PASSES,
    end: Collection[int] = (),
) -> None:
    """Run, in mixed order, the proofs that the set `failing` fails and that the sets `passing` pass."""
    bad = [(failing, Purpose.PROOF_BAD)] * _times_to_fail(probes, failing)
    often = max(probes.question.repeat, _min_runs(probes, at_least))
    ends = [(frozenset[int](), Purpose.RECHECK_GOOD), (frozenset(end), Purpose.RECHECK_BAD)] if end else []
    judge.launch_together(
        [*bad, *((subset, Purpose.PROOF_GOOD) for subset in passing * often), *ends], probes.all_units
    )


def _times_to_fail(probes: ProbeCache, subset: Subset) -> int:
    return max(probes.question.repeat, _min_runs(probes, MIN_FAILURES) - probes.answers(subset).count(BAD))


def _require_failure(probes: ProbeCache, judge: SetJudge, subset: Subset) -> None:
    """Run the program with a set of items as a proof. Raise Inconclusive if it does not fail."""
    counts_as = judge_set(judge, subset, Purpose.PROOF_BAD, times=_times_to_fail(probes, subset))
    if counts_as is GOOD:
        raise Inconclusive("the items found do not fail on their own when they are launched again", subset)
    if counts_as is not BAD:
        raise Inconclusive(f"launched again, it {_result_text(counts_as)}", subset)


def _launch_rest(probes: ProbeCache, judge: SetJudge, subset: Iterable[int], at_least: int = MIN_PASSES) -> ProbeResult:
    times = max(probes.question.repeat, _min_runs(probes, at_least))
    return judge_set(judge, frozenset(subset), Purpose.PROOF_GOOD, times=times)


def _recheck_ends(probes: ProbeCache, judge: SetJudge, end: tuple[int, ...]) -> None:
    """Run the program with all items off and on again. Raise Inconclusive if a result has changed."""
    # The machine may have changed during the search. An end that cannot be judged now is accepted.
    ends = (("good", frozenset[int](), Purpose.RECHECK_GOOD, GOOD), ("bad", frozenset(end), Purpose.RECHECK_BAD, BAD))
    probes.launch_ahead([(subset, purpose) for _, subset, purpose, _ in ends], end)
    for name, subset, purpose, expected_result in ends:
        counts_as = judge_set(judge, subset, purpose, end)
        if counts_as not in (expected_result, ProbeResult.UNRESOLVED):
            raise Inconclusive(f"the {name} end is no longer {name}: launched again it {_result_text(counts_as)}")


def _gallop(probes: ProbeCache) -> tuple[int, ...] | None:
    """Switch on the first 1, 2, 4, ... items until the program fails. Return these items, or None if no set fails."""
    if not probes.question.unbounded:
        return None
    total = len(probes.units)
    lengths = [*(1 << i for i in range((total - 1).bit_length())), total]
    answers = probes.launch([frozenset(range(length)) for length in lengths], Purpose.GALLOP, probes.all_units)
    failing_lengths = (length for length, counts_as in zip(lengths, answers, strict=True) if counts_as in _FAILURES)
    return next((probes.all_units[:length] for length in failing_lengths), None)


def _launch_control(probes: ProbeCache, end: Subset, purpose: Purpose, expected_result: ProbeResult) -> ProbeResult:
    """Run the program with all items on or all off until it ends as expected, for a limited number of runs."""
    first = next(probes.launch([end], purpose, probes.all_units))
    if first in (expected_result, ProbeResult.UNRESOLVED):
        return first
    for counts_as in probes.launch([end] * (probes.question.controls - 1), purpose, probes.all_units):
        if counts_as in (expected_result, ProbeResult.UNRESOLVED):
            return counts_as
    return next((counts_as for counts_as in probes.answers(end) if counts_as is not GOOD), GOOD)


def _is_flaky(probes: ProbeCache, contradiction: Contradiction) -> bool:
    """Return whether one of two contradictory results changes when the program is run again."""
    if contradiction.good == contradiction.bad:
        return True
    often = [contradiction.good] * runs_to_show(HALF_RATE, probes.question.confidence)
    return BAD in probes.launch(often, Purpose.REPEAT, contradiction.good) or GOOD in probes.launch(
        [contradiction.bad], Purpose.REPEAT, contradiction.bad
    )


def _among_flaky_runs(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search for the items that make the program fail, if it fails in only some runs."""
    failing = frozenset(end)
    if (same_rate_answer := _compare_ends(probes, failing)) is not None:
        return same_rate_answer
    doubt = (1 - probes.question.confidence) / 4
    for attempt in range(_FLAKY_ATTEMPTS):
        # After a wrong conclusion the proof fails. The next attempt starts with all the runs so far.
        with suppress(Inconclusive):
            return _find_and_prove_if_judged(probes, BayesianSearch(probes, failing, doubt / 2**attempt), end)
    return _find_and_prove_if_judged(probes, BayesianSearch(probes, failing, doubt / 2**_FLAKY_ATTEMPTS), end)


def _find_and_prove_if_judged(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    try:
        return _find_and_prove(probes, judge, end)
    except UnjudgedGap as gap:
        if probes.question.kind is QuestionKind.ORDERED:
            return _prove_zones(probes, judge, end, gap)
        raise Inconclusive(_UNJUDGED_GAP_TEXT, gap.failing - gap.passing) from None


def _compare_ends(probes: ProbeCache, end: Subset) -> SearchAnswer | None:
    """Run the program alternately with all items off and all items on, until it is clear whether the failure rates
    differ.

    Returns None if they differ. If they differ by less than _SMALLEST_DIFFERENCE, returns the answer INDEPENDENT: the
    failure does not depend on what was varied. Raises Inconclusive if the runs show neither.
    """
    confidence = probes.question.confidence
    separation, pairs_used = RateDifferenceTest(), 0
    while not separation.is_shown(confidence):
        good, bad = (probes.judged_answers(subset) for subset in (frozenset[int](), end))
        if pairs_used < min(len(good), len(bad)):
            separation.add_pair(good[pairs_used] is BAD, bad[pairs_used] is BAD)
            pairs_used += 1
            continue
        if separation.pairs >= _MIN_PAIRS and separation.differs_by_less_than(
            _SMALLEST_DIFFERENCE, half_doubt_confidence(probes.question)
        ):
            if not separation.first_bad:
                raise Inconclusive(f"it fails too rarely to search for the cause: {_counts_text(separation)}")
            return SearchAnswer(
                kind=AnswerKind.INDEPENDENT,
                confidence=confidence,
                why=f"{_counts_text(separation)}; a difference of {_SMALLEST_DIFFERENCE:.0%} or more would have shown",
            )
        if pairs_used >= _MAX_PAIRS:
            raise Inconclusive(f"the failure rates of both ends are too close together: {_counts_text(separation)}")
        unjudged_counts = (
            len(probes.answers(subset)) - len(probes.judged_answers(subset)) for subset in (frozenset[int](), end)
        )
        if max(unjudged_counts) > pairs_used + _MAX_UNJUDGED:
            raise Inconclusive(f"most runs of one end could not be judged: {_counts_text(separation)}")
        missing_runs = [(frozenset[int](), Purpose.CONTROL_GOOD)] * (len(good) == pairs_used)
        missing_runs += [(end, Purpose.CONTROL_BAD)] * (len(bad) == pairs_used)
        probes.launch_ahead(missing_runs, end)
        for subset, purpose in missing_runs:
            list(probes.launch([subset], purpose, end))
    if separation.first_bad > separation.second_bad:
        raise Inconclusive(f"the good end fails more often than the bad one: {_counts_text(separation)}")
    return None


def _counts_text(separation: RateDifferenceTest) -> str:
    pairs, first_bad, second_bad = separation.pairs, separation.first_bad, separation.second_bad
    return f"the bad end failed {second_bad} of {pairs} times, the good end {first_bad} of {pairs}"


def _how_often(probes: ProbeCache, end: Subset, counts_as: ProbeResult) -> str:
    """Say how often the configuration `end` had this result, such as "2 of 3 times it fails in another way"."""
    answers = probes.answers(end)
    often = "" if len(answers) == 1 else f"{answers.count(counts_as)} of {len(answers)} times "
    return f"{often}it {_result_text(counts_as)}"


def _search_without_order(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search for the items that make the program fail, if switching on more items can turn a failure into a pass."""
    if probes.question.kind is QuestionKind.ORDERED:
        raise Inconclusive("it fails at a smaller value and passes at a larger one: there is no threshold")
    failing = min((observation.subset for observation in probes.observations if observation.counts_as is BAD), key=len)
    why = "switching on more items can turn a failure into a pass, and the deciding runs could not be judged"
    return _reduce_literally(probes, end, failing, why, _NOT_MONOTONE_TEXT)


def _search_around_unjudged(probes: ProbeCache, end: tuple[int, ...], gap: UnjudgedGap) -> SearchAnswer:
    """Continue the search after some sets had no usable result."""
    if probes.question.kind is QuestionKind.ORDERED:
        return _prove_zones(probes, LiteralJudge(probes), end, gap)
    return _reduce_literally(probes, end, gap.failing, _UNJUDGED_GAP_TEXT, "")


_NOT_MONOTONE_TEXT = (
    "it no longer fails without any one of these items, but other sets may fail too: switching on more items can turn a"
    " failure into a pass"
)
_UNJUDGED_GAP_TEXT = "everything between the passing and the failing end could not be judged or failed in another way"


def _prove_zones(probes: ProbeCache, judge: SetJudge, end: tuple[int, ...], gap: UnjudgedGap) -> SearchAnswer:
    """Return an undecided answer that lists the passing, the failing and the unjudged values."""
    _launch_proofs_together(probes, judge, gap.failing, gap.passing)
    _require_failure(probes, judge, gap.failing)
    if _launch_rest(probes, judge, gap.passing) is not GOOD:
        raise Inconclusive("the last passing value does not pass when it is launched again")
    _recheck_ends(probes, judge, end)
    between = [answer.counts_as for answer in probes.observations if gap.passing < answer.subset < gap.failing]
    zones_in_order = make_zones(len(gap.passing), len(gap.failing), len(end), between)
    hidden = "a different failure occurs between the passing and the failing values, and hides where this one begins"
    why = hidden if zones_in_order[1].counts_as is ProbeResult.DIFFERENT else _UNJUDGED_GAP_TEXT
    return replace(
        undecided_answer(probes, why, gap.failing - gap.passing),
        p_bad=judge.failure_rate,
        passing=probes.items(gap.passing),
        failing=probes.items(gap.failing),
        zones=zones_in_order,
    )


def _reduce_literally(probes: ProbeCache, end: tuple[int, ...], failing: Subset, why: str, caveat: str) -> SearchAnswer:
    """Reduce a failing set of items by running every smaller set, and prove the result."""
    reduce = shrink_range if probes.question.kind is QuestionKind.RANGE else ddmin
    culprit = reduce(probes, failing, _min_runs(probes, MIN_FAILURES))
    if culprit.unjudged:
        raise Inconclusive(why, culprit.members)
    literal = LiteralJudge(probes)
    _launch_proofs_together(probes, literal, culprit.members, *sets_without(probes, [culprit]))
    _require_failure(probes, literal, culprit.members)
    if reduce is ddmin and len(culprit.members) > 1 and not probes.question.together:
        judge_one_other_set(literal, culprit.members, probes.all_units, MIN_FAILURES)
    rest_results = [_launch_rest(probes, literal, rest) is GOOD for rest in sets_without(probes, [culprit])]
    _recheck_ends(probes, literal, end)
    surprises = _surprising_sets(probes, culprit)
    for subset in surprises:
        launches = runs_to_show(HALF_RATE, probes.question.confidence) - len(probes.judged_answers(subset))
        judge_set(literal, subset, Purpose.REPEAT, times=max(launches, 1))
    if surprises:
        caveat = caveat or "other sets ended differently than this answer predicts, so there may be more culprits"
    answer = culprits_answer(probes, literal, [culprit], all(rest_results), 1.0, caveat)
    return replace(answer, confidence=answer.confidence * (UNTESTED if surprises else 1.0))


def _surprising_sets(probes: ProbeCache, culprit: FailingSet) -> list[Subset]:
    """Return the smallest passing set with the culprit and the smallest failing set without it, if any."""
    observations = probes.observations
    passed = [answer.subset for answer in observations if answer.counts_as is GOOD and culprit.members <= answer.subset]
    failed = [
        answer.subset for answer in observations if answer.counts_as is BAD and not culprit.members <= answer.subset
    ]
    return [min(subsets, key=size_order) for subsets in (passed, failed) if subsets]


def _result_text(counts_as: ProbeResult) -> str:
    return {
        ProbeResult.GOOD: "passes",
        ProbeResult.BAD: "fails with the failure in question",
        ProbeResult.DIFFERENT: "fails in another way",
        ProbeResult.UNRESOLVED: "could not be judged",
    }[counts_as]
