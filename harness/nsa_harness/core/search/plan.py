"""Plan: the protocol of a bisection from the controls to the proof, and its conclusion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from nsa_harness.core.experiment.statistics import Separation, tries
from nsa_harness.core.search.bayesian import BayesianSearch, Unsettled
from nsa_harness.core.search.chain import Chain, zones
from nsa_harness.core.search.choice import among_values
from nsa_harness.core.search.contiguous import all_windows_asked, only_the_length, rests, shortest, shrunk
from nsa_harness.core.search.edge import Contradicted, ExactSearch, Unjudged
from nsa_harness.core.search.minimal import (
    FailingSet,
    Judge,
    Literal,
    SetJudge,
    ask,
    ddmin,
    fails,
    minimal,
    only_the_number,
    others_fail_too,
    standing_out,
    stretch,
)
from nsa_harness.core.search.probe_cache import BAD, GOOD, ProbeCache
from nsa_harness.core.search.question import (
    AnswerKind,
    CountsAs,
    OutOfBudget,
    Probe,
    ProbeAnswer,
    Purpose,
    QuestionKind,
    SearchAnswer,
    SearchQuestion,
    Subset,
)

_SMALLEST_DIFFERENCE = 0.2  # between the rates of both ends: one that is smaller is none, and nothing is searched for
_MOST_UNJUDGED = 5  # of an end, beside as many as were judged
_ATTEMPTS = 4  # among flaky runs, before the last one says why it is not decided
# Of runs of both ends, before they are said to fail alike often, or to be too close.
_FEWEST_PAIRS, _MOST_PAIRS = 20, 100
# In all, of what is said to fail, and of all but that: a program in which something else fails now and then has made
# fewer of them believable by chance.
SEEN_FAILING, SEEN_PASSING = 3, 2
HALF = 0.5  # what holds for half of all, or of all runs, or less is taken to show in a sample
_FAILED = (BAD, CountsAs.DIFFERENT)


def find(question: SearchQuestion, probe: Probe) -> SearchAnswer:
    """The smallest difference that matters, proven, or what is known and why it is not more.

    Controls, search, proof, controls again. Raises only what the probe raises, but OutOfBudget.
    """
    oracle = ProbeCache(question, probe)
    try:
        return _between_ends(oracle)
    except OutOfBudget as reason:
        return so_far(oracle, str(reason) or "the budget ended before an answer was found and proven")
    except Unsettled as reason:
        return so_far(oracle, str(reason), reason.open_units)


def _between_ends(oracle: ProbeCache) -> SearchAnswer:
    """Nothing is searched between ends that do not differ."""
    if oracle.question.kind is QuestionKind.CHOICE:
        return among_values(oracle)
    if oracle.question.flaky:
        return _among_flaky_runs(oracle, _gallop(oracle) or oracle.everything)
    list(oracle.ask([frozenset()] * (oracle.question.baseline - 1), Purpose.CONTROL_GOOD, oracle.everything))
    good_end = _control(oracle, frozenset(), Purpose.CONTROL_GOOD, GOOD)
    if good_end is not GOOD:
        return so_far(oracle, f"the good end is not good: {_so_often(oracle, frozenset(), good_end)}")
    end = _gallop(oracle) or oracle.everything
    failed = [counts_as for counts_as in oracle.answers(frozenset(end)) if counts_as in _FAILED]
    bad_end = failed[0] if failed else _control(oracle, frozenset(end), Purpose.CONTROL_BAD, BAD)
    if bad_end is GOOD:
        return _never_failing(oracle, frozenset(end))
    if bad_end is not BAD:
        return so_far(oracle, f"the bad end is not bad: {_so_often(oracle, frozenset(end), bad_end)}")
    return _searched(oracle, end)


def _never_failing(oracle: ProbeCache, end: Subset) -> SearchAnswer:
    """Where the good end has failed, it is no surprise that the bad one may."""
    times, confidence = len(oracle.answers(end)), oracle.question.confidence
    rarer = 1 - (1 - confidence) ** (1 / times)
    return SearchAnswer(
        kind=AnswerKind.NONE,
        confidence=confidence,
        why=f"the bad end passed {times} of {times}: never seen failing; it may in less than {rarer:.0%} of runs",
        passing=oracle.items(end),
    )


def _searched(oracle: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Each answer is believed until two contradict each other; then the runs are flaky, or more items may help."""
    if BAD in oracle.answers(frozenset()) or GOOD in oracle.answers(frozenset(end)):
        return _among_flaky_runs(oracle, end)
    try:
        return _proven(oracle, ExactSearch(oracle), end)
    except Contradicted as seen:
        return _among_flaky_runs(oracle, end) if _changes(oracle, seen) else _against_order(oracle, end)
    except Unjudged as gap:
        return _around_unjudged(oracle, end, gap)


def _proven(oracle: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    ordered = oracle.question.kind is QuestionKind.ORDERED
    answer = _threshold(oracle, judge, end) if ordered else _culprits(oracle, judge)
    _recheck(oracle, judge, end)
    judge.make_sure(with_half_the_doubt(oracle.question))
    return replace(answer, confidence=answer.confidence * judge.sure)


def with_half_the_doubt(question: SearchQuestion) -> float:
    """What is proven and what a sample stands for have half of it each."""
    return 1 - (1 - question.confidence) / 2


def _threshold(oracle: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """All rests on the one value before it: a flaky run that passed there by chance would move the answer."""
    length = judge.edge(Chain(base=frozenset(), order=end), Purpose.RIGHT_EDGE)
    failing, passing = frozenset(end[:length]), frozenset(end[: length - 1])
    at_least = tries(HALF, oracle.question.confidence) - 1
    _both_ahead(oracle, failing, passing, at_least)
    _must_fail(oracle, judge, failing)
    if _rest(oracle, judge, passing, at_least) is not GOOD:
        raise Unsettled(f"length {length} fails, but {length - 1} was not seen to pass")
    return SearchAnswer(
        kind=AnswerKind.THRESHOLD,
        items=(length,),
        p_bad=judge.rate,
        passing=oracle.items(range(length - 1)),
        failing=oracle.items(range(length)),
    )


def _culprits(oracle: ProbeCache, judge: Judge) -> SearchAnswer:
    """One after the other: what is found is taken out, until the rest passes."""
    if oracle.question.kind is QuestionKind.RANGE:
        return _ranges(oracle, judge)
    sample = tries(HALF, with_half_the_doubt(oracle.question))
    sampled = 1 - HALF**sample
    found: list[FailingSet] = []
    rest, counts_as = oracle.everything, BAD
    while counts_as is BAD:
        members = standing_out(judge, rest)
        if not found and not oracle.question.together and only_the_number(judge, members, rest, sample):
            return _number(oracle, judge, members, sampled)
        culprit = minimal(judge, members, sample)
        # Where a run passed by chance, so many that are any show as just these.
        if not (found or oracle.question.together) and others_fail_too(judge, culprit.members, rest, sample):
            return _number(oracle, judge, culprit.members, sampled)
        rest = tuple(unit for unit in rest if unit not in culprit.members)
        _both_ahead(oracle, culprit.members, frozenset(rest))
        found.append(_proven_alone(oracle, judge, culprit))
        counts_as = _rest(oracle, judge, rest)
        if counts_as is not BAD and (other := _unexplained(judge, found)) is not None:
            # It shares members with what was found. Did it fail by chance?
            _must_fail(oracle, judge, other)
            rest, counts_as = tuple(sorted(other)), BAD
    return of_culprits(oracle, judge, found, counts_as is GOOD, sampled)


def _unexplained(judge: Judge, found: Sequence[FailingSet]) -> Subset | None:
    """The smallest set that fails though it holds nothing of what was found."""
    others = (one for one in judge.failed() if not any(culprit.members <= one for culprit in found))
    return min(others, key=_order, default=None)


def _ranges(oracle: ProbeCache, judge: Judge) -> SearchAnswer:
    """As `_culprits`, but what is found can only be taken out with all on one side of its first or its last."""
    sample = tries(HALF, with_half_the_doubt(oracle.question))
    counts_as = cache(partial(_rest, oracle, judge))
    found: list[FailingSet] = []
    failing: Subset | None = frozenset(oracle.everything)
    while failing is not None:
        members = frozenset(stretch(judge, tuple(sorted(failing))))
        if not found and only_the_length(judge, members, len(oracle.units), sample):
            whole = all_windows_asked(len(oracle.units), len(members), sample)
            return _number(oracle, judge, members, 1.0 if whole else 1 - HALF**sample)
        new = _proven_alone(oracle, judge, shortest(judge, members, sample))
        found = [*(one for one in found if not new.members <= one.members), new]
        failing = next((rest for rest in _rests(oracle, found) if counts_as(rest) is BAD), None)
        if failing is None and (failing := _unexplained(judge, found)) is not None:
            _must_fail(oracle, judge, failing)
    passed = all(counts_as(rest) is GOOD for rest in _rests(oracle, found))
    return of_culprits(oracle, judge, sorted(found, key=lambda one: min(one.members)), passed, 1.0)


def _rests(oracle: ProbeCache, found: Sequence[FailingSet]) -> tuple[Subset, ...]:
    """Everything but the culprits: what is asked to pass if there is nothing else."""
    culprits = [culprit.members for culprit in found]
    if oracle.question.kind is QuestionKind.RANGE:
        return rests(len(oracle.units), culprits)
    return (frozenset(oracle.everything).difference(*culprits),)


def _number(oracle: ProbeCache, judge: Judge, first: Subset, sampled: float) -> SearchAnswer:
    """Any so many. The two configurations are the first so many, and one fewer."""
    _must_fail(oracle, judge, first)
    _rest(oracle, judge, sorted(first)[1:])
    return SearchAnswer(
        kind=AnswerKind.COUNT,
        items=(len(first),),
        confidence=sampled,
        p_bad=judge.rate,
        why="" if sampled == 1 else "not all sets of the size were asked, but a sample",
        passing=oracle.items(range(1, len(first))),
        failing=oracle.items(range(len(first))),
    )


def _proven_alone(oracle: ProbeCache, judge: Judge, culprit: FailingSet) -> FailingSet:
    _must_fail(oracle, judge, culprit.members)
    if culprit.unjudged:
        raise Unsettled("it fails together, but without some of its members it cannot be judged", culprit.members)
    return culprit


def _both_ahead(oracle: ProbeCache, failing: Subset, passing: Subset, at_least: int = SEEN_PASSING) -> None:
    """The proofs that `_must_fail` and `_rest` will ask for, side by side."""
    bad = [(failing, Purpose.PROOF_BAD)] * _times_to_fail(oracle, failing)
    good = [(passing, Purpose.PROOF_GOOD)] * max(oracle.question.repeat, at_least)
    oracle.ahead([*bad, *good], oracle.everything)


def _times_to_fail(oracle: ProbeCache, subset: Subset) -> int:
    return max(oracle.question.repeat, SEEN_FAILING - oracle.answers(subset).count(BAD))


def _must_fail(oracle: ProbeCache, judge: SetJudge, subset: Subset) -> None:
    if not fails(judge, subset, Purpose.PROOF_BAD, times=_times_to_fail(oracle, subset)):
        raise Unsettled("what stands out does not fail alone when asked again", subset)


def _rest(oracle: ProbeCache, judge: SetJudge, subset: Iterable[int], at_least: int = SEEN_PASSING) -> CountsAs:
    return ask(judge, frozenset(subset), Purpose.PROOF_GOOD, times=max(oracle.question.repeat, at_least))


def _recheck(oracle: ProbeCache, judge: SetJudge, end: tuple[int, ...]) -> None:
    """The machine may have changed meanwhile; that it could not be judged just now changes nothing."""
    ends = (
        ("good", frozenset[int](), Purpose.RECHECK_GOOD, GOOD),
        ("bad", frozenset(end), Purpose.RECHECK_BAD, BAD),
    )
    oracle.ahead([(subset, purpose) for _, subset, purpose, _ in ends], end)
    for name, subset, purpose, expected in ends:
        counts_as = ask(judge, subset, purpose, end)
        if counts_as not in (expected, CountsAs.UNRESOLVED):
            raise Unsettled(f"the {name} end is no longer {name}: asked again it {_says(counts_as)}")


def _gallop(oracle: ProbeCache) -> tuple[int, ...] | None:
    """The first of the prefixes 1, 2, 4, ... that fails; None if the bad end is known, or none fails.

    It may fail in another way than the one sought, as for want of memory: what is larger yet is not tried.
    """
    if not oracle.question.unbounded:
        return None
    total = len(oracle.units)
    lengths = [*(1 << i for i in range((total - 1).bit_length())), total]
    answers = oracle.ask([frozenset(range(length)) for length in lengths], Purpose.GALLOP, oracle.everything)
    found = next((length for length, counts_as in zip(lengths, answers, strict=True) if counts_as in _FAILED), None)
    return None if found is None else oracle.everything[:found]


def _control(oracle: ProbeCache, end: Subset, purpose: Purpose, expected: CountsAs) -> CountsAs:
    """What an end counts as: as expected if it does so once in `controls` times, for a failure may be rare."""
    first = next(oracle.ask([end], purpose, oracle.everything))
    if first in (expected, CountsAs.UNRESOLVED):
        return first
    for counts_as in oracle.ask([end] * (oracle.question.controls - 1), purpose, oracle.everything):
        if counts_as in (expected, CountsAs.UNRESOLVED):
            return counts_as
    return next((counts_as for counts_as in oracle.answers(end) if counts_as is not GOOD), GOOD)


def _changes(oracle: ProbeCache, seen: Contradicted) -> bool:
    """Whether one of two answers that contradict each other changes when asked again."""
    if seen.good == seen.bad:
        return True
    often = [seen.good] * tries(HALF, oracle.question.confidence)
    return BAD in oracle.ask(often, Purpose.REPEAT, seen.good) or GOOD in oracle.ask(
        [seen.bad], Purpose.REPEAT, seen.bad
    )


def _among_flaky_runs(oracle: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """Nothing is searched before the bad end is seen to fail more often than the good one, and not just by chance."""
    failing = frozenset(end)
    if (alike := _alike(oracle, failing)) is not None:
        return alike
    doubt = (1 - oracle.question.confidence) / 4
    for attempt in range(_ATTEMPTS):
        # A single wrong turn ends in a proof that fails. The next attempt starts from all that was seen.
        with suppress(Unsettled):
            return _proven_if_judged(oracle, BayesianSearch(oracle, failing, doubt / 2**attempt), end)
    return _proven_if_judged(oracle, BayesianSearch(oracle, failing, doubt / 2**_ATTEMPTS), end)


def _proven_if_judged(oracle: ProbeCache, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    try:
        return _proven(oracle, judge, end)
    except Unjudged as gap:
        if oracle.question.kind is QuestionKind.ORDERED:
            return _hidden(oracle, judge, end, gap)
        raise Unsettled(_NEITHER, gap.failing - gap.passing) from None


def _alike(oracle: ProbeCache, end: Subset) -> SearchAnswer | None:
    """Both ends in pairs, until their rates are apart: None, or what there is to say instead."""
    confidence = oracle.question.confidence
    separation, taken = Separation(), 0
    while not separation.shown(confidence):
        good, bad = (_judged(oracle, subset) for subset in (frozenset[int](), end))
        if taken < min(len(good), len(bad)):
            separation.learn(good[taken] is BAD, bad[taken] is BAD)
            taken += 1
            continue
        if separation.pairs >= _FEWEST_PAIRS and separation.no_more_than(
            _SMALLEST_DIFFERENCE, with_half_the_doubt(oracle.question)
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
        unjudged = (len(oracle.answers(subset)) - len(_judged(oracle, subset)) for subset in (frozenset[int](), end))
        if max(unjudged) > taken + _MOST_UNJUDGED:
            raise Unsettled(f"one end mostly cannot be judged: {_counts(separation)}")
        lacking = [(frozenset[int](), Purpose.CONTROL_GOOD)] * (len(good) == taken)
        lacking += [(end, Purpose.CONTROL_BAD)] * (len(bad) == taken)
        oracle.ahead(lacking, end)
        for subset, purpose in lacking:
            list(oracle.ask([subset], purpose, end))
    if separation.first_bad > separation.second_bad:
        raise Unsettled(f"the good end fails more often than the bad one: {_counts(separation)}")
    return None


def _judged(oracle: ProbeCache, subset: Subset) -> list[CountsAs]:
    return [counts_as for counts_as in oracle.answers(subset) if counts_as in (GOOD, BAD)]


def _counts(seen: Separation) -> str:
    return f"the bad end failed {seen.second_bad} of {seen.pairs} times, the good end {seen.first_bad} of {seen.pairs}"


def _so_often(oracle: ProbeCache, end: Subset, counts_as: CountsAs) -> str:
    """ "2 of 3 times it fails in another way"; without numbers where it was asked once."""
    answers = oracle.answers(end)
    often = "" if len(answers) == 1 else f"{answers.count(counts_as)} of {len(answers)} times "
    return f"{often}it {_says(counts_as)}"


def _against_order(oracle: ProbeCache, end: tuple[int, ...]) -> SearchAnswer:
    """More items may turn bad into good here, so nothing follows from anything: only what was asked counts."""
    if oracle.question.kind is QuestionKind.ORDERED:
        raise Unsettled("it fails at a smaller value and passes at a larger one: there is no threshold")
    failing = min((seen.subset for seen in oracle.observations if seen.counts_as is BAD), key=len)
    why = "more items may pass where fewer fail, and what decides cannot be judged"
    return _literally(oracle, end, failing, why, _ONLY_WHAT_WAS_ASKED)


def _around_unjudged(oracle: ProbeCache, end: tuple[int, ...], gap: Unjudged) -> SearchAnswer:
    """Other sets than those of the search may be judged, if the question allows to ask them."""
    if oracle.question.kind is QuestionKind.ORDERED:
        return _hidden(oracle, Literal(oracle), end, gap)
    return _literally(oracle, end, gap.failing, _NEITHER, "")


_NEITHER = "between what passes and what fails, the rest was neither good nor bad"


def _hidden(oracle: ProbeCache, judge: SetJudge, end: tuple[int, ...], gap: Unjudged) -> SearchAnswer:
    """It begins somewhere in what is neither good nor bad, or right behind that, whose borders are asked once more."""
    _must_fail(oracle, judge, gap.failing)
    if _rest(oracle, judge, gap.passing) is not GOOD:
        raise Unsettled(f"length {len(gap.passing)} was seen to pass, but not when asked again")
    _recheck(oracle, judge, end)
    between = [one.counts_as for one in oracle.observations if gap.passing < one.subset < gap.failing]
    found = zones(len(gap.passing), len(gap.failing), len(end), between)
    hidden = "another failure lies between what passes and what fails in the way sought, and hides where that begins"
    why = hidden if found[1].counts_as is CountsAs.DIFFERENT else _NEITHER
    return replace(
        so_far(oracle, why, gap.failing - gap.passing),
        p_bad=judge.rate,
        passing=oracle.items(gap.passing),
        failing=oracle.items(gap.failing),
        zones=found,
    )


def _literally(oracle: ProbeCache, end: tuple[int, ...], failing: Subset, why: str, caveat: str) -> SearchAnswer:
    ranges = oracle.question.kind is QuestionKind.RANGE
    culprit = shrunk(oracle, failing) if ranges else ddmin(oracle, failing)
    if culprit.unjudged:
        raise Unsettled(why, culprit.members)
    literal = Literal(oracle)
    _must_fail(oracle, literal, culprit.members)
    passed = [_rest(oracle, literal, rest) is GOOD for rest in _rests(oracle, [culprit])]
    _recheck(oracle, literal, end)
    if any(not _fits(seen, culprit) for seen in oracle.observations):
        caveat = caveat or "other sets end otherwise than this one makes them expected to, so there may be more"
    return of_culprits(oracle, literal, [culprit], all(passed), 1.0, caveat)


def _fits(seen: ProbeAnswer, culprit: FailingSet) -> bool:
    """Whether it ended as it must if nothing else than the culprit fails."""
    return seen.counts_as is not (GOOD if culprit.members <= seen.subset else BAD)


def _says(counts_as: CountsAs) -> str:
    return {
        CountsAs.GOOD: "passes",
        CountsAs.BAD: "fails in the way sought",
        CountsAs.DIFFERENT: "fails in another way",
        CountsAs.UNRESOLVED: "could not be judged",
    }[counts_as]


def so_far(oracle: ProbeCache, why: str, open_units: Subset = frozenset()) -> SearchAnswer:
    """Undecided: the smallest set that failed, the largest part of it that passed, and what lies between."""
    failing = min((seen.subset for seen in oracle.observations if seen.counts_as is BAD), key=_order, default=None)
    passed = [seen.subset for seen in oracle.observations if seen.counts_as is GOOD]
    inside = [subset for subset in passed if failing is None or subset < failing]
    passing = max(inside, key=len, default=None)
    known = _needed(oracle, failing)
    within = frozenset(oracle.everything) if failing is None else failing
    ordered = oracle.question.kind is QuestionKind.ORDERED
    left = within - (passing or frozenset()) if ordered else within - known
    return SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why=why,
        open=tuple(sorted(oracle.items(open_units - known or left))),
        known=() if ordered else tuple(sorted(oracle.items(known))),
        passing=None if passing is None else oracle.items(passing),
        failing=None if failing is None else oracle.items(failing),
    )


def _needed(oracle: ProbeCache, failing: Subset | None) -> Subset:
    """Of a set that fails, those without which it passes; none are known where answers contradict each other."""
    bad = [seen.subset for seen in oracle.observations if seen.counts_as is BAD]
    good = [seen.subset for seen in oracle.observations if seen.counts_as is GOOD]
    contradicted = oracle.question.flaky or any(fails <= passes for fails in bad for passes in good)
    if failing is None or contradicted:
        return frozenset()
    return frozenset().union(*(failing - passes for passes in good if len(failing - passes) == 1))


def of_culprits(
    oracle: ProbeCache,
    judge: SetJudge,
    found: Sequence[FailingSet],
    rest_passes: bool,
    sample_confidence: float,
    caveat: str = "",
) -> SearchAnswer:
    """One or several culprits, each proven to fail alone. If the rest was not seen to pass there may be more."""
    groups = tuple(oracle.items(culprit.members) for culprit in found)
    kind, items = _shape(groups)
    return SearchAnswer(
        kind=kind,
        items=items,
        groups=groups if len(groups) > 1 else (),
        confidence=sample_confidence if any(culprit.sampled for culprit in found) else 1.0,
        p_bad=judge.rate,
        why=caveat or _caveat(oracle, found, rest_passes),
        passing=_passing(oracle, found),
        failing=groups[0],
    )


def _caveat(oracle: ProbeCache, found: Sequence[FailingSet], rest_passes: bool) -> str:
    if not rest_passes:
        return "everything but the answer was not seen to pass, so there may be more"
    if any(culprit.sampled for culprit in found):
        return "not each member was taken away by itself, but both ends and a sample"
    if oracle.question.kind is QuestionKind.RANGE and any(len(culprit.members) > 2 for culprit in found):
        return "no smaller range in it fails; whether it takes all that lies between its ends, no range can tell"
    return ""


_ONLY_WHAT_WAS_ASKED = (
    "without any one of its members it no longer fails, but other sets may: more items pass where fewer fail"
)


def _passing(oracle: ProbeCache, found: Sequence[FailingSet]) -> Subset | None:
    """The most of everything but the answer that was seen to pass, else the answer without a member; else None."""
    rests_first = sorted(_rests(oracle, found), key=len, reverse=True)
    without = (culprit.members - {member} for culprit in found for member in sorted(culprit.members))
    seen = (subset for subset in (*rests_first, *without) if GOOD in oracle.answers(subset))
    return next(map(oracle.items, seen), None)


def _shape(groups: Sequence[Subset]) -> tuple[AnswerKind, tuple[int, ...]]:
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
