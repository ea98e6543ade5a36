"""The answers of a bisection, made from the results of its test runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nsa_harness.core.search.minimal import FailingSet, SetJudge, ranges_without
from nsa_harness.core.search.question import BAD, GOOD, AnswerKind, ProbeCache, QuestionKind, SearchAnswer, Subset

UNTESTED = 0.5  # the probability of a claim that no probe could test, or that other probes contradict


def sets_without(probes: ProbeCache, culprits: Sequence[FailingSet]) -> tuple[Subset, ...]:
    """Return the maximal sets of items that contain none of the culprits."""
    member_sets = [culprit.members for culprit in culprits]
    if probes.question.kind is QuestionKind.RANGE:
        return ranges_without(len(probes.units), member_sets)
    return (frozenset(probes.all_units).difference(*member_sets),)


def undecided_answer(probes: ProbeCache, why: str, open_units: Subset = frozenset()) -> SearchAnswer:
    """Return an undecided answer with all that is known. `open_units` may still matter; () for all not excluded."""
    failing_set = min(
        (observation.subset for observation in probes.observations if observation.counts_as is BAD),
        key=size_order,
        default=None,
    )
    passing_sets = [observation.subset for observation in probes.observations if observation.counts_as is GOOD]
    passing_inside = [subset for subset in passing_sets if failing_set is None or subset < failing_set]
    passing_set = max(passing_inside, key=len, default=None)
    needed_members = _needed_members(probes, failing_set)
    within = frozenset(probes.all_units) if failing_set is None else failing_set
    is_ordered = probes.question.kind is QuestionKind.ORDERED
    open_members = within - (passing_set or frozenset()) if is_ordered else within - needed_members
    return SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why=why,
        open=tuple(sorted(probes.items(open_units - needed_members or open_members))),
        known=() if is_ordered else tuple(sorted(probes.items(needed_members))),
        passing=None if passing_set is None else probes.items(passing_set),
        failing=None if failing_set is None else probes.items(failing_set),
    )


def _needed_members(probes: ProbeCache, failing: Subset | None) -> Subset:
    """Return the members without which the program passed. The set is empty if results contradict each other."""
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
    """Return an answer saying that each of `culprits` is enough to make the program fail.

    If the remaining items did not pass, or if no other set of this size passed, the answer says so and is not certain.
    `sample_confidence` is the confidence if only a sample of the members was tested. `caveat` replaces all other
    limitations that the answer would state.
    """
    groups = tuple(probes.items(culprit.members) for culprit in culprits)
    kind, items = _kind_and_items(groups)
    count_may_matter = _only_count_may_matter(probes, culprits)
    confidence = sample_confidence if any(culprit.sampled for culprit in culprits) else 1.0
    return SearchAnswer(
        kind=kind,
        items=items,
        groups=groups if len(groups) > 1 else (),
        confidence=confidence * (UNTESTED if count_may_matter or not rest_passes else 1.0),
        p_bad=judge.failure_rate,
        why=caveat or _caveat(probes, culprits, rest_passes, count_may_matter),
        passing=_passing_set(probes, culprits),
        failing=groups[0],
    )


def _only_count_may_matter(probes: ProbeCache, culprits: Sequence[FailingSet]) -> bool:
    """Return whether any other set of the smallest culprit's size may fail too: no set of at least that size passed."""
    smallest = min(len(culprit.members) for culprit in culprits)
    if not 1 < smallest < len(probes.units) or probes.question.together:
        return False
    return all(len(answer.subset) < smallest for answer in probes.observations if answer.counts_as is GOOD)


def count_text(count: int) -> str:
    return f"no set of {count} items passed; any {count} items may fail"


def _caveat(probes: ProbeCache, culprits: Sequence[FailingSet], rest_passes: bool, count_may_matter: bool) -> str:
    if not rest_passes:
        return "the configuration without these items was not seen to pass, so there may be more culprits"
    if count_may_matter:
        return count_text(min(len(culprit.members) for culprit in culprits))
    if any(culprit.sampled for culprit in culprits):
        return "only the first, the last and a sample of these items were removed one at a time"
    if probes.question.kind is QuestionKind.RANGE and any(len(culprit.members) > 2 for culprit in culprits):
        return (
            "no smaller range in it fails; whether the items between its ends are needed cannot be tested with ranges"
        )
    return ""


def _passing_set(probes: ProbeCache, culprits: Sequence[FailingSet]) -> Subset | None:
    """Return a large set of items for which the program passed, or None if there is none."""
    rests_first = sorted(sets_without(probes, culprits), key=len, reverse=True)
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


def size_order(subset: Collection[int]) -> tuple[int, list[int]]:
    return len(subset), sorted(subset)
