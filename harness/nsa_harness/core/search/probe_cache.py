"""Oracle: every probe so far, the only way to more, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from nsa_harness.core.search.question import (
    CountsAs,
    OutOfBudget,
    Probe,
    ProbeAnswer,
    Purpose,
    Round,
    SearchQuestion,
    Subset,
)

GOOD, BAD = CountsAs.GOOD, CountsAs.BAD


class ProbeCache:
    """Speaks of units, which are items that travel together; only the probe sees items.

    The order of the units is the order of their first items.
    """

    def __init__(self, question: SearchQuestion, probe: Probe) -> None:
        self.question = question
        self.units = units(question)
        self.observations: list[ProbeAnswer] = []
        self._answers: dict[Subset, list[CountsAs]] = {}
        self._counts = Counter[tuple[Subset, CountsAs]]()
        self._ahead: dict[tuple[Subset, Purpose], list[CountsAs]] = {}  # launched, and not asked for yet
        self._made = 0  # probes
        self._probe = probe

    @property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(len(self.units)))

    def items(self, subset: Iterable[int]) -> Subset:
        return frozenset(item for unit in subset for item in self.units[unit])

    def ask(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], left: int = 0
    ) -> Iterator[CountsAs]:
        """The answers in order, asked as many at once as allowed; who stops listening asks no further round.

        `among` are the units that are open before. Raises OutOfBudget, as the probe may too.
        """
        span = self._span(among)
        waiting = iter(subsets)
        rest = len(subsets)
        while batch := tuple(islice(waiting, self.question.at_once)):
            rest -= len(batch)
            yield from self._round(batch, purpose, span, left + rest)

    def once(self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int]) -> Iterator[CountsAs]:
        """The answers in order, asking only those never asked."""
        known = [self.answers(subset) for subset in subsets]
        missing = [subset for subset, answers in zip(subsets, known, strict=True) if not answers]
        fresh = self.ask(missing, purpose, among)
        for answers in known:
            yield together(answers) if answers else next(fresh)

    def answers(self, subset: Subset) -> list[CountsAs]:
        """What it counted as, each time it was asked."""
        return list(self._answers.get(subset, ()))

    def asked(self) -> Iterable[Subset]:
        """Each set that was asked."""
        return self._answers.keys()

    def count(self, subset: Subset, counts_as: CountsAs) -> int:
        """How often it counted as that."""
        return self._counts[subset, counts_as]

    def implied(self, subset: Subset) -> CountsAs | None:
        """What it must count as if more items never turn bad into good; None if nothing asked tells."""
        if any(seen.counts_as is BAD and seen.subset <= subset for seen in self.observations):
            return BAD
        if any(seen.counts_as is GOOD and seen.subset >= subset for seen in self.observations):
            return GOOD
        return None

    def ahead(self, wanted: Sequence[tuple[Subset, Purpose]], among: Iterable[int]) -> None:
        """Launch side by side what will be asked next, whatever the answers are; `ask` gives them when it is.

        Nothing where one probe runs at a time: a first answer may make the others needless.
        """
        if self.question.at_once == 1 or len(wanted) < 2:
            return
        span, waiting = self._span(among), iter(wanted)
        while batch := tuple(islice(waiting, self.question.at_once)):
            for asked, counts_as in zip(batch, self._launched(batch, span, 0), strict=True):
                self._ahead.setdefault(asked, []).append(counts_as)

    def _round(self, batch: tuple[Subset, ...], purpose: Purpose, span: tuple[int, int], left: int) -> list[CountsAs]:
        known = [
            self._ahead[subset, purpose].pop(0) if self._ahead.get((subset, purpose)) else None for subset in batch
        ]
        missing = [(subset, purpose) for subset, counts_as in zip(batch, known, strict=True) if counts_as is None]
        fresh = iter(self._launched(missing, span, left) if missing else ())
        answers = [next(fresh) if counts_as is None else counts_as for counts_as in known]
        for subset, counts_as in zip(batch, answers, strict=True):
            self.observations.append(ProbeAnswer(subset=subset, counts_as=counts_as))
            self._answers.setdefault(subset, []).append(counts_as)
            self._counts[subset, counts_as] += 1
        return answers

    def _launched(
        self, batch: Sequence[tuple[Subset, Purpose]], span: tuple[int, int], left: int
    ) -> Sequence[CountsAs]:
        limit = self.question.max_probes
        if limit is not None and self._made + len(batch) > limit:
            raise OutOfBudget(f"{limit} probes are the most that one search makes, and they gave no proven answer")
        self._made += len(batch)
        purposes = tuple(purpose for _, purpose in batch)
        asked = Round(
            subsets=tuple(self.items(subset) for subset, _ in batch), purpose=purposes[0], open=span, left=left,
            each=purposes if len(set(purposes)) > 1 else (),
        )  # fmt: skip
        answers = self._probe(asked)
        assert len(answers) == len(batch)
        return answers

    def _span(self, units: Iterable[int]) -> tuple[int, int]:
        items = self.items(units)
        return (min(items), max(items) + 1) if items else (0, 0)


def together(answers: Sequence[CountsAs]) -> CountsAs:
    """One answer for the same question asked several times, of which none contradicts another."""
    return next((counts_as for counts_as in answers if counts_as in (GOOD, BAD)), answers[-1])


def units(question: SearchQuestion) -> tuple[Subset, ...]:
    """Groups that share an item are one unit; an item of no group is a unit of its own."""
    joined: list[Subset] = []
    for group in question.together:
        touched = [unit for unit in joined if unit & group]
        joined = [unit for unit in joined if not unit & group]
        joined.append(group.union(*touched))
    grouped = frozenset[int]().union(*joined)
    alone = (frozenset({item}) for item in range(question.items) if item not in grouped)
    return tuple(sorted((*joined, *alone), key=min))
