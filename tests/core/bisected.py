"""Builders: questions, programs that fail by rule, and a probe that writes down what it was asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

from nsa_harness.core.search.plan import find_smallest_difference
from nsa_harness.core.search.question import (
    CONTROLS,
    PROOFS,
    AnswerKind,
    ProbeResult,
    Purpose,
    QuestionKind,
    Round,
    SearchAnswer,
    SearchQuestion,
    Subset,
)

GOOD, BAD, DIFFERENT, UNRESOLVED = ProbeResult.GOOD, ProbeResult.BAD, ProbeResult.DIFFERENT, ProbeResult.UNRESOLVED
EDGES = {Purpose.RIGHT_EDGE, Purpose.LEFT_EDGE}

Rule = Callable[[Subset], ProbeResult]


def question(items: int, **changes: object) -> SearchQuestion:
    return SearchQuestion(**{"kind": QuestionKind.SET, "items": items, **changes})  # type: ignore[arg-type]


def ordered(items: int, **changes: object) -> SearchQuestion:
    return question(items, kind=QuestionKind.ORDERED, **changes)


def in_a_row(items: int, **changes: object) -> SearchQuestion:
    """Only neighbours may be asked together."""
    return question(items, kind=QuestionKind.RANGE, **changes)


def needs(*culprits: Iterable[int]) -> Rule:
    """Fails where all of one of the culprits is on."""
    sets = [frozenset(culprit) for culprit in culprits]
    return lambda subset: BAD if any(culprit <= subset for culprit in sets) else GOOD


def at_least(count: int) -> Rule:
    return lambda subset: BAD if len(subset) >= count else GOOD


def unjudged(rule: Rule, *lengths: int, counts_as: ProbeResult = UNRESOLVED) -> Rule:
    """Sets of these lengths say nothing."""
    return lambda subset: counts_as if len(subset) in lengths else rule(subset)


def sometimes(rule: Rule, rate: float, seed: int, false_bad: float = 0.0) -> Rule:
    random = Random(seed)
    return lambda subset: BAD if random.random() < (rate if rule(subset) is BAD else false_bad) else GOOD


class ProbeCache:
    """A probe that keeps its rounds."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.rounds: list[Round] = []
        self.told: list[tuple[Subset, ProbeResult]] = []

    def __call__(self, asked: Round) -> list[ProbeResult]:
        self.rounds.append(asked)
        answers = [self._rule(subset) for subset in asked.subsets]
        self.told += zip(asked.subsets, answers, strict=True)
        return answers

    def count(self, *purposes: Purpose) -> int:
        """Probes for these purposes; of all, if none is named."""
        return sum(not purposes or purpose in purposes for one in self.rounds for purpose in one.purposes)

    def plan(self) -> int:
        """Controls, search and shape tests, without proofs and controls asked again."""
        return sum(purpose not in PROOFS for one in self.rounds for purpose in one.purposes)

    def search(self) -> int:
        return self.plan() - self.count(*CONTROLS)

    def by_purpose(self) -> Counter[Purpose]:
        return Counter(purpose for one in self.rounds for purpose in one.purposes)


def bisected(asked: SearchQuestion, rule: Rule) -> tuple[SearchAnswer, ProbeCache]:
    probe = ProbeCache(rule)
    return find_smallest_difference(asked, probe), probe


def named(members: Iterable[int]) -> tuple[AnswerKind, tuple[int, ...]]:
    """How one culprit is told."""
    items = tuple(sorted(members))
    if len(items) == 1:
        return AnswerKind.SINGLE, items
    if items[-1] - items[0] + 1 == len(items):
        return AnswerKind.RANGE, (items[0], items[-1] + 1)
    return AnswerKind.SET, items


def hull(members: Iterable[int]) -> range:
    """The smallest range that holds all of them."""
    return range(min(members := tuple(members)), max(members) + 1)


def shown(answer: SearchAnswer) -> tuple[AnswerKind, tuple[int, ...]]:
    return answer.kind, answer.items
