"""The plan of a bisection, from the controls to the proof, and its answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from nsa_harness.core.experiment.statistics import Separation, tries
from nsa_harness.core.search.bayesian import BayesianSearch, Unsettled
from nsa_harness.core.search.choice import among_values
from nsa_harness.core.search.exact_search import Chain, Contradicted, ExactSearch, Unjudged, zones
from nsa_harness.core.search.minimal import (
    FailingSet,
    Judge,
    Literal,
    SetJudge,
    all_windows_asked,
    ask,
    ddmin,
    fails,
    minimal,
    only_the_length,
    only_the_number,
    others_fail_too,
    rests,
    shortest,
    shrunk,
    standing_out,
    stretch,
)
from nsa_harness.core.search.question import (
    BAD,
    GOOD,
    AnswerKind,
    CountsAs,
    OutOfBudget,
    Probe,
    ProbeCache,
    Purpose,
    QuestionKind,
    SearchAnswer,
    SearchQuestion,
    Subset,
)

_SMALLEST_DIFFERENCE = 0.2  # if the rates of both ends differ by less, there is nothing to search for
_MOST_UNJUDGED = 5  # unjudged runs of an end, in excess of its judged ones
_ATTEMPTS = 4  # searches among flaky runs, before a last one whose reason is reported
# Pairs of runs of both ends, before the answer is that they fail equally often, or that their rates are too close.
_FEWEST_PAIRS, _MOST_PAIRS = 20, 100
# Launches of the answer that must fail, and of the rest that must pass. With fewer, a program with another rare failure
# produced wrong answers by chance.
SEEN_FAILING, SEEN_PASSING = 3, 2
HALF = 0.5  # a sample must be large enough to show an exception that occurs in half of the sets, or of the runs
_FAILED = (BAD, CountsAs.DIFFERENT)


def find(question: SearchQuestion, probe: Probe) -> SearchAnswer:
    """Return the smallest difference that makes it fail, with its proof, or an undecided answer with what is known.

    It runs controls, search, proof, and the controls again. Raises only what the probe raises, except OutOfBudget.
    """
    probes = ProbeCache(question, probe)
    try:
        return _between_ends(probes)
    except OutOfBudget as reason:
        return so_far(probes, str(reason) or "the budget ended before an answer was found and proven")
    except Unsettled as reason:
        return so_far(probes, str(reason), reason.open_units)


def _between_ends(probes: ProbeCache) -> SearchAnswer:
    """Check both ends, and search only if they differ."""
    if probes.question.kind is QuestionKind.CHOICE:
        return among_values(probes)
    if probes.question.flaky:
        return _among_flaky_runs(probes, _gallop(probes) or probes.everything)
    list(probes.ask([frozenset()] * (probes.question.baseline - 1), Purpose.CONTROL_GOOD, probes.everything))
    good_end = _control(probes, frozenset(), Purpose.CONTROL_GOOD, GOOD)
    if good_end is not GOOD:
        return so_far(probes, f"the good end is not good: {_how_often(probes, frozenset(), good_end)}")
    end = _gallop(probes) or probes.everything
    failed = [counts_as for counts_as in probes.answers(frozenset(end)) if counts_as in _FAILED]
    bad_end = failed[0] if failed else _control(probes, frozenset(end), Purpose.CONTROL_BAD, BAD)
    if bad_end is GOOD:
        return _never_failed(probes, frozenset(end))
    if bad_end is not BAD:
        return so_far(probes, f"the bad end is not bad: {_how_often(probes, frozenset(end), bad_end)}")
    return _search(probes, end)


def _never_failed(probes: ProbeCache, end: Subset) -> SearchAnswer:
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
    except Contradicted as seen:
        return _among_flaky_runs(probes, end) if _is_flaky(probes, seen) else _search_without_order(probes, end)
    except Unjudged as gap:
        return _search_around_unjudged(probes, end, gap)


def _find_and_prove(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """Find the answer with this judge, prove it, check both ends again, and return it with its confidence."""
    ordered = probes.question.kind is QuestionKind.ORDERED
    answer = _threshold_answer(probes, judge, end) if ordered else _culprits_answer(probes, judge)
    _recheck(probes, judge, end)
    judge.make_sure(with_half_the_doubt(probes.question))
    return replace(answer, confidence=answer.confidence * judge.sure)


def with_half_the_doubt(question: SearchQuestion) -> float:
    """Return the confidence for the proof and for the sample, which share the allowed doubt equally."""
    return 1 - (1 - question.confidence) / 2


def _threshold_answer(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """Find and prove the threshold. The value before it is repeated most, because a pass by chance would move it."""
    length = judge.edge(Chain(base=frozenset(), order=end), Purpose.RIGHT_EDGE)
    failing, passing = frozenset(end[:length]), frozenset(end[: length - 1])
    at_least = tries(HALF, probes.question.confidence) - 1
    _launch_proofs_ahead(probes, failing, passing, at_least)
    _must_fail(probes, judge, failing)
    if _ask_rest(probes, judge, passing, at_least) is not GOOD:
        raise Unsettled(f"length {length} fails, but {length - 1} was not seen to pass")
    return SearchAnswer(
        kind=AnswerKind.THRESHOLD,
        items=(length,),
        p_bad=judge.rate,
        passing=probes.items(range(length - 1)),
        failing=probes.items(range(length)),
    )


def _culprits_answer(probes: ProbeCache, judge: Judge) -> SearchAnswer:
    """Find and prove one culprit after the other, each among the items that are left, until the rest passes."""
    if probes.question.kind is QuestionKind.RANGE:
        return _ranges_answer(probes, judge)
    sample = tries(HALF, with_half_the_doubt(probes.question))
    sampled = 1 - HALF**sample
    found: list[FailingSet] = []
    rest, counts_as = probes.everything, BAD
    while counts_as is BAD:
        members = standing_out(judge, rest)
        if not found and not probes.question.together and only_the_number(judge, members, rest, sample):
            return _count_answer(probes, judge, members, sampled)
        culprit = minimal(judge, members, sample)
        # After a run that passed by chance, "any N items" looks like "exactly these items".
        if not (found or probes.question.together) and others_fail_too(judge, culprit.members, rest, sample):
            return _count_answer(probes, judge, culprit.members, sampled)
        rest = tuple(unit for unit in rest if unit not in culprit.members)
        _launch_proofs_ahead(probes, culprit.members, frozenset(rest))
        found.append(_prove_alone(probes, judge, culprit))
        counts_as = _ask_rest(probes, judge, rest)
        if counts_as is not BAD and (other := _unexplained(judge, found)) is not None:
            # This set shares members with the culprits found. Did it fail by chance?
            _must_fail(probes, judge, other)
            rest, counts_as = tuple(sorted(other)), BAD
    return of_culprits(probes, judge, found, counts_as is GOOD, sampled)


def _unexplained(judge: Judge, found: Sequence[FailingSet]) -> Subset | None:
    """Return the smallest set that fails although it contains none of the culprits found; None if there is none."""
    others = (subset for subset in judge.failed() if not any(culprit.members <= subset for culprit in found))
    return min(others, key=_order, default=None)


def _ranges_answer(probes: ProbeCache, judge: Judge) -> SearchAnswer:
    """Find and prove one range after the other. The rest without a range is two ranges, one on either side."""
    sample = tries(HALF, with_half_the_doubt(probes.question))
    counts_as = cache(partial(_ask_rest, probes, judge))
    found: list[FailingSet] = []
    failing: Subset | None = frozenset(probes.everything)
    while failing is not None:
        members = frozenset(stretch(judge, tuple(sorted(failing))))
        if not found and only_the_length(judge, members, len(probes.units), sample):
            whole = all_windows_asked(len(probes.units), len(members), sample)
            return _count_answer(probes, judge, members, 1.0 if whole else 1 - HALF**sample)
        new = _prove_alone(probes, judge, shortest(judge, members, sample))
        found = [*(culprit for culprit in found if not new.members <= culprit.members), new]
        failing = next((rest for rest in _rests(probes, found) if counts_as(rest) is BAD), None)
        if failing is None and (failing := _unexplained(judge, found)) is not None:
            _must_fail(probes, judge, failing)
    passed = all(counts_as(rest) is GOOD for rest in _rests(probes, found))
    return of_culprits(probes, judge, sorted(found, key=lambda culprit: min(culprit.members)), passed, 1.0)


def _rests(probes: ProbeCache, found: Sequence[FailingSet]) -> tuple[Subset, ...]:
    """Return the sets without the culprits: they must pass if there is no other culprit."""
    culprits = [culprit.members for culprit in found]
    if probes.question.kind is QuestionKind.RANGE:
        return rests(len(probes.units), culprits)
    return (frozenset(probes.everything).difference(*culprits),)


def _count_answer(probes: ProbeCache, judge: Judge, first: Subset, sampled: float) -> SearchAnswer:
    """Prove and return the answer that only the number of items matters: `first` fails, and one item fewer passes."""
    _must_fail(probes, judge, first)
    _ask_rest(probes, judge, sorted(first)[1:])
    return SearchAnswer(
        kind=AnswerKind.COUNT,
        items=(len(first),),
        confidence=sampled,
        p_bad=judge.rate,
        why="" if sampled == 1 else "not all sets of the size were asked, but a sample",
        passing=probes.items(range(1, len(first))),
        failing=probes.items(range(len(first))),
    )


def _prove_alone(probes: ProbeCache, judge: Judge, culprit: FailingSet) -> FailingSet:
    _must_fail(probes, judge, culprit.members)
    if culprit.unjudged:
        raise Unsettled("it fails together, but without some of its members it cannot be judged", culprit.members)
    return culprit


def _launch_proofs_ahead(probes: ProbeCache, failing: Subset, passing: Subset, at_least: int = SEEN_PASSING) -> None:
    """Launch in parallel the proofs that `_must_fail` and `_ask_rest` will need."""
    bad = [(failing, Purpose.PROOF_BAD)] * _times_to_fail(probes, failing)
    good = [(passing, Purpose.PROOF_GOOD)] * max(probes.question.repeat, at_least)
    probes.ahead([*bad, *good], probes.everything)


def _times_to_fail(probes: ProbeCache, subset: Subset) -> int:
    return max(probes.question.repeat, SEEN_FAILING - probes.answers(subset).count(BAD))


def _must_fail(probes: ProbeCache, judge: SetJudge, subset: Subset) -> None:
    if not fails(judge, subset, Purpose.PROOF_BAD, times=_times_to_fail(probes, subset)):
        raise Unsettled("what stands out does not fail alone when asked again", subset)


def _ask_rest(probes: ProbeCache, judge: SetJudge, subset: Iterable[int], at_least: int = SEEN_PASSING) -> CountsAs:
    return ask(judge, frozenset(subset), Purpose.PROOF_GOOD, times=max(probes.question.repeat, at_least))


def _recheck(probes: ProbeCache, judge: SetJudge, end: tuple[int, ...]) -> None:
    """Launch both ends again, because the machine may have changed. An end that cannot be judged now is accepted.

    Raises Unsettled if an end counts differently than before.
    """
    ends = (("good", frozenset[int](), Purpose.RECHECK_GOOD, GOOD), ("bad", frozenset(end), Purpose.RECHECK_BAD, BAD))
    probes.ahead([(subset, purpose) for _, subset, purpose, _ in ends], end)
    for name, subset, purpose, expected in ends:
        counts_as = ask(judge, subset, purpose, end)
        if counts_as not in (expected, CountsAs.UNRESOLVED):
            raise Unsettled(f"the {name} end is no longer {name}: asked again it {_result_text(counts_as)}")


def _gallop(probes: ProbeCache) -> tuple[int, ...] | None:
    """Return the first of the prefixes 1, 2, 4, ... that fails; None if the bad end is known, or if none fails.

    A prefix that fails in another way, such as out of memory, ends the gallop too: larger values are not tried.
    """
    if not probes.question.unbounded:
        return None
    total = len(probes.units)
    lengths = [*(1 << i for i in range((total - 1).bit_length())), total]
    answers = probes.ask([frozenset(range(length)) for length in lengths], Purpose.GALLOP, probes.everything)
    failed = (length for length, counts_as in zip(lengths, answers, strict=True) if counts_as in _FAILED)
    return next((probes.everything[:length] for length in failed), None)


def _control(probes: ProbeCache, end: Subset, purpose: Purpose, expected: CountsAs) -> CountsAs:
    """Return what an end counts as. One expected result among `controls` launches is enough: a failure may be rare."""
    first = next(probes.ask([end], purpose, probes.everything))
    if first in (expected, CountsAs.UNRESOLVED):
        return first
    for counts_as in probes.ask([end] * (probes.question.controls - 1), purpose, probes.everything):
        if counts_as in (expected, CountsAs.UNRESOLVED):
            return counts_as
    return next((counts_as for counts_as in probes.answers(end) if counts_as is not GOOD), GOOD)


def _is_flaky(probes: ProbeCache, seen: Contradicted) -> bool:
    """Whether one of two contradictory answers changes when its set is launched again."""
    if seen.good == seen.bad:
        return True
    often = [seen.good] * tries(HALF, probes.question.confidence)
    return BAD in probes.ask(often, Purpose.REPEAT, seen.good) or GOOD in probes.ask(
        [seen.bad], Purpose.REPEAT, seen.bad
    )


def _among_flaky_runs(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search among flaky runs, after pairs of runs have shown that the bad end fails more often than the good one."""
    failing = frozenset(end)
    if (alike := _ends_alike(probes, failing)) is not None:
        return alike
    doubt = (1 - probes.question.confidence) / 4
    for attempt in range(_ATTEMPTS):
        # One wrong conclusion leads to a proof that fails. The next attempt starts from all the runs so far.
        with suppress(Unsettled):
            return _find_and_prove_if_judged(probes, BayesianSearch(probes, failing, doubt / 2**attempt), end)
    return _find_and_prove_if_judged(probes, BayesianSearch(probes, failing, doubt / 2**_ATTEMPTS), end)


def _find_and_prove_if_judged(probes: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    try:
        return _find_and_prove(probes, judge, end)
    except Unjudged as gap:
        if probes.question.kind is QuestionKind.ORDERED:
            return _zones_answer(probes, judge, end, gap)
        raise Unsettled(_NEITHER, gap.failing - gap.passing) from None


def _ends_alike(probes: ProbeCache, end: Subset) -> SearchAnswer | None:
    """Launch both ends in pairs until their failure rates differ, and return None.

    If the rates differ by less than _SMALLEST_DIFFERENCE, return the answer that the failure does not depend on what
    was varied. Raises Unsettled if the runs decide neither.
    """
    confidence = probes.question.confidence
    separation, taken = Separation(), 0
    while not separation.shown(confidence):
        good, bad = (_judged(probes, subset) for subset in (frozenset[int](), end))
        if taken < min(len(good), len(bad)):
            separation.learn(good[taken] is BAD, bad[taken] is BAD)
            taken += 1
            continue
        if separation.pairs >= _FEWEST_PAIRS and separation.no_more_than(
            _SMALLEST_DIFFERENCE, with_half_the_doubt(probes.question)
        ):
            if not separation.first_bad:
                raise Unsettled(f"it fails too seldom to search for what it takes: {_counts(separation)}")
            return SearchAnswer(
                kind=AnswerKind.INDEPENDENT,
                confidence=confidence,
                why=f"{_counts(separation)}; a difference of {_SMALLEST_DIFFERENCE:.0%} or more would have shown",
            )
        if taken >= _MOST_PAIRS:
            raise Unsettled(f"too little to tell the ends apart: {_counts(separation)}")
        unjudged = (len(probes.answers(subset)) - len(_judged(probes, subset)) for subset in (frozenset[int](), end))
        if max(unjudged) > taken + _MOST_UNJUDGED:
            raise Unsettled(f"one end mostly cannot be judged: {_counts(separation)}")
        lacking = [(frozenset[int](), Purpose.CONTROL_GOOD)] * (len(good) == taken)
        lacking += [(end, Purpose.CONTROL_BAD)] * (len(bad) == taken)
        probes.ahead(lacking, end)
        for subset, purpose in lacking:
            list(probes.ask([subset], purpose, end))
    if separation.first_bad > separation.second_bad:
        raise Unsettled(f"the good end fails more often than the bad one: {_counts(separation)}")
    return None


def _judged(probes: ProbeCache, subset: Subset) -> list[CountsAs]:
    return [counts_as for counts_as in probes.answers(subset) if counts_as in (GOOD, BAD)]


def _counts(seen: Separation) -> str:
    return f"the bad end failed {seen.second_bad} of {seen.pairs} times, the good end {seen.first_bad} of {seen.pairs}"


def _how_often(probes: ProbeCache, end: Subset, counts_as: CountsAs) -> str:
    """Return "2 of 3 times it fails in another way", without numbers for an end that was launched once."""
    answers = probes.answers(end)
    often = "" if len(answers) == 1 else f"{answers.count(counts_as)} of {len(answers)} times "
    return f"{often}it {_result_text(counts_as)}"


def _search_without_order(probes: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Search where more items may pass again: answers imply nothing about other sets, so only launched sets count."""
    if probes.question.kind is QuestionKind.ORDERED:
        raise Unsettled("it fails at a smaller value and passes at a larger one: there is no threshold")
    failing = min((seen.subset for seen in probes.observations if seen.counts_as is BAD), key=len)
    why = "more items may pass where fewer fail, and what decides cannot be judged"
    return _reduce_literally(probes, end, failing, why, _ONLY_WHAT_WAS_ASKED)


def _search_around_unjudged(probes: ProbeCache, end: tuple[int, ...], gap: Unjudged) -> SearchAnswer:
    """Search around what could not be judged, if the question allows other sets."""
    if probes.question.kind is QuestionKind.ORDERED:
        return _zones_answer(probes, Literal(probes), end, gap)
    return _reduce_literally(probes, end, gap.failing, _NEITHER, "")


_NEITHER = "between what passes and what fails, the rest was neither good nor bad"


def _zones_answer(probes: ProbeCache, judge: SetJudge, end: tuple[int, ...], gap: Unjudged) -> SearchAnswer:
    """Return the zones around another failure that hides the edge, after launching their borders again."""
    _must_fail(probes, judge, gap.failing)
    if _ask_rest(probes, judge, gap.passing) is not GOOD:
        raise Unsettled(f"length {len(gap.passing)} was seen to pass, but not when asked again")
    _recheck(probes, judge, end)
    between = [answer.counts_as for answer in probes.observations if gap.passing < answer.subset < gap.failing]
    found = zones(len(gap.passing), len(gap.failing), len(end), between)
    hidden = "another failure lies between what passes and what fails in the way sought, and hides where that begins"
    why = hidden if found[1].counts_as is CountsAs.DIFFERENT else _NEITHER
    return replace(
        so_far(probes, why, gap.failing - gap.passing),
        p_bad=judge.rate,
        passing=probes.items(gap.passing),
        failing=probes.items(gap.failing),
        zones=found,
    )


def _reduce_literally(probes: ProbeCache, end: tuple[int, ...], failing: Subset, why: str, caveat: str) -> SearchAnswer:
    """Reduce a failing set by launching every set, prove the result, and return it; `why`: the reason if it cannot."""
    ranges = probes.question.kind is QuestionKind.RANGE
    culprit = shrunk(probes, failing) if ranges else ddmin(probes, failing)
    if culprit.unjudged:
        raise Unsettled(why, culprit.members)
    literal = Literal(probes)
    _must_fail(probes, literal, culprit.members)
    passed = [_ask_rest(probes, literal, rest) is GOOD for rest in _rests(probes, [culprit])]
    _recheck(probes, literal, end)
    # If only the culprit fails, no set that contains it passes, and no other set fails.
    if any(seen.counts_as is (GOOD if culprit.members <= seen.subset else BAD) for seen in probes.observations):
        caveat = caveat or "other sets end otherwise than this one makes them expected to, so there may be more"
    return of_culprits(probes, literal, [culprit], all(passed), 1.0, caveat)


def _result_text(counts_as: CountsAs) -> str:
    return {
        CountsAs.GOOD: "passes",
        CountsAs.BAD: "fails in the way sought",
        CountsAs.DIFFERENT: "fails in another way",
        CountsAs.UNRESOLVED: "could not be judged",
    }[counts_as]


def so_far(probes: ProbeCache, why: str, open_units: Subset = frozenset()) -> SearchAnswer:
    """Return an undecided answer: the smallest set that failed, its largest part that passed, and the items between."""
    failing = min((seen.subset for seen in probes.observations if seen.counts_as is BAD), key=_order, default=None)
    passed = [seen.subset for seen in probes.observations if seen.counts_as is GOOD]
    inside = [subset for subset in passed if failing is None or subset < failing]
    passing = max(inside, key=len, default=None)
    known = _needed_members(probes, failing)
    within = frozenset(probes.everything) if failing is None else failing
    ordered = probes.question.kind is QuestionKind.ORDERED
    left = within - (passing or frozenset()) if ordered else within - known
    return SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why=why,
        open=tuple(sorted(probes.items(open_units - known or left))),
        known=() if ordered else tuple(sorted(probes.items(known))),
        passing=None if passing is None else probes.items(passing),
        failing=None if failing is None else probes.items(failing),
    )


def _needed_members(probes: ProbeCache, failing: Subset | None) -> Subset:
    """Return the members without which a failing set passes, or none if answers contradict each other."""
    bad = [seen.subset for seen in probes.observations if seen.counts_as is BAD]
    good = [seen.subset for seen in probes.observations if seen.counts_as is GOOD]
    contradicted = probes.question.flaky or any(fails <= passes for fails in bad for passes in good)
    if failing is None or contradicted:
        return frozenset()
    return frozenset().union(*(failing - passes for passes in good if len(failing - passes) == 1))


def of_culprits(
    probes: ProbeCache,
    judge: SetJudge,
    found: Sequence[FailingSet],
    rest_passes: bool,
    sample_confidence: float,
    caveat: str = "",
) -> SearchAnswer:
    """Return the answer with one or several culprits, each proven to fail alone.

    Its caveat notes whether the rest passed: if not, there may be more culprits.
    """
    groups = tuple(probes.items(culprit.members) for culprit in found)
    kind, items = _kind_and_items(groups)
    return SearchAnswer(
        kind=kind,
        items=items,
        groups=groups if len(groups) > 1 else (),
        confidence=sample_confidence if any(culprit.sampled for culprit in found) else 1.0,
        p_bad=judge.rate,
        why=caveat or _caveat(probes, found, rest_passes),
        passing=_passing(probes, found),
        failing=groups[0],
    )


def _caveat(probes: ProbeCache, found: Sequence[FailingSet], rest_passes: bool) -> str:
    if not rest_passes:
        return "everything but the answer was not seen to pass, so there may be more"
    if any(culprit.sampled for culprit in found):
        return "not each member was taken away by itself, but both ends and a sample"
    if probes.question.kind is QuestionKind.RANGE and any(len(culprit.members) > 2 for culprit in found):
        return "no smaller range in it fails; whether it takes all that lies between its ends, no range can tell"
    return ""


_ONLY_WHAT_WAS_ASKED = (
    "without any one of its members it no longer fails, but other sets may: more items pass where fewer fail"
)


def _passing(probes: ProbeCache, found: Sequence[FailingSet]) -> Subset | None:
    """Return the largest rest without the culprits that passed, else a culprit without one member, else None."""
    rests_first = sorted(_rests(probes, found), key=len, reverse=True)
    without = (culprit.members - {member} for culprit in found for member in sorted(culprit.members))
    passed = (subset for subset in (*rests_first, *without) if GOOD in probes.answers(subset))
    return next(map(probes.items, passed), None)


def _kind_and_items(groups: Sequence[Subset]) -> tuple[AnswerKind, tuple[int, ...]]:
    if len(groups) > 1:
        return AnswerKind.SEVERAL, tuple(sorted(frozenset[int]().union(*groups)))
    items = tuple(sorted(groups[0]))
    if len(items) == 1:
        return AnswerKind.SINGLE, items
    if items[-1] - items[0] + 1 == len(items):
        return AnswerKind.RANGE, (items[0], items[-1] + 1)
    return AnswerKind.SET, items


def _order(subset: Collection[int]) -> tuple[int, list[int]]:
    return len(subset), sorted(subset)
