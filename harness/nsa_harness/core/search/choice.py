"""The search among values of which only one is set at a time: which fail, and whether the value decides it at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from nsa_harness.core.experiment.statistics import RAREST, Separation, tries
from nsa_harness.core.search.question import BAD, GOOD, AnswerKind, CountsAs, ProbeCache, Purpose, SearchAnswer, Subset

_HALF = 0.5  # values that each failed so often in a row that half of their runs would have shown a pass
_TWICE = 2  # more often than it could be judged: no value is asked on that could not be so often


def among_values(probes: ProbeCache) -> SearchAnswer:
    """Launch each value by itself. If one ends both ways, launch all again in turn until their rates differ.

    Raises OutOfBudget.
    """
    values = tuple(probes.everything)
    if not probes.question.flaky and (answer := _believed(probes, values)):
        return answer
    proven = False
    while (asked := _worth_asking(probes, values)) and _least(probes, asked) < most_rounds(probes.question.confidence):
        _ask(probes, asked, Purpose.REPEAT)
        answer = _weighed(probes, values, _least(probes, asked))
        if answer is not None and not proven and answer.kind is AnswerKind.CHOICE:
            proven = True
            _prove(probes, answer.items, [value for value in values if value not in (*answer.items, *answer.open)])
            answer = _weighed(probes, values, _least(probes, asked))
        if answer is not None:
            return answer
    bad, good, silent = _sorted(probes, values)
    if not bad:
        return _nothing(probes, good, silent)
    return _parted(probes, values) or _independent(probes, values)


def most_rounds(confidence: float) -> int:
    """Return the most launches of each value: one that fails in a fifth of its runs has shown by then."""
    return tries(RAREST, confidence)


def _believed(probes: ProbeCache, values: Sequence[int]) -> SearchAnswer | None:
    """Return the answer if each value ends in only one way, in the search and in the proof; else None."""
    _ask(probes, values, Purpose.EACH)
    for _ in range(probes.question.controls - 1):
        if any(BAD in probes.answers(_alone(value)) for value in values):
            break
        _ask(probes, values, Purpose.EACH)
    bad, good, silent = _sorted(probes, values)
    if not bad:
        return _nothing(probes, good, silent)
    _prove(probes, bad, good)
    if any(len(set(_judged(probes, value))) > 1 for value in values):
        return None
    return _depends(probes, bad, good, silent, 1.0) if good else _each_fails(probes, bad, silent)


def _prove(probes: ProbeCache, bad: Sequence[int], good: Sequence[int]) -> None:
    for _ in range(probes.question.repeat):
        _ask(probes, bad, Purpose.PROOF_BAD)
        _ask(probes, good, Purpose.PROOF_GOOD)


def _weighed(probes: ProbeCache, values: Sequence[int], rounds: int) -> SearchAnswer | None:
    """Return the answer that this many rounds have settled, or None."""
    bad, good, silent = _sorted(probes, values)
    if not bad:
        return _nothing(probes, good, silent) if rounds >= probes.question.controls else None
    if not good and all(GOOD not in probes.answers(_alone(value)) for value in bad):
        return _each_fails(probes, bad, silent) if rounds >= tries(_HALF, probes.question.confidence) else None
    answer = _parted(probes, values)
    return answer if answer is not None and set(answer.open) <= set(silent) else None


def _parted(probes: ProbeCache, values: Sequence[int]) -> SearchAnswer | None:
    """Return the values that fail more often than the best one; None: no two of them differ."""
    judged = [value for value in values if _judged(probes, value)]
    if len(judged) < 2:
        return None
    least, most = min(judged, key=lambda one: _rate(probes, one)), max(judged, key=lambda one: _rate(probes, one))
    differ = {pair for pair in combinations(judged, 2) if _differ(probes, pair, len(judged))}
    bad = [one for one in judged if _pair(one, least) in differ]
    good = [one for one in judged if one not in bad and _pair(one, most) in differ]
    if not bad:
        return None
    open_ = [one for one in values if one not in (*bad, *good)]
    return _depends(probes, bad, good, open_, probes.question.confidence)


def _differ(probes: ProbeCache, pair: tuple[int, int], values: int) -> bool:
    """Whether two values differ, at the confidence of the question for all pairs together after every round."""
    separation = Separation()
    for first, second in zip(*(_judged(probes, value) for value in pair), strict=False):
        separation.learn(first is BAD, second is BAD)
    pairs = values * (values - 1) // 2
    return separation.shown(1 - (1 - probes.question.confidence) / pairs)


def _depends(
    probes: ProbeCache, bad: Sequence[int], good: Sequence[int], open_: Sequence[int], confidence: float
) -> SearchAnswer:
    seen = [counts_as for value in bad for counts_as in _judged(probes, value)]
    return SearchAnswer(
        kind=AnswerKind.CHOICE,
        items=tuple(sorted(bad)),
        groups=tuple(map(_alone, bad)) if len(bad) > 1 else (),
        confidence=confidence,
        p_bad=seen.count(BAD) / len(seen) if GOOD in seen else None,
        why="the others failed in another way, could not be judged, or lie in between" if open_ else "",
        open=tuple(sorted(open_)),
        passing=_alone(good[0]) if good else None,
        failing=_alone(bad[0]),
    )


def _independent(probes: ProbeCache, values: Sequence[int]) -> SearchAnswer:
    seen = [counts_as for value in values for counts_as in _judged(probes, value)]
    return SearchAnswer(
        kind=AnswerKind.INDEPENDENT,
        confidence=probes.question.confidence,
        p_bad=seen.count(BAD) / len(seen),
        why=f"{seen.count(BAD)} of {len(seen)} runs failed, and no value so much more often than another",
        failing=next((_alone(value) for value in values if BAD in probes.answers(_alone(value))), None),
    )


def _each_fails(probes: ProbeCache, bad: Sequence[int], silent: Sequence[int]) -> SearchAnswer:
    times = sum(len(_judged(probes, value)) for value in bad)
    return SearchAnswer(
        kind=AnswerKind.INDEPENDENT,
        confidence=probes.question.confidence,
        why=f"each value that could be judged fails: {times} of {times} runs",
        open=tuple(silent),
        failing=_alone(bad[0]),
    )


def _nothing(probes: ProbeCache, good: Sequence[int], silent: Sequence[int]) -> SearchAnswer:
    if silent or not good:
        return SearchAnswer(
            kind=AnswerKind.UNDECIDED,
            confidence=0.0,
            why="no value fails in the way sought, and some could not be judged or fail in another way",
            open=tuple(silent),
            passing=_alone(good[0]) if good else None,
        )
    times = min(len(_judged(probes, value)) for value in good)
    return SearchAnswer(
        kind=AnswerKind.NONE,
        confidence=probes.question.confidence,
        why=f"each value passed {times} of {times}: never seen failing",
        passing=_alone(good[0]),
    )


def _worth_asking(probes: ProbeCache, values: Sequence[int]) -> list[int]:
    """Return the values without those that mostly could not be judged."""
    counts = {value: (len(probes.answers(_alone(value))), len(_judged(probes, value))) for value in values}
    return [one for one, (asked, judged) in counts.items() if asked - judged < judged + _TWICE]


def _least(probes: ProbeCache, values: Sequence[int]) -> int:
    return min(len(_judged(probes, value)) for value in values)


def _sorted(probes: ProbeCache, values: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the values that failed as sought at least once, those that only passed, and those never judged."""
    bad: list[int] = []
    good: list[int] = []
    silent: list[int] = []
    for value in values:
        judged = _judged(probes, value)
        (bad if BAD in judged else good if judged else silent).append(value)
    return bad, good, silent


def _ask(probes: ProbeCache, values: Sequence[int], purpose: Purpose) -> None:
    list(probes.ask([_alone(value) for value in values], purpose, probes.everything))


def _judged(probes: ProbeCache, value: int) -> list[CountsAs]:
    return [counts_as for counts_as in probes.answers(_alone(value)) if counts_as in (GOOD, BAD)]


def _rate(probes: ProbeCache, value: int) -> float:
    judged = _judged(probes, value)
    return judged.count(BAD) / len(judged)


def _alone(value: int) -> Subset:
    return frozenset({value})


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
