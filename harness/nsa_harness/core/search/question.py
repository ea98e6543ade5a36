"""The question of a search, its answer, and the probes between them.

`Round` and `CountsAs` cross between the search and whoever launches. Sets of items are written as spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby, islice, pairwise


class CountsAs(StrEnum):
    """What a probe counts as. DIFFERENT failed in another way than the one sought; UNRESOLVED could not be judged."""

    GOOD = "good"
    BAD = "bad"
    DIFFERENT = "different"
    UNRESOLVED = "unresolved"


Subset = frozenset[int]  # the items that are switched on


class Purpose(StrEnum):
    """The purposes of a round, in the order of a search."""

    CONTROL_GOOD = "control_good"
    CONTROL_BAD = "control_bad"
    EACH = "each"  # one value of a choice
    GALLOP = "gallop"
    RIGHT_EDGE = "right_edge"
    ALONE = "alone"
    LEFT_EDGE = "left_edge"
    ENDS_ONLY = "ends_only"
    WITHOUT_MIDDLE = "without_middle"
    ELSEWHERE = "elsewhere"  # another set of the same size: does only the number count?
    REDUCE = "reduce"  # to a smallest set, item by item
    REPEAT = "repeat"  # the same question again: is the run flaky?
    DROP_ONE = "drop_one"  # the answer without one member: is each needed?
    AS_MANY = "as_many"  # further sets of the size found: does each of them fail?
    ONE_FEWER = "one_fewer"  # sets one smaller: does each of them pass?
    PROOF_BAD = "proof_bad"  # the answer alone
    PROOF_GOOD = "proof_good"  # everything but the answer
    RECHECK_GOOD = "recheck_good"
    RECHECK_BAD = "recheck_bad"


CONTROLS = frozenset({Purpose.CONTROL_GOOD, Purpose.CONTROL_BAD})
# What is asked once an answer stands; everything else finds it.
PROOFS = frozenset(
    {
        Purpose.DROP_ONE,
        Purpose.AS_MANY,
        Purpose.ONE_FEWER,
        Purpose.PROOF_BAD,
        Purpose.PROOF_GOOD,
        Purpose.RECHECK_GOOD,
        Purpose.RECHECK_BAD,
    }
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Subsets asked at the same time, at most as many as the question allows at once.

    A subset that was asked before, in an earlier round or in this one, is meant to be launched again: who keeps
    launches from a search that was killed answers its n-th asking with the n-th launch kept. `open` is the half-open
    range of items still open before the answers, `left` the worst case of probes still to come in this search.
    `each` says what each subset is asked for, where that is not one purpose.
    """

    subsets: tuple[Subset, ...]
    purpose: Purpose
    open: tuple[int, int]
    left: int
    each: tuple[Purpose, ...] = ()

    @property
    def purposes(self) -> tuple[Purpose, ...]:
        return self.each or (self.purpose,) * len(self.subsets)


Probe = Callable[[Round], Sequence[CountsAs]]  # one answer for each subset, in their order


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    subset: Subset
    counts_as: CountsAs


class OutOfBudget(Exception):
    """Raised by a probe that may launch no more: the search ends and tells what is known. Its text says why."""


class QuestionKind(StrEnum):
    """The subsets that may be launched. `SET`: any (layers, names, deltas). `ORDERED`: a value, so only prefixes.

    `RANGE`: only items side by side, and none: the program is told from where to where, and nothing else.
    `CHOICE`: values of which just one is set at a time, so only sets of one are.
    """

    SET = "set"
    ORDERED = "ordered"
    RANGE = "range"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True)
class SearchQuestion:
    """A question about `items`, numbered from 0: all off is the good end, all on is the bad one.

    An ORDERED question asks prefixes only: of length k for the k-th larger value, of length 0 for the good end.
    `together` are groups of items that go on and off as one.
    """

    kind: QuestionKind
    items: int
    together: tuple[frozenset[int], ...] = ()
    # Time of a bad probe in times of a good one; read after both controls, so that their times can decide it.
    bad_cost: Callable[[], float] = lambda: 1.0
    at_once: int = 1
    confidence: float = 0.95
    repeat: int = 1  # how often the final proof is run
    unbounded: bool = False  # ORDERED only: the bad end is not known to be bad, so gallop up to it
    max_probes: int | None = None  # None: no limit but the search's own
    baseline: int = 1  # how often the good end is run before anything is compared with it
    controls: int = 3  # how often the bad end must pass before it is reported to
    flaky: bool = False  # runs of an end are known to have ended both ways, so no answer is believed alone

    def __post_init__(self) -> None:
        assert self.items >= 1
        assert self.at_once >= 1
        assert self.repeat >= 1
        assert 0.5 <= self.confidence < 1
        assert not (self.unbounded if self.kind is QuestionKind.SET else self.together)


class AnswerKind(StrEnum):
    SINGLE = "single"
    RANGE = "range"
    SET = "set"
    SEVERAL = "several"
    THRESHOLD = "threshold"
    COUNT = "count"
    CHOICE = "choice"
    INDEPENDENT = "independent"  # both ends fail alike often: it does not depend on what was varied
    NONE = "none"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Zone:
    """Neighbours on an ordered question that end alike: lengths from `start` to before `stop`, 0 the good end."""

    start: int
    stop: int
    counts_as: CountsAs


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """`items`: single (7,); range (start, stop); set and several all members; threshold and count (smallest bad,).

    A threshold is a prefix length. Of an interaction `items` are all needed; of several, each of `groups` is enough.
    Of a choice `items` are the values that fail, each by itself; the rest but `open` passes.
    `confidence` is 1.0 where each claim was asked for itself, and less where runs are flaky or only a sample was.
    """

    kind: AnswerKind
    items: tuple[int, ...] = ()
    groups: tuple[Subset, ...] = ()  # several, and a choice of which several fail
    confidence: float = 1.0
    p_bad: float | None = None  # flaky only: how often what should fail does
    why: str = ""  # one sentence: what none and undecided rest on, or what an answer could not prove
    open: tuple[int, ...] = ()  # items that may still matter
    known: tuple[int, ...] = ()  # undecided: items without which `failing` passes
    passing: Subset | None = None  # None: nothing was seen to pass
    failing: Subset | None = None  # None: nothing was seen to fail in the way sought
    zones: tuple[Zone, ...] = ()  # in order, where another failure lies beside the one sought


Spans = tuple[tuple[int, int], ...]  # in order, none empty, no two of them touching: equal sets have equal spans


def spans_of(places: Iterable[int]) -> Spans:
    ordered = sorted(set(places))
    if not ordered:
        return ()
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return ((ordered[0], ordered[-1] + 1),)
    runs = (list(run) for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]))
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


def places_in(spans: Spans) -> frozenset[int]:
    return frozenset(chain.from_iterable(range(start, stop) for start, stop in spans))


def last_place(spans: Spans) -> int | None:
    """Return the last place, or None if the spans are empty."""
    return spans[-1][1] - 1 if spans else None


def within(spans: Collection[tuple[int, int]], items: int) -> bool:
    """Whether these are spans at all, of places among so many items."""
    edges = list(chain((-1,), chain.from_iterable(spans)))
    return edges[-1] <= items and all(before < after for before, after in pairwise(edges))


# The probes that were made.


GOOD, BAD = CountsAs.GOOD, CountsAs.BAD


class ProbeCache:
    """All probes so far, the only way to further ones, and what follows from them.

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
        """Return what the set counted as, each time it was launched."""
        return list(self._answers.get(subset, ()))

    def asked(self) -> Iterable[Subset]:
        """Return each set that was launched."""
        return self._answers.keys()

    def count(self, subset: Subset, counts_as: CountsAs) -> int:
        """Return how often the set counted so."""
        return self._counts[subset, counts_as]

    def implied(self, subset: Subset) -> CountsAs | None:
        """Return what the set must count as if more items never turn bad into good; None: no probe decides it."""
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
    """Return the units: groups that share an item are one unit, and an item of no group is one by itself."""
    joined: list[Subset] = []
    for group in question.together:
        touched = [unit for unit in joined if unit & group]
        joined = [unit for unit in joined if not unit & group]
        joined.append(group.union(*touched))
    grouped = frozenset[int]().union(*joined)
    alone = (frozenset({item}) for item in range(question.items) if item not in grouped)
    return tuple(sorted((*joined, *alone), key=min))
