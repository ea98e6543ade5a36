"""Plan: the protocol of a bisection from the controls to the proof, its conclusion, and its probes at worst."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, log2

from nsa_harness.core.bisect.chain import Chain, depth, probes_at_worst
from nsa_harness.core.bisect.choice import among_values, most_rounds
from nsa_harness.core.bisect.edge import Certain, Contradicted, Unjudged
from nsa_harness.core.bisect.minimal import (
    FailingSet,
    Judge,
    Literal,
    SetJudge,
    ask,
    ddmin,
    fails,
    minimal,
    only_the_number,
    standing_out,
)
from nsa_harness.core.bisect.noisy import Noisy, Unsettled, tries
from nsa_harness.core.bisect.oracle import BAD, GOOD, Oracle, units
from nsa_harness.core.bisect.question import (
    AnswerKind,
    CountsAs,
    OutOfBudget,
    Probe,
    Purpose,
    QuestionKind,
    SearchAnswer,
    SearchQuestion,
    Subset,
)
from nsa_harness.core.statistics import Separation

_RAREST = 0.2  # a bad end that fails less often may be taken for a good one
_HALF = 0.5  # what holds for half of all, or of all runs, or less is taken to show in a sample
_ENOUGH_FAILURES = 3  # to know how often the bad end fails
_FAILED = (BAD, CountsAs.DIFFERENT)
_MOST_CONTROLS = 60  # at which a failure in one of twenty runs has shown three times


def find(question: SearchQuestion, probe: Probe) -> SearchAnswer:
    """The smallest difference that matters, proven, or what is known and why it is not more.

    Controls, search, proof, controls again. Raises only what the probe raises, but OutOfBudget.
    """
    oracle = Oracle(question, probe)
    try:
        return _between_ends(oracle)
    except OutOfBudget as reason:
        return so_far(oracle, str(reason) or "the budget ended before an answer was found and proven")
    except Unsettled as reason:
        return so_far(oracle, str(reason), reason.open_units)


def _between_ends(oracle: Oracle) -> SearchAnswer:
    """Nothing is searched between ends that do not differ."""
    if oracle.question.kind is QuestionKind.CHOICE:
        return among_values(oracle)
    often = [frozenset[int]()] * oracle.question.baseline
    good_ends = oracle.ask(often, Purpose.CONTROL_GOOD, oracle.everything)
    good_end = next((one for one in good_ends if one is not GOOD), GOOD)
    if good_end is not GOOD:
        return so_far(oracle, f"the good end is not good: it {_says(good_end)}")
    end = _gallop(oracle) or oracle.everything
    failed = [counts_as for counts_as in oracle.answers(frozenset(end)) if counts_as in _FAILED]
    bad_end = failed[0] if failed else _control_bad(oracle)
    if bad_end is GOOD:
        times = len(oracle.answers(frozenset(end)))
        why = f"the bad end was good {times} of {times} times: nothing to bisect, unless it fails in less than"
        return SearchAnswer(
            kind=AnswerKind.NONE,
            confidence=oracle.question.confidence,
            why=f"{why} {_RAREST:.0%}",
            passing=oracle.items(oracle.everything),
        )
    if bad_end is not BAD:
        return so_far(oracle, f"the bad end is not bad: it {_says(bad_end)}")
    return _searched(oracle, end)


def _searched(oracle: Oracle, end: tuple[int, ...]) -> SearchAnswer:
    """Each answer is believed until two contradict each other; then the runs are flaky, or more items may help."""
    if GOOD in oracle.answers(frozenset(end)):
        return _among_flaky_runs(oracle, end)
    try:
        return _proven(oracle, Certain(oracle), end)
    except Contradicted as seen:
        return _among_flaky_runs(oracle, end) if _changes(oracle, seen) else _against_order(oracle, end)
    except Unjudged as gap:
        return _around_unjudged(oracle, end, gap)


def _proven(oracle: Oracle, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    ordered = oracle.question.kind is QuestionKind.ORDERED
    answer = _threshold(oracle, judge, end) if ordered else _culprits(oracle, judge)
    _recheck(judge, end)
    return answer


def _threshold(oracle: Oracle, judge: Judge, end: tuple[int, ...]) -> SearchAnswer:
    """All rests on the one value before it: a flaky run that passed there by chance would move the answer."""
    length = judge.edge(Chain(base=frozenset(), order=end), Purpose.RIGHT_EDGE)
    _must_fail(oracle, judge, frozenset(end[:length]))
    if _rest(oracle, judge, end[: length - 1], at_least=tries(_HALF, oracle.question.confidence) - 1) is not GOOD:
        raise Unsettled(f"length {length} fails, but {length - 1} was not seen to pass")
    return SearchAnswer(
        kind=AnswerKind.THRESHOLD,
        items=(length,),
        confidence=judge.sure,
        p_bad=judge.rate,
        passing=oracle.items(range(length - 1)),
        failing=oracle.items(range(length)),
    )


def _culprits(oracle: Oracle, judge: Judge) -> SearchAnswer:
    """One after the other: what is found is taken out, until the rest passes."""
    sample = tries(_HALF, oracle.question.confidence)
    sampled = 1 - _HALF**sample
    found: list[FailingSet] = []
    rest, counts_as = oracle.everything, BAD
    while counts_as is BAD:
        members = standing_out(judge, rest)
        if not found and not oracle.question.together and only_the_number(judge, members, rest, sample):
            return _number(oracle, judge, members, sampled)
        found.append(_smallest(oracle, judge, members, sample))
        rest = tuple(unit for unit in rest if unit not in found[-1].members)
        counts_as = _rest(oracle, judge, rest)
    return of_culprits(oracle, judge, found, counts_as is GOOD, sampled)


def _number(oracle: Oracle, judge: Judge, first: Subset, sampled: float) -> SearchAnswer:
    """Any so many. The two configurations are the first so many, and one fewer."""
    _must_fail(oracle, judge, first)
    _rest(oracle, judge, sorted(first)[1:])
    return SearchAnswer(
        kind=AnswerKind.COUNT,
        items=(len(first),),
        confidence=judge.sure * sampled,
        p_bad=judge.rate,
        why="not all sets of the size were asked, but a sample",
        passing=oracle.items(range(1, len(first))),
        failing=oracle.items(range(len(first))),
    )


def _smallest(oracle: Oracle, judge: Judge, members: Subset, sample: int) -> FailingSet:
    culprit = minimal(judge, members, sample)
    _must_fail(oracle, judge, culprit.members)
    if culprit.unjudged:
        raise Unsettled("it fails together, but without some of its members it cannot be judged", culprit.members)
    return culprit


def _must_fail(oracle: Oracle, judge: SetJudge, subset: Subset) -> None:
    if not fails(judge, subset, Purpose.PROOF_BAD, times=oracle.question.repeat):
        raise Unsettled("what stands out does not fail alone when asked again", subset)


def _rest(oracle: Oracle, judge: SetJudge, subset: Iterable[int], at_least: int = 1) -> CountsAs:
    return ask(judge, frozenset(subset), Purpose.PROOF_GOOD, times=max(oracle.question.repeat, at_least))


def _recheck(judge: SetJudge, end: tuple[int, ...]) -> None:
    """The machine may have changed meanwhile; that it could not be judged just now changes nothing."""
    for name, subset, purpose, expected in (
        ("good", frozenset[int](), Purpose.RECHECK_GOOD, GOOD),
        ("bad", frozenset(end), Purpose.RECHECK_BAD, BAD),
    ):
        counts_as = ask(judge, subset, purpose, end)
        if counts_as not in (expected, CountsAs.UNRESOLVED):
            raise Unsettled(f"the {name} end is no longer {name}: asked again it {_says(counts_as)}")


def _gallop(oracle: Oracle) -> tuple[int, ...] | None:
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


def _control_bad(oracle: Oracle) -> CountsAs:
    """Good only after enough repetitions: a failure that is rare is still one."""
    everything = frozenset(oracle.everything)
    first = next(oracle.ask([everything], Purpose.CONTROL_BAD, everything))
    if first is not GOOD:
        return first
    more = tries(_RAREST, oracle.question.confidence) - 1
    again: list[CountsAs] = []
    for counts_as in oracle.ask([everything] * more, Purpose.CONTROL_BAD, everything):
        again.append(counts_as)
        if counts_as is BAD:
            return BAD
    return next((counts_as for counts_as in again if counts_as is not GOOD), GOOD)


def _changes(oracle: Oracle, seen: Contradicted) -> bool:
    """Whether one of two answers that contradict each other changes when asked again."""
    if seen.good == seen.bad:
        return True
    often = [seen.good] * tries(_HALF, oracle.question.confidence)
    return BAD in oracle.ask(often, Purpose.REPEAT, seen.good) or GOOD in oracle.ask(
        [seen.bad], Purpose.REPEAT, seen.bad
    )


def _among_flaky_runs(oracle: Oracle, end: tuple[int, ...]) -> SearchAnswer:
    """How often the bad end fails is measured first: it decides how much a run that passes tells."""
    failing = frozenset(end)
    while oracle.answers(failing).count(BAD) < _ENOUGH_FAILURES:
        if len(oracle.answers(failing)) >= _MOST_CONTROLS:
            raise Unsettled("the bad end fails in less than one of twenty runs: make it fail more often first")
        next(oracle.ask([failing] * oracle.question.at_once, Purpose.CONTROL_BAD, failing))
    # A single wrong turn among so many ends in a proof that fails. The next attempt starts from all that was seen.
    doubt = (1 - oracle.question.confidence) / 2
    for stricter in (1, 5):
        with suppress(Unsettled):
            return _proven(oracle, Noisy(oracle, failing, doubt / stricter), end)
    return _proven(oracle, Noisy(oracle, failing, doubt / 25), end)


def _against_order(oracle: Oracle, end: tuple[int, ...]) -> SearchAnswer:
    """More items may turn bad into good here, so nothing follows from anything: only what was asked counts."""
    if oracle.question.kind is QuestionKind.ORDERED:
        raise Unsettled("it fails at a smaller value and passes at a larger one: there is no threshold")
    failing = min((seen.subset for seen in oracle.observations if seen.counts_as is BAD), key=len)
    return _literally(oracle, end, failing, "more items may pass where fewer fail, and what decides cannot be judged")


def _around_unjudged(oracle: Oracle, end: tuple[int, ...], gap: Unjudged) -> SearchAnswer:
    """Other sets than those of the search may be judged, if the question allows to ask them."""
    why = "between what passes and what fails, the rest was neither good nor bad"
    if oracle.question.kind is QuestionKind.ORDERED:
        raise Unsettled(why, gap.failing - gap.passing)
    return _literally(oracle, end, gap.failing, why)


def _literally(oracle: Oracle, end: tuple[int, ...], failing: Subset, why: str) -> SearchAnswer:
    culprit = ddmin(oracle, failing)
    if culprit.unjudged:
        raise Unsettled(why, culprit.members)
    literal = Literal(oracle)
    _must_fail(oracle, literal, culprit.members)
    rest_passes = _rest(oracle, literal, frozenset(oracle.everything) - culprit.members) is GOOD
    _recheck(literal, end)
    return of_culprits(oracle, literal, [culprit], rest_passes, 1.0)


def _says(counts_as: CountsAs) -> str:
    return {
        CountsAs.GOOD: "passes",
        CountsAs.BAD: "fails in the way sought",
        CountsAs.DIFFERENT: "fails in another way",
        CountsAs.UNRESOLVED: "could not be judged",
    }[counts_as]


def so_far(oracle: Oracle, why: str, open_units: Subset = frozenset()) -> SearchAnswer:
    """Undecided: the smallest set that failed, the largest part of it that passed, and what lies between."""
    failing = min((seen.subset for seen in oracle.observations if seen.counts_as is BAD), key=_order, default=None)
    passed = [seen.subset for seen in oracle.observations if seen.counts_as is GOOD]
    inside = [subset for subset in passed if failing is None or subset < failing]
    passing = max(inside, key=len, default=None)
    between = (frozenset(oracle.everything) if failing is None else failing) - (passing or frozenset())
    return SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why=why,
        open=tuple(sorted(oracle.items(open_units or between))),
        passing=None if passing is None else oracle.items(passing),
        failing=None if failing is None else oracle.items(failing),
    )


def of_culprits(
    oracle: Oracle, judge: SetJudge, found: Sequence[FailingSet], rest_passes: bool, sample_confidence: float
) -> SearchAnswer:
    """One or several culprits, each proven to fail alone. If the rest was not seen to pass there may be more."""
    groups = tuple(oracle.items(culprit.members) for culprit in found)
    confidence = judge.sure * (sample_confidence if any(culprit.sampled for culprit in found) else 1.0)
    kind, items = _shape(groups)
    return SearchAnswer(
        kind=kind,
        items=items,
        groups=groups if len(groups) > 1 else (),
        confidence=confidence if rest_passes else confidence / 2,
        p_bad=judge.rate,
        why=_caveat(found, rest_passes),
        passing=_passing(oracle, found, rest_passes),
        failing=groups[0],
    )


def _caveat(found: Sequence[FailingSet], rest_passes: bool) -> str:
    if not rest_passes:
        return "everything but the answer was not seen to pass, so there may be more"
    if any(culprit.sampled for culprit in found):
        return "not each member was taken away by itself, but both ends and a sample"
    return ""


def _passing(oracle: Oracle, found: Sequence[FailingSet], rest_passes: bool) -> Subset:
    """Everything but the answer; where that does not pass, the answer without one member."""
    guilty = frozenset[int]().union(*(culprit.members for culprit in found))
    if rest_passes:
        return oracle.items(frozenset(oracle.everything) - guilty)
    return oracle.items(sorted(found[0].members)[1:])


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


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a search may go, and what that takes."""

    name: str
    probes: int
    more: bool = False  # each time, to those of the case before
    about: bool = False  # expected, not the most that it can be: of runs that fail only sometimes
    fails: float = 0.5  # the share of its probes that fail, roughly: they may take longer


_FLAKY = (("half", 0.5), ("a fifth", 0.2))


def cases(question: SearchQuestion) -> tuple[Case, ...]:
    """Each answer that a search may come to, with the probes to it and its proof."""
    nothing = Case(name="the bad end never fails", probes=question.baseline + question.controls, fails=0.0)
    if question.kind is QuestionKind.CHOICE:
        values = len(units(question))
        nothing = Case(name="no value ever fails", probes=values * question.controls, fails=0.0)
        once = Case(name="each value fails always or never", probes=at_most(worst_case(question)))
        some = Case(name="values fail sometimes", probes=values * most_rounds(question.confidence))
        return (nothing, some) if question.flaky else (nothing, once, some)
    answers = _ordered_cases(question) if question.kind is QuestionKind.ORDERED else _set_cases(question)
    flaky = (
        Case(name=f"it fails in {words} of its runs", probes=_flaky(question, rate), about=True, fails=rate / 2)
        for words, rate in _FLAKY
    )
    return nothing, *answers, *flaky


def _ordered_cases(question: SearchQuestion) -> tuple[Case, ...]:
    return (Case(name="there is a threshold", probes=at_most(worst_case(question))),)


def _set_cases(question: SearchQuestion) -> tuple[Case, ...]:
    stages = {stage.name: stage.probes for stage in worst_case(question)}
    whole = at_most(worst_case(question))
    # One prefix search, the item by itself, whether another item does as well, both proofs.
    alone = stages["controls"] + stages["right edge"] + 2 + 2 * question.repeat + stages["controls again"]
    one = Case(name="one alone is enough", probes=min(alone, whole))
    if len(units(question)) == 1:
        return (one,)
    return (
        one,
        Case(name="two or a range together", probes=whole),
        Case(name="each more of those together", probes=stages["next member"], more=True),
        Case(name="each more that is enough by itself", probes=stages["next culprit"], more=True),
        Case(name="only the number counts", probes=whole + stages["sizes"]),
    )


def _flaky(question: SearchQuestion, rate: float) -> int:
    """Expected where what should fail does so at that rate, and what should pass passes.

    Until both ends differ, then the bits of one place among all and of the doubt that may be left, by what a run tells
    (the capacity of a Z-channel), then each proof until a failure would have shown.
    """
    ends = 2 * _pairs_until_shown(rate, question.confidence)
    doubt = (1 - question.confidence) / 2
    bits = log2(len(units(question))) + log2(1 / doubt) / 2
    proofs = ceil(1 / rate) + tries(rate, question.confidence)
    return ceil(ends + bits / _bits_a_run(rate) + proofs)


def _bits_a_run(rate: float) -> float:
    silent = 1 - rate
    return log2(1 + rate * silent ** (silent / rate))


def _pairs_until_shown(rate: float, confidence: float) -> int:
    ends = Separation()
    while not ends.shown(confidence):
        ends.learn(int((ends.pairs + 1) * rate) > int(ends.pairs * rate), False)
    return ends.pairs


_SHAPES = 4  # alone, ends only, without middle, elsewhere


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`only_if` is empty for what every search may take, else the case that takes this much more each time."""

    name: str
    probes: int
    only_if: str = ""


def worst_case(question: SearchQuestion) -> tuple[Stage, ...]:
    """For answers that hold: runs that turn out flaky or contradict each other take more."""
    if question.kind is QuestionKind.CHOICE:
        return _choice(question)
    return _ordered(question) if question.kind is QuestionKind.ORDERED else _set(question)


def at_most(parts: tuple[Stage, ...]) -> int:
    """Without the parts that only some searches come to."""
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
        Stage(name="proof", probes=question.repeat + max(question.repeat, tries(0.5, question.confidence) - 1)),
        Stage(name="controls again", probes=2),
    )


def _set(question: SearchQuestion) -> tuple[Stage, ...]:
    total = len(units(question))
    right = probes_at_worst(total, question.at_once)
    left = probes_at_worst(max(total - 1, 1), question.at_once)
    sample = tries(0.5, question.confidence)
    # Each member of few is dropped more than once, of many a sample and both ends.
    needed = max((members * -(-sample // members) for members in range(2, min(sample + 2, total) + 1)), default=0)
    proof = 2 * question.repeat + needed
    return (
        Stage(name="controls", probes=question.baseline + 1),
        Stage(name="right edge", probes=right),
        Stage(name="left edge", probes=left),
        Stage(name="shape", probes=_SHAPES),
        Stage(name="proof", probes=proof),
        Stage(name="controls again", probes=2),
        Stage(name="sizes", probes=2 * sample, only_if="only the number may count"),
        Stage(name="next culprit", probes=right + left + _SHAPES + proof, only_if="there are several"),
        Stage(name="next member", probes=right + 1 + needed, only_if="more than two interact"),
    )
