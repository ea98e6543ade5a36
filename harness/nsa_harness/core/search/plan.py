"""The plan of a bisection, from the controls to the proof, and its answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from nsa_harness.core.experiment.statistics import RateDifferenceTest, runs_to_show
from nsa_harness.core.search.bayesian import BayesianSearch, Inconclusive
from nsa_harness.core.search.choice import among_values
from nsa_harness.core.search.exact_search import Chain, Contradiction, ExactSearch, UnjudgedGap, make_zones
from nsa_harness.core.search.minimal import (
    FailingSet,
    Judge,
    LiteralJudge,
    SetJudge,
    ddmin,
    drop_unneeded,
    drop_unneeded_ends,
    fails,
    find_failing_part,
    judge_set,
    only_count_matters,
    only_length_matters,
    other_sets_fail_too,
    ranges_without,
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

_SMALLEST_DIFFERENCE = 0.2  # if the rates of both ends differ by less, there is nothing to search for
_MAX_UNJUDGED = 5  # unjudged runs of an end, in excess of its judged ones
_FLAKY_ATTEMPTS = 4  # searches among flaky runs, before a last one whose reason is reported
# Pairs of runs of both ends, before the answer is that they fail equally often, or that their rates are too close.
_MIN_PAIRS, _MAX_PAIRS = 20, 100
# Launches of the answer that must fail, and of the rest that must pass. With fewer, a program with another rare failure
# produced wrong answers by chance.
MIN_FAILURES, MIN_PASSES = 3, 2
HALF_RATE = 0.5  # a sample must be large enough to show an exception that occurs in half of the sets, or of the runs
_FAILURES = (BAD, ProbeResult.DIFFERENT)


def find_smallest_difference(question: SearchQuestion, probe: Probe) -> SearchAnswer:
    """Return the smallest difference that makes it fail, with its proof, or an undecided answer with what is known.

    It runs controls, search, proof, and the controls again. Raises only what the probe raises, except OutOfBudget.
    """
    probes = ProbeCache(question, probe)
    try:
        return _between_ends(probes)
    except OutOfBudget as reason:
        return undecided_answer(probes, str(reason) or "the budget ended before an answer was found and proven")
    except Inconclusive as reason:
        return undecided_answer(probes, str(reason), reason.open_units)


def _between_ends(probes: ProbeCache) -> SearchAnswer:
    """Check both ends, and search only if they differ."""
    if probes.question.kind is QuestionKind.CHOICE:
        return among_values(probes)
    if probes.question.flaky:
        return _among_flaky_runs(probes, _gallop(probes) or probes.all_units)
    list(probes.launch([frozenset()] * (probes.question.baseline - 1), Purpose.CONTROL_GOOD, probes.all_units))
    good_end = _launch_control(probes, frozenset(), Purpose.CONTROL_GOOD, GOOD)
    if good_end is not GOOD:
        return undecided_answer(probes, f"the good end is not good: {_how_often(probes, frozenset(), good_end)}")
    end = _gallop(probes) or probes.all_units
    failing_results = [counts_as for counts_as in probes.answers(frozenset(end)) if counts_as in _FAILURES]
    bad_end = (
        failing_results[0] if failing_results else _launch_control(probes, frozenset(end), Purpose.CONTROL_BAD, BAD)
    )
    if bad_end is GOOD:
        return _never_failed_answer(probes, frozenset(end))
    if bad_end is not BAD:
        return undecided_answer(probes, f"the bad end is not bad: {_how_often(probes, frozenset(end), bad_end)}")
    return _search(probes, end)


def _never_failed_answer(probes: ProbeCache, end: Subset) -> SearchAnswer:
    """Return the answer for a bad end that never failed."""
    times, confidence = len(probes.answers(end)), probes.question.confidence
    rarer = 1 - (1 - confidence) ** (1 / times)
    return SearchAnswer(
        kind=AnswerKind.NONE,
        confidence=confidence,
        why=f"the bad end passed {times} of {times}: never seen failing; it may in less than {rarer:.0%} of runs",
        passing=probes.items(end),
    )


def _search(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search with each answer as final. If two contradict, search among flaky runs, or where more items may help."""
    if BAD in probes.answers(frozenset()) or GOOD in probes.answers(frozenset(end)):
        return _among_flaky_runs(probes, end)
    try:
        return _find_and_prove(probes, ExactSearch(probes), end)
    except Contradiction as contradiction:
        return (
            _among_flaky_runs(probes, end) if _is_flaky(probes, contradiction) else _search_without_order(probes, end)
        )
    except UnjudgedGap as gap:
        return _search_around_unjudged(probes, end, gap)


def _find_and_prove(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """Find the answer with this judge, prove it, check both ends again, and return it with its confidence."""
    is_ordered = probes.question.kind is QuestionKind.ORDERED
    answer = _find_threshold(probes, judge, end) if is_ordered else _find_culprits(probes, judge)
    _recheck_ends(probes, judge, end)
    judge.reach_confidence(half_doubt_confidence(probes.question))
    return replace(answer, confidence=answer.confidence * judge.confidence)


def half_doubt_confidence(question: SearchQuestion) -> float:
    """Return the confidence for the proof and for the sample, which share the allowed doubt equally."""
    return 1 - (1 - question.confidence) / 2


def _find_threshold(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """Find and prove the threshold. The value before it is repeated most, because a pass by chance would move it."""
    length = judge.first_failing_length(Chain(base=frozenset(), order=end), Purpose.RIGHT_EDGE)
    failing, passing = frozenset(end[:length]), frozenset(end[: length - 1])
    at_least = runs_to_show(HALF_RATE, probes.question.confidence) - 1
    _launch_proofs_ahead(probes, failing, passing, at_least)
    _require_failure(probes, judge, failing)
    if _launch_rest(probes, judge, passing, at_least) is not GOOD:
        raise Inconclusive(f"length {length} fails, but {length - 1} was not seen to pass")
    return SearchAnswer(
        kind=AnswerKind.THRESHOLD,
        items=(length,),
        p_bad=judge.failure_rate,
        passing=probes.items(range(length - 1)),
        failing=probes.items(range(length)),
    )


def _find_culprits(probes: ProbeCache, judge: Judge) -> SearchAnswer:
    """Find and prove one culprit after the other, each among the items that are left, until the rest passes."""
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
        culprit = drop_unneeded(judge, members, sample)
        # After a run that passed by chance, "any N items" looks like "exactly these items".
        if not (culprits or probes.question.together) and other_sets_fail_too(judge, culprit.members, rest, sample):
            return _prove_count(probes, judge, culprit.members, sample_confidence)
        rest = tuple(unit for unit in rest if unit not in culprit.members)
        _launch_proofs_ahead(probes, culprit.members, frozenset(rest))
        culprits.append(_prove_alone(probes, judge, culprit))
        counts_as = _launch_rest(probes, judge, rest)
        if counts_as is not BAD and (unexplained := _unexplained_set(judge, culprits)) is not None:
            # This set shares members with the culprits found. Did it fail by chance?
            _require_failure(probes, judge, unexplained)
            rest, counts_as = tuple(sorted(unexplained)), BAD
    return culprits_answer(probes, judge, culprits, counts_as is GOOD, sample_confidence)


def _unexplained_set(judge: Judge, culprits: Sequence[FailingSet]) -> Subset | None:
    """Return the smallest set that fails although it contains none of the culprits found; None if there is none."""
    others = (subset for subset in judge.failing_sets() if not any(culprit.members <= subset for culprit in culprits))
    return min(others, key=_size_order, default=None)


def _find_ranges(probes: ProbeCache, judge: Judge) -> SearchAnswer:
    """Find and prove one range after the other. The rest without a range is two ranges, one on either side."""
    sample = runs_to_show(HALF_RATE, half_doubt_confidence(probes.question))
    counts_as = cache(partial(_launch_rest, probes, judge))
    culprits: list[FailingSet] = []
    failing: Subset | None = frozenset(probes.all_units)
    while failing is not None:
        members = frozenset(shortest_failing_span(judge, tuple(sorted(failing))))
        if not culprits and only_length_matters(judge, members, len(probes.units), sample):
            is_exhaustive = tests_every_window(len(probes.units), len(members), sample)
            return _prove_count(probes, judge, members, 1.0 if is_exhaustive else 1 - HALF_RATE**sample)
        newest = _prove_alone(probes, judge, drop_unneeded_ends(judge, members, sample))
        culprits = [*(culprit for culprit in culprits if not newest.members <= culprit.members), newest]
        failing = next((rest for rest in _sets_without(probes, culprits) if counts_as(rest) is BAD), None)
        if failing is None and (failing := _unexplained_set(judge, culprits)) is not None:
            _require_failure(probes, judge, failing)
    rest_passes = all(counts_as(rest) is GOOD for rest in _sets_without(probes, culprits))
    return culprits_answer(probes, judge, sorted(culprits, key=lambda culprit: min(culprit.members)), rest_passes, 1.0)


def _sets_without(probes: ProbeCache, culprits: Sequence[FailingSet]) -> tuple[Subset, ...]:
    """Return the sets without the culprits: they must pass if there is no other culprit."""
    member_sets = [culprit.members for culprit in culprits]
    if probes.question.kind is QuestionKind.RANGE:
        return ranges_without(len(probes.units), member_sets)
    return (frozenset(probes.all_units).difference(*member_sets),)


def _prove_count(probes: ProbeCache, judge: Judge, first: Subset, sample_confidence: float) -> SearchAnswer:
    """Prove and return the answer that only the number of items matters: `first` fails, and one item fewer passes."""
    _require_failure(probes, judge, first)
    _launch_rest(probes, judge, sorted(first)[1:])
    return SearchAnswer(
        kind=AnswerKind.COUNT,
        items=(len(first),),
        confidence=sample_confidence,
        p_bad=judge.failure_rate,
        why="" if sample_confidence == 1 else "not all sets of the size were asked, but a sample",
        passing=probes.items(range(1, len(first))),
        failing=probes.items(range(len(first))),
    )


def _prove_alone(probes: ProbeCache, judge: Judge, culprit: FailingSet) -> FailingSet:
    _require_failure(probes, judge, culprit.members)
    if culprit.unjudged:
        raise Inconclusive("it fails together, but without some of its members it cannot be judged", culprit.members)
    return culprit


def _launch_proofs_ahead(probes: ProbeCache, failing: Subset, passing: Subset, at_least: int = MIN_PASSES) -> None:
    """Launch in parallel the proofs that `_must_fail` and `_ask_rest` will need."""
    bad = [(failing, Purpose.PROOF_BAD)] * _times_to_fail(probes, failing)
    good = [(passing, Purpose.PROOF_GOOD)] * max(probes.question.repeat, at_least)
    probes.launch_ahead([*bad, *good], probes.all_units)


def _times_to_fail(probes: ProbeCache, subset: Subset) -> int:
    return max(probes.question.repeat, MIN_FAILURES - probes.answers(subset).count(BAD))


def _require_failure(probes: ProbeCache, judge: SetJudge, subset: Subset) -> None:
    if not fails(judge, subset, Purpose.PROOF_BAD, times=_times_to_fail(probes, subset)):
        raise Inconclusive("what stands out does not fail alone when asked again", subset)


def _launch_rest(probes: ProbeCache, judge: SetJudge, subset: Iterable[int], at_least: int = MIN_PASSES) -> ProbeResult:
    return judge_set(judge, frozenset(subset), Purpose.PROOF_GOOD, times=max(probes.question.repeat, at_least))


def _recheck_ends(probes: ProbeCache, judge: SetJudge, end: tuple[int, ...]) -> None:
    """Launch both ends again, because the machine may have changed. An end that cannot be judged now is accepted.

    Raises Unsettled if an end counts differently than before.
    """
    ends = (("good", frozenset[int](), Purpose.RECHECK_GOOD, GOOD), ("bad", frozenset(end), Purpose.RECHECK_BAD, BAD))
    probes.launch_ahead([(subset, purpose) for _, subset, purpose, _ in ends], end)
    for name, subset, purpose, expected in ends:
        counts_as = judge_set(judge, subset, purpose, end)
        if counts_as not in (expected, ProbeResult.UNRESOLVED):
            raise Inconclusive(f"the {name} end is no longer {name}: asked again it {_result_text(counts_as)}")


def _gallop(probes: ProbeCache) -> tuple[int, ...] | None:
    """Return the first of the prefixes 1, 2, 4, ... that fails; None if the bad end is known, or if none fails.

    A prefix that fails in another way, such as out of memory, ends the gallop too: larger values are not tried.
    """
    if not probes.question.unbounded:
        return None
    total = len(probes.units)
    lengths = [*(1 << i for i in range((total - 1).bit_length())), total]
    answers = probes.launch([frozenset(range(length)) for length in lengths], Purpose.GALLOP, probes.all_units)
    failing_lengths = (length for length, counts_as in zip(lengths, answers, strict=True) if counts_as in _FAILURES)
    return next((probes.all_units[:length] for length in failing_lengths), None)


def _launch_control(probes: ProbeCache, end: Subset, purpose: Purpose, expected: ProbeResult) -> ProbeResult:
    """Return what an end counts as. One expected result among `controls` launches is enough: a failure may be rare."""
    first = next(probes.launch([end], purpose, probes.all_units))
    if first in (expected, ProbeResult.UNRESOLVED):
        return first
    for counts_as in probes.launch([end] * (probes.question.controls - 1), purpose, probes.all_units):
        if counts_as in (expected, ProbeResult.UNRESOLVED):
            return counts_as
    return next((counts_as for counts_as in probes.answers(end) if counts_as is not GOOD), GOOD)


def _is_flaky(probes: ProbeCache, contradiction: Contradiction) -> bool:
    """Whether one of two contradictory answers changes when its set is launched again."""
    if contradiction.good == contradiction.bad:
        return True
    often = [contradiction.good] * runs_to_show(HALF_RATE, probes.question.confidence)
    return BAD in probes.launch(often, Purpose.REPEAT, contradiction.good) or GOOD in probes.launch(
        [contradiction.bad], Purpose.REPEAT, contradiction.bad
    )


def _among_flaky_runs(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search among flaky runs, after pairs of runs have shown that the bad end fails more often than the good one."""
    failing = frozenset(end)
    if (same_rate_answer := _compare_ends(probes, failing)) is not None:
        return same_rate_answer
    doubt = (1 - probes.question.confidence) / 4
    for attempt in range(_FLAKY_ATTEMPTS):
        # One wrong conclusion leads to a proof that fails. The next attempt starts from all the runs so far.
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
    """Launch both ends in pairs until their failure rates differ, and return None.

    If the rates differ by less than _SMALLEST_DIFFERENCE, return the answer that the failure does not depend on what
    was varied. Raises Unsettled if the runs decide neither.
    """
    confidence = probes.question.confidence
    separation, pairs_used = RateDifferenceTest(), 0
    while not separation.is_shown(confidence):
        good, bad = (_judged_results(probes, subset) for subset in (frozenset[int](), end))
        if pairs_used < min(len(good), len(bad)):
            separation.add_pair(good[pairs_used] is BAD, bad[pairs_used] is BAD)
            pairs_used += 1
            continue
        if separation.pairs >= _MIN_PAIRS and separation.differs_by_less_than(
            _SMALLEST_DIFFERENCE, half_doubt_confidence(probes.question)
        ):
            if not separation.first_bad:
                raise Inconclusive(f"it fails too seldom to search for what it takes: {_counts_text(separation)}")
            return SearchAnswer(
                kind=AnswerKind.INDEPENDENT,
                confidence=confidence,
                why=f"{_counts_text(separation)}; a difference of {_SMALLEST_DIFFERENCE:.0%} or more would have shown",
            )
        if pairs_used >= _MAX_PAIRS:
            raise Inconclusive(f"too little to tell the ends apart: {_counts_text(separation)}")
        unjudged_counts = (
            len(probes.answers(subset)) - len(_judged_results(probes, subset)) for subset in (frozenset[int](), end)
        )
        if max(unjudged_counts) > pairs_used + _MAX_UNJUDGED:
            raise Inconclusive(f"one end mostly cannot be judged: {_counts_text(separation)}")
        missing_runs = [(frozenset[int](), Purpose.CONTROL_GOOD)] * (len(good) == pairs_used)
        missing_runs += [(end, Purpose.CONTROL_BAD)] * (len(bad) == pairs_used)
        probes.launch_ahead(missing_runs, end)
        for subset, purpose in missing_runs:
            list(probes.launch([subset], purpose, end))
    if separation.first_bad > separation.second_bad:
        raise Inconclusive(f"the good end fails more often than the bad one: {_counts_text(separation)}")
    return None


def _judged_results(probes: ProbeCache, subset: Subset) -> list[ProbeResult]:
    return [counts_as for counts_as in probes.answers(subset) if counts_as in (GOOD, BAD)]


def _counts_text(separation: RateDifferenceTest) -> str:
    pairs, first_bad, second_bad = separation.pairs, separation.first_bad, separation.second_bad
    return f"the bad end failed {second_bad} of {pairs} times, the good end {first_bad} of {pairs}"


def _how_often(probes: ProbeCache, end: Subset, counts_as: ProbeResult) -> str:
    """Return "2 of 3 times it fails in another way", without numbers for an end that was launched once."""
    answers = probes.answers(end)
    often = "" if len(answers) == 1 else f"{answers.count(counts_as)} of {len(answers)} times "
    return f"{often}it {_result_text(counts_as)}"


def _search_without_order(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search where more items may pass again: answers imply nothing about other sets, so only launched sets count."""
    if probes.question.kind is QuestionKind.ORDERED:
        raise Inconclusive("it fails at a smaller value and passes at a larger one: there is no threshold")
    failing = min((observation.subset for observation in probes.observations if observation.counts_as is BAD), key=len)
    why = "more items may pass where fewer fail, and what decides cannot be judged"
    return _reduce_literally(probes, end, failing, why, _NOT_MONOTONE_TEXT)


def _search_around_unjudged(probes: ProbeCache, end: tuple[int, ...], gap: UnjudgedGap) -> SearchAnswer:
    """Search around what could not be judged, if the question allows other sets."""
    if probes.question.kind is QuestionKind.ORDERED:
        return _prove_zones(probes, LiteralJudge(probes), end, gap)
    return _reduce_literally(probes, end, gap.failing, _UNJUDGED_GAP_TEXT, "")


_UNJUDGED_GAP_TEXT = "between what passes and what fails, the rest was neither good nor bad"


def _prove_zones(probes: ProbeCache, judge: SetJudge, end: tuple[int, ...], gap: UnjudgedGap) -> SearchAnswer:
    """Return the zones around another failure that hides the edge, after launching their borders again."""
    _require_failure(probes, judge, gap.failing)
    if _launch_rest(probes, judge, gap.passing) is not GOOD:
        raise Inconclusive(f"length {len(gap.passing)} was seen to pass, but not when asked again")
    _recheck_ends(probes, judge, end)
    between = [answer.counts_as for answer in probes.observations if gap.passing < answer.subset < gap.failing]
    zones_in_order = make_zones(len(gap.passing), len(gap.failing), len(end), between)
    hidden = "another failure lies between what passes and what fails in the way sought, and hides where that begins"
    why = hidden if zones_in_order[1].counts_as is ProbeResult.DIFFERENT else _UNJUDGED_GAP_TEXT
    return replace(
        undecided_answer(probes, why, gap.failing - gap.passing),
        p_bad=judge.failure_rate,
        passing=probes.items(gap.passing),
        failing=probes.items(gap.failing),
        zones=zones_in_order,
    )


def _reduce_literally(probes: ProbeCache, end: tuple[int, ...], failing: Subset, why: str, caveat: str) -> SearchAnswer:
    """Reduce a failing set by launching every set, prove the result, and return it; `why`: the reason if it cannot."""
    ranges = probes.question.kind is QuestionKind.RANGE
    culprit = shrink_range(probes, failing) if ranges else ddmin(probes, failing)
    if culprit.unjudged:
        raise Inconclusive(why, culprit.members)
    literal = LiteralJudge(probes)
    _require_failure(probes, literal, culprit.members)
    rest_results = [_launch_rest(probes, literal, rest) is GOOD for rest in _sets_without(probes, [culprit])]
    _recheck_ends(probes, literal, end)
    # If only the culprit fails, no set that contains it passes, and no other set fails.
    if any(
        observation.counts_as is (GOOD if culprit.members <= observation.subset else BAD)
        for observation in probes.observations
    ):
        caveat = caveat or "other sets end otherwise than this one makes them expected to, so there may be more"
    return culprits_answer(probes, literal, [culprit], all(rest_results), 1.0, caveat)


def _result_text(counts_as: ProbeResult) -> str:
    return {
        ProbeResult.GOOD: "passes",
        ProbeResult.BAD: "fails in the way sought",
        ProbeResult.DIFFERENT: "fails in another way",
        ProbeResult.UNRESOLVED: "could not be judged",
    }[counts_as]


def undecided_answer(probes: ProbeCache, why: str, open_units: Subset = frozenset()) -> SearchAnswer:
    """Return an undecided answer: the smallest set that failed, its largest part that passed, and the items between."""
    failing_set = min(
        (observation.subset for observation in probes.observations if observation.counts_as is BAD),
        key=_size_order,
        default=None,
    )
    passing_sets = [observation.subset for observation in probes.observations if observation.counts_as is GOOD]
    passing_inside = [subset for subset in passing_sets if failing_set is None or subset < failing_set]
    passing_set = max(passing_inside, key=len, default=None)
    needed = _needed_members(probes, failing_set)
    within = frozenset(probes.all_units) if failing_set is None else failing_set
    is_ordered = probes.question.kind is QuestionKind.ORDERED
    open_members = within - (passing_set or frozenset()) if is_ordered else within - needed
    return SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why=why,
        open=tuple(sorted(probes.items(open_units - needed or open_members))),
        known=() if is_ordered else tuple(sorted(probes.items(needed))),
        passing=None if passing_set is None else probes.items(passing_set),
        failing=None if failing_set is None else probes.items(failing_set),
    )


def _needed_members(probes: ProbeCache, failing: Subset | None) -> Subset:
    """Return the members without which a failing set passes, or none if answers contradict each other."""
    bad = [observation.subset for observation in probes.observations if observation.counts_as is BAD]
    good = [observation.subset for observation in probes.observations if observation.counts_as is GOOD]
    is_contradicted = probes.question.flaky or any(
        failing_set <= passing_set for failing_set in bad for passing_set in good
    )
    if failing is None or is_contradicted:
        return frozenset()
    return frozenset().union(*(failing - passing_set for passing_set in good if len(failing - passing_set) == 1))


def culprits_answer(
    probes: ProbeCache,
    judge: SetJudge,
    culprits: Sequence[FailingSet],
    rest_passes: bool,
    sample_confidence: float,
    caveat: str = "",
) -> SearchAnswer:
    """Return the answer with one or several culprits, each proven to fail alone.

    Its caveat notes whether the rest passed: if not, there may be more culprits.
    """
    groups = tuple(probes.items(culprit.members) for culprit in culprits)
    kind, items = _kind_and_items(groups)
    return SearchAnswer(
        kind=kind,
        items=items,
        groups=groups if len(groups) > 1 else (),
        confidence=sample_confidence if any(culprit.sampled for culprit in culprits) else 1.0,
        p_bad=judge.failure_rate,
        why=caveat or _caveat(probes, culprits, rest_passes),
        passing=_passing_set(probes, culprits),
        failing=groups[0],
    )


def _caveat(probes: ProbeCache, culprits: Sequence[FailingSet], rest_passes: bool) -> str:
    if not rest_passes:
        return "everything but the answer was not seen to pass, so there may be more"
    if any(culprit.sampled for culprit in culprits):
        return "not each member was taken away by itself, but both ends and a sample"
    if probes.question.kind is QuestionKind.RANGE and any(len(culprit.members) > 2 for culprit in culprits):
        return "no smaller range in it fails; whether it takes all that lies between its ends, no range can tell"
    return ""


_NOT_MONOTONE_TEXT = (
    "without any one of its members it no longer fails, but other sets may: more items pass where fewer fail"
)


def _passing_set(probes: ProbeCache, culprits: Sequence[FailingSet]) -> Subset | None:
    """Return the largest rest without the culprits that passed, else a culprit without one member, else None."""
    rests_first = sorted(_sets_without(probes, culprits), key=len, reverse=True)
    without = (culprit.members - {member} for culprit in culprits for member in sorted(culprit.members))
    passing_sets = (subset for subset in (*rests_first, *without) if GOOD in probes.answers(subset))
    return next(map(probes.items, passing_sets), None)


def _kind_and_items(groups: Sequence[Subset]) -> tuple[AnswerKind, tuple[int, ...]]:
    if len(groups) > 1:
        return AnswerKind.SEVERAL, tuple(sorted(frozenset[int]().union(*groups)))
    items = tuple(sorted(groups[0]))
    if len(items) == 1:
        return AnswerKind.SINGLE, items
    if items[-1] - items[0] + 1 == len(items):
        return AnswerKind.RANGE, (items[0], items[-1] + 1)
    return AnswerKind.SET, items


def _size_order(subset: Collection[int]) -> tuple[int, list[int]]:
    return len(subset), sorted(subset)
