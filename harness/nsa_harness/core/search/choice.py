"""Search for the values of one setting for which a program fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from nsa_harness.core.experiment.statistics import MIN_RATE, RateDifferenceTest, runs_to_show
from nsa_harness.core.search.question import BAD, GOOD, AnswerKind, ProbeCache, Purpose, SearchAnswer, Subset

_HALF = 0.5  # "each value fails" is concluded after enough runs for a value with this failure rate to have passed
_MAX_EXCESS_UNJUDGED = 2  # a value may have this many more unjudged than judged launches


def among_values(probes: ProbeCache) -> SearchAnswer:
    """Run the program with each alternative value, and return an answer that lists the values that fail.

    If a value both passes and fails, all values are run again until their failure rates differ, or until the largest
    number of runs is reached. Raises OutOfBudget.
    """
    values = tuple(probes.all_units)
    if not probes.question.flaky and (answer := _answer_if_steady(probes, values)):
        return answer
    proven = False
    most = max_rounds(probes.question.confidence)
    while (judgeable := _judgeable(probes, values)) and _fewest_judged(probes, judgeable) < most:
        probes.order.shuffle(judgeable)
        _launch(probes, judgeable, Purpose.REPEAT)
        answer = _answer_if_settled(probes, values, _fewest_judged(probes, judgeable))
        if answer is not None and not proven and answer.kind is AnswerKind.CHOICE:
            proven = True
            _prove(probes, answer.items, [value for value in values if value not in (*answer.items, *answer.open)])
            answer = _answer_if_settled(probes, values, _fewest_judged(probes, judgeable))
        if answer is not None:
            return answer
    bad, good, silent = _sort_values(probes, values)
    if not bad:
        return _no_failure_answer(probes, good, silent)
    return _answer_by_rates(probes, values) or _independent_answer(probes, values)


def max_rounds(confidence: float) -> int:
    """Return the maximum number of runs for each value, enough to show a failure rate of MIN_RATE."""
    return runs_to_show(MIN_RATE, confidence)


def _answer_if_steady(probes: ProbeCache, values: Sequence[int]) -> SearchAnswer | None:
    """Run the program with each value and return an answer, or None if a value both passed and failed."""
    _launch(probes, values, Purpose.EACH)
    for _ in range(probes.question.controls - 1):
        if any(BAD in probes.answers(_single(value)) for value in values):
            break
        _launch(probes, values, Purpose.EACH)
    bad, good, silent = _sort_values(probes, values)
    if not bad:
        return _no_failure_answer(probes, good, silent)
    _prove(probes, bad, good)
    if any(len(set(probes.judged_answers(_single(value)))) > 1 for value in values):
        return None
    return _choice_answer(probes, bad, good, silent, 1.0) if good else _all_fail_answer(probes, bad, silent)


def _prove(probes: ProbeCache, bad: Sequence[int], good: Sequence[int]) -> None:
    for _ in range(probes.question.repeat):
        _launch(probes, bad, Purpose.PROOF_BAD)
        _launch(probes, good, Purpose.PROOF_GOOD)


def _answer_if_settled(probes: ProbeCache, values: Sequence[int], rounds: int) -> SearchAnswer | None:
    """Return an answer for a flaky program after `rounds` runs of each value, or None if more runs are needed."""
    bad, good, silent = _sort_values(probes, values)
    if not bad:
        return _no_failure_answer(probes, good, silent) if rounds >= probes.question.controls else None
    if not good and all(GOOD not in probes.answers(_single(value)) for value in bad):
        return (
            _all_fail_answer(probes, bad, silent) if rounds >= runs_to_show(_HALF, probes.question.confidence) else None
        )
    answer = _answer_by_rates(probes, values)
    return answer if answer is not None and set(answer.open) <= set(silent) else None


def _answer_by_rates(probes: ProbeCache, values: Sequence[int]) -> SearchAnswer | None:
    """Return an answer with the values that fail more often than the value that fails least, or None if none does."""
    judged_values = [value for value in values if probes.judged_answers(_single(value))]
    if len(judged_values) < 2:
        return None
    rates = {value: (runs := probes.judged_answers(_single(value))).count(BAD) / len(runs) for value in judged_values}
    least, most = min(judged_values, key=rates.__getitem__), max(judged_values, key=rates.__getitem__)
    differ = {pair for pair in combinations(judged_values, 2) if _differ(probes, pair, len(judged_values))}
    bad = [value for value in judged_values if _pair(value, least) in differ]
    good = [value for value in judged_values if value not in bad and _pair(value, most) in differ]
    if not bad:
        return None
    open_ = [value for value in values if value not in (*bad, *good)]
    return _choice_answer(probes, bad, good, open_, probes.question.confidence)


def _differ(probes: ProbeCache, pair: tuple[int, int], values: int) -> bool:
    """Return whether the failure rates of two out of `values` compared values differ significantly."""
    separation = RateDifferenceTest()
    for first, second in zip(*(probes.judged_answers(_single(value)) for value in pair), strict=False):
        separation.add_pair(first is BAD, second is BAD)
    pairs = values * (values - 1) // 2
    return separation.is_shown(1 - (1 - probes.question.confidence) / pairs)


def _choice_answer(
    probes: ProbeCache, bad: Sequence[int], good: Sequence[int], open_: Sequence[int], confidence: float
) -> SearchAnswer:
    results = [counts_as for value in bad for counts_as in probes.judged_answers(_single(value))]
    return SearchAnswer(
        kind=AnswerKind.CHOICE,
        items=tuple(sorted(bad)),
        groups=tuple(map(_single, bad)) if len(bad) > 1 else (),
        confidence=confidence,
        p_bad=results.count(BAD) / len(results) if GOOD in results else None,
        why="the other values failed in another way, could not be judged, or fail at a rate in between"
        if open_
        else "",
        open=tuple(sorted(open_)),
        passing=_single(good[0]) if good else None,
        failing=_single(bad[0]),
    )


def _independent_answer(probes: ProbeCache, values: Sequence[int]) -> SearchAnswer:
    results = [counts_as for value in values for counts_as in probes.judged_answers(_single(value))]
    return SearchAnswer(
        kind=AnswerKind.INDEPENDENT,
        confidence=probes.question.confidence,
        p_bad=results.count(BAD) / len(results),
        why=f"{results.count(BAD)} of {len(results)} runs failed, and no value fails clearly more often than another",
        failing=next((_single(value) for value in values if BAD in probes.answers(_single(value))), None),
    )


def _all_fail_answer(probes: ProbeCache, bad: Sequence[int], silent: Sequence[int]) -> SearchAnswer:
    times = sum(len(probes.judged_answers(_single(value))) for value in bad)
    return SearchAnswer(
        kind=AnswerKind.INDEPENDENT,
        confidence=probes.question.confidence,
        why=f"each value that could be judged fails: {times} of {times} runs",
        open=tuple(silent),
        failing=_single(bad[0]),
    )


def _no_failure_answer(probes: ProbeCache, good: Sequence[int], silent: Sequence[int]) -> SearchAnswer:
    if silent or not good:
        return SearchAnswer(
            kind=AnswerKind.UNDECIDED,
            confidence=0.0,
            why="no value shows the failure in question, and some could not be judged or failed in another way",
            open=tuple(silent),
            passing=_single(good[0]) if good else None,
        )
    times = min(len(probes.judged_answers(_single(value))) for value in good)
    return SearchAnswer(
        kind=AnswerKind.NONE,
        confidence=probes.question.confidence,
        why=f"each value passed {times} of {times} times",
        passing=_single(good[0]),
    )


def _judgeable(probes: ProbeCache, values: Sequence[int]) -> list[int]:
    """Return the values that passed or failed clearly in enough runs."""
    counts = {
        value: (len(probes.answers(_single(value))), len(probes.judged_answers(_single(value)))) for value in values
    }
    return [
        value
        for value, (launches, judged_count) in counts.items()
        if launches - judged_count < judged_count + _MAX_EXCESS_UNJUDGED
    ]


def _fewest_judged(probes: ProbeCache, values: Sequence[int]) -> int:
    return min(len(probes.judged_answers(_single(value))) for value in values)


def _sort_values(probes: ProbeCache, values: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
    """Return three lists: values that failed at least once, values that only passed, and values without a result."""
    bad: list[int] = []
    good: list[int] = []
    silent: list[int] = []
    for value in values:
        results = probes.judged_answers(_single(value))
        (bad if BAD in results else good if results else silent).append(value)
    return bad, good, silent


def _launch(probes: ProbeCache, values: Sequence[int], purpose: Purpose) -> None:
    list(probes.launch([_single(value) for value in values], purpose, probes.all_units))


def _single(value: int) -> Subset:
    return frozenset({value})


def _pair(first: int, second: int) -> tuple[int, int]:
    return min(first, second), max(first, second)
