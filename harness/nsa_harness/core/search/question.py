"""The question that a bisection answers, its answer, and the results of its test runs.

A probe is one test run: one launch of the program in one configuration. A configuration is written as the set of the
items that are switched on. The search passes each `Round` of sets to a callback that launches them and returns one
`ProbeResult` per set. Stored files write a set as spans of item numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby, islice, pairwise
from random import Random


class ProbeResult(StrEnum):
    """The way one test run of a bisection ended."""

    GOOD = "good"  # it passed
    BAD = "bad"  # it failed in the way that the search looks for
    DIFFERENT = "different"  # it failed in another way
    UNRESOLVED = "unresolved"  # it could not be judged, for instance because it could not be launched


Subset = frozenset[int]  # the numbers of the items that are switched on


class Purpose(StrEnum):
    """The reason for a test run of a bisection."""

    CONTROL_GOOD = "control_good"
    CONTROL_BAD = "control_bad"
    EACH = "each"  # one value of a choice
    GALLOP = "gallop"
    RIGHT_EDGE = "right_edge"
    ALONE = "alone"
    LEFT_EDGE = "left_edge"
    ENDS_ONLY = "ends_only"
    WITHOUT_MIDDLE = "without_middle"
    ELSEWHERE = "elsewhere"  # another set of the same size: does only the number of items matter?
    REDUCE = "reduce"  # a smaller set: which items can be removed while it still fails?
    REPEAT = "repeat"  # the same set again: is the program flaky?
    DROP_ONE = "drop_one"  # the answer without one of its items: is each item needed?
    AS_MANY = "as_many"  # more sets of the same size: does each of them fail?
    ONE_FEWER = "one_fewer"  # sets with one item less: does each of them pass?
    PROOF_BAD = "proof_bad"  # only the items of the answer: must fail
    PROOF_GOOD = "proof_good"  # all items except those of the answer: must pass
    RECHECK_GOOD = "recheck_good"
    RECHECK_BAD = "recheck_bad"


CONTROLS = frozenset({Purpose.CONTROL_GOOD, Purpose.CONTROL_BAD})
# The purposes of the probes that prove an answer. Probes with any other purpose help to find it.
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
_FAILS_IF_TRUE = frozenset({Purpose.CONTROL_BAD, Purpose.AS_MANY, Purpose.PROOF_BAD, Purpose.RECHECK_BAD})


def expected_result(purpose: Purpose) -> ProbeResult:
    """Return the result that a proof or a control for this purpose has if the answer of the search is true."""
    return ProbeResult.BAD if purpose in _FAILS_IF_TRUE else ProbeResult.GOOD


def _is_surprise(purpose: Purpose, counts_as: ProbeResult) -> bool:
    """Return whether a result refutes what the search wants to prove. If the rest fails, it has one more culprit."""
    return counts_as is not expected_result(purpose) and purpose is not Purpose.PROOF_GOOD


@dataclass(frozen=True, kw_only=True)
class Round:
    """A group of test runs to make at the same time, each given as a set of switched-on items.

    A set that appears again must be run again. To continue a killed search, answer the n-th request for a set with its
    n-th stored result. `open` is the half-open range of items that may still belong to the answer. `probes_left` is the
    largest number of test runs that may follow. `purpose_of_each` is empty if all sets have the same purpose.
    """

    subsets: tuple[Subset, ...]
    purpose: Purpose
    open: tuple[int, int]
    probes_left: int
    purpose_of_each: tuple[Purpose, ...] = ()

    @property
    def purposes(self) -> tuple[Purpose, ...]:
        return self.purpose_of_each or (self.purpose,) * len(self.subsets)


Probe = Callable[[Round], Sequence[ProbeResult]]  # launches a round and returns one result per set, in order


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The result of one test run with a set of items switched on."""

    subset: Subset
    counts_as: ProbeResult


class OutOfBudget(Exception):
    """Raised, with the reason, if no further test run is allowed. The search then reports what is known."""


class QuestionKind(StrEnum):
    """The kind of question that a bisection answers, which determines the sets of items that it can switch on."""

    SET = "set"  # any combination, for instance of layers, variables or changed keys
    ORDERED = "ordered"  # only the first k items, because a value includes all smaller values
    RANGE = "range"  # only consecutive items or none, because the program takes a start and a stop
    CHOICE = "choice"  # only one item, because the items are alternative values


@dataclass(frozen=True, kw_only=True)
class SearchQuestion:
    """The question of which items make a program fail.

    The items are numbered from 0. The known-good configuration (all items off) is expected to pass, and the known-bad
    one (all items on) to fail. In an ORDERED question, the first k items stand for the k-th value above the known-good
    value. The items of each group in `together` are only switched on and off together.
    """

    kind: QuestionKind
    items: int
    together: tuple[frozenset[int], ...] = ()
    # How many times longer a failing probe takes than a passing one. Read after the controls, which measure it.
    bad_cost: Callable[[], float] = lambda: 1.0
    at_once: int = 1  # number of probes that run in parallel
    confidence: float = 0.95
    repeat: int = 1  # launches of the final proof
    unbounded: bool = False  # ORDERED only: no failing value is known, so try 1, 2, 4, ... items until one fails
    max_probes: int | None = None  # None: only the search's own limits apply
    baseline: int = 1  # launches of the good end before any probe is compared with it
    controls: int = 3  # passes of the bad end before the report states that it passes
    flaky: bool = False  # one configuration is known to have passed and failed, so no single result is final
    order_seed: str = ""  # decides the order of runs whose results are compared with each other

    def __post_init__(self) -> None:
        assert self.items >= 1
        assert self.at_once >= 1
        assert self.repeat >= 1
        assert 0.5 <= self.confidence < 1
        assert not (self.unbounded if self.kind is QuestionKind.SET else self.together)


class AnswerKind(StrEnum):
    """The kinds of answer that a bisection can give."""

    SINGLE = "single"  # one item is enough
    RANGE = "range"  # consecutive items, all of them needed
    SET = "set"  # several items, all of them needed
    SEVERAL = "several"  # several culprits, each of which is enough
    THRESHOLD = "threshold"  # it fails from one value upwards
    COUNT = "count"  # any N items are enough
    CHOICE = "choice"  # some of the alternative values fail
    INDEPENDENT = "independent"  # both ends fail equally often: the failure does not depend on what was varied
    NONE = "none"  # the bad end never failed
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Zone:
    """A range of consecutive values, from `start` up to `stop`, with which the program ends in the same way."""

    start: int
    stop: int
    counts_as: ProbeResult


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """The answer of a bisection, which names the items that make the program fail.

    The meaning of `items` depends on `kind`. SINGLE: the one item. RANGE: start and stop. SET and SEVERAL: all items.
    THRESHOLD: the number of the first failing value. COUNT: the smallest failing number of items. CHOICE: the values
    that fail; all others except `open` pass. `confidence` is lower than 1.0 if the program is flaky or if only a sample
    of the sets was run.
    """

    kind: AnswerKind
    items: tuple[int, ...] = ()
    groups: tuple[Subset, ...] = ()  # for SEVERAL, and for a CHOICE with several failing values: each is enough
    confidence: float = 1.0
    p_bad: float | None = None  # flaky programs only: the failure rate of the failing set
    why: str = ""  # the reason for NONE, INDEPENDENT and UNDECIDED; for other kinds, what could not be proven
    open: tuple[int, ...] = ()  # items that may still matter
    known: tuple[int, ...] = ()  # UNDECIDED: items without which `failing` passes
    passing: Subset | None = None  # None: no set passed
    failing: Subset | None = None  # None: no set failed in the way sought
    zones: tuple[Zone, ...] = ()  # in order of the values, if another failure hides where the failure begins


# Half-open ranges in ascending order, none empty and no two adjacent, so that equal sets have equal spans.
Spans = tuple[tuple[int, int], ...]


def spans_of(indices: Iterable[int]) -> Spans:
    """Return the indices as ascending half-open ranges, for example `((0, 2), (4, 5))` for `{0, 1, 4}`."""
    indices_in_order = sorted(set(indices))
    if not indices_in_order:
        return ()
    if indices_in_order[-1] - indices_in_order[0] + 1 == len(indices_in_order):
        return ((indices_in_order[0], indices_in_order[-1] + 1),)
    runs = (list(run) for _, run in groupby(enumerate(indices_in_order), key=lambda pair: pair[1] - pair[0]))
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


def indices_in(spans: Spans) -> frozenset[int]:
    """Return every index in the half-open ranges `spans`. This is the inverse of `spans_of`."""
    return frozenset(chain.from_iterable(range(start, stop) for start, stop in spans))


def last_index(spans: Spans) -> int | None:
    """Return the largest index in the half-open ranges, or None if there are no ranges."""
    return spans[-1][1] - 1 if spans else None


def are_valid_spans(spans: Collection[tuple[int, int]], items: int) -> bool:
    """Return whether `spans` are ascending, separate half-open ranges of the numbers from 0 to `items` - 1."""
    edges = list(chain((-1,), chain.from_iterable(spans)))
    return edges[-1] <= items and all(before < after for before, after in pairwise(edges))


GOOD, BAD = ProbeResult.GOOD, ProbeResult.BAD


class ProbeCache:
    """A launcher for the test runs of one bisection that keeps all their results.

    A unit is an item, or a group of items that are switched on together. Sets contain the numbers of units, in the
    order of their first items.
    """

    def __init__(self, question: SearchQuestion, probe: Probe) -> None:
        self.question = question
        self.units = group_units(question)
        self.observations: list[Observation] = []
        self.order = Random(question.order_seed)  # draws the order of runs; a continued search draws the same order
        self._answers: dict[Subset, list[ProbeResult]] = {}
        self._counts = Counter[tuple[Subset, ProbeResult]]()
        # Results of `launch_ahead` that `launch` has not returned yet.
        self._early_answers: dict[tuple[Subset, Purpose], list[ProbeResult]] = {}
        self._probe_count = 0  # number of probes
        self._probe = probe

    @property
    def all_units(self) -> tuple[int, ...]:
        """The numbers of all units, where a unit is an item or a group of items switched on together."""
        return tuple(range(len(self.units)))

    def items(self, subset: Iterable[int]) -> Subset:
        """Return all items that belong to the units in `subset`."""
        if not self.question.together:
            return frozenset(subset)
        return frozenset(item for unit in subset for item in self.units[unit])

    def launch(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], probes_left: int = 0
    ) -> Iterator[ProbeResult]:
        """Run the program with each set of items, and yield the results. `among` are the items still in question."""
        span = self._span(among)
        pending = iter(subsets)
        remaining = len(subsets)
        while batch := tuple(islice(pending, self.question.at_once)):
            remaining -= len(batch)
            yield from self._answer_batch(batch, purpose, span, probes_left + remaining)

    def launch_missing(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int]
    ) -> Iterator[ProbeResult]:
        """Yield the result for each set of items. The program runs only for sets without a known result."""
        known_answers = [self.answers(subset) for subset in subsets]
        missing = [subset for subset, answers in zip(subsets, known_answers, strict=True) if not answers]
        fresh = self.launch(missing, purpose, among)
        for answers in known_answers:
            yield combine_answers(answers) if answers else next(fresh)

    def answers(self, subset: Subset) -> list[ProbeResult]:
        """Return the results of all runs with this set of items, in order of time."""
        return list(self._answers.get(subset, ()))

    def judged_answers(self, subset: Subset) -> list[ProbeResult]:
        """Return the results of the runs with this set of items that passed, or failed in the way looked for."""
        return [counts_as for counts_as in self._answers.get(subset, ()) if counts_as in (GOOD, BAD)]

    def launched_sets(self) -> Iterable[Subset]:
        """Return every set of items for which the program was run."""
        return self._answers.keys()

    def count(self, subset: Subset, counts_as: ProbeResult) -> int:
        """Return the number of runs with this set of items that had the result `counts_as`."""
        return self._counts[subset, counts_as]

    def implied_result(self, subset: Subset) -> ProbeResult | None:
        """Return the result for this set of items that follows from other results, or None if none follows.

        It is assumed that switching on more items never turns a failure into a pass. Then a superset of a failing set
        fails, and a subset of a passing set passes.
        """
        if any(answer.counts_as is BAD and answer.subset <= subset for answer in self.observations):
            return BAD
        if any(answer.counts_as is GOOD and answer.subset >= subset for answer in self.observations):
            return GOOD
        return None

    def launch_ahead(
        self, requests: Iterable[tuple[Subset, Purpose]], among: Iterable[int], *, until_surprise: bool = False
    ) -> None:
        """Run the program with sets of items whose results the search needs later. `launch` returns these results.

        The order is drawn at random, but runs that should fail alternate with runs that should pass. A machine that is
        in a bad state for several consecutive runs then affects both. With `until_surprise`, the runs stop after a
        result that refutes the answer. `among` has the units that may still belong to the answer.
        """
        requested = Counter(requests)
        for request, early_answers in self._early_answers.items():
            requested[request] -= len(early_answers)
        span, mixed = self._span(among), self._in_mixed_order(requested.elements())
        for start in range(0, len(mixed), self.question.at_once):
            batch = mixed[start : start + self.question.at_once]
            answers = self._launch(batch, span, len(mixed) - start - len(batch))
            for request, counts_as in zip(batch, answers, strict=True):
                self._early_answers.setdefault(request, []).append(counts_as)
            results = zip(batch, answers, strict=True)
            if until_surprise and any(_is_surprise(purpose, counts_as) for (_, purpose), counts_as in results):
                return

    def _in_mixed_order(self, requests: Iterable[tuple[Subset, Purpose]]) -> list[tuple[Subset, Purpose]]:
        """Return the requests in blocks in random order, each with runs that should fail and runs that should pass."""
        sides: dict[ProbeResult, list[tuple[Subset, Purpose]]] = {GOOD: [], BAD: []}
        for request in requests:
            sides[expected_result(request[1])].append(request)
        for side in sides.values():
            self.order.shuffle(side)
        fewer, more = sorted(sides.values(), key=len)
        blocks = max(len(fewer), 1)
        mixed = []
        for block in range(blocks):
            drawn = [*fewer[block::blocks], *more[block::blocks]]
            self.order.shuffle(drawn)
            mixed += drawn
        return mixed

    def _answer_batch(
        self, batch: tuple[Subset, ...], purpose: Purpose, span: tuple[int, int], probes_left: int
    ) -> list[ProbeResult]:
        early_answers = [
            self._early_answers[subset, purpose].pop(0) if self._early_answers.get((subset, purpose)) else None
            for subset in batch
        ]
        missing = [
            (subset, purpose) for subset, counts_as in zip(batch, early_answers, strict=True) if counts_as is None
        ]
        fresh = iter(self._launch(missing, span, probes_left) if missing else ())
        return [next(fresh) if counts_as is None else counts_as for counts_as in early_answers]

    def _launch(
        self, batch: Sequence[tuple[Subset, Purpose]], span: tuple[int, int], probes_left: int
    ) -> Sequence[ProbeResult]:
        limit = self.question.max_probes
        if limit is not None and self._probe_count + len(batch) > limit:
            raise OutOfBudget(f"no answer could be proven with {limit} probes, the maximum for one search")
        self._probe_count += len(batch)
        purposes = tuple(purpose for _, purpose in batch)
        round_ = Round(
            subsets=tuple(self.items(subset) for subset, _ in batch),
            purpose=purposes[0],
            open=span,
            probes_left=probes_left,
            purpose_of_each=purposes if len(set(purposes)) > 1 else (),
        )
        answers = self._probe(round_)
        for (subset, _), counts_as in zip(batch, answers, strict=True):
            self.observations.append(Observation(subset=subset, counts_as=counts_as))
            self._answers.setdefault(subset, []).append(counts_as)
            self._counts[subset, counts_as] += 1
        return answers

    def _span(self, units: Iterable[int]) -> tuple[int, int]:
        items = self.items(units)
        return (min(items), max(items) + 1) if items else (0, 0)


def combine_answers(answers: Sequence[ProbeResult]) -> ProbeResult:
    """Return the first GOOD or BAD result of a set's runs, or else the last result."""
    return next((counts_as for counts_as in answers if counts_as in (GOOD, BAD)), answers[-1])


def group_units(question: SearchQuestion) -> tuple[Subset, ...]:
    """Return the groups of items, by first items, that are switched on together; groups with shared items merged."""
    groups: list[Subset] = []
    for group in question.together:
        overlapping = [unit for unit in groups if unit & group]
        groups = [unit for unit in groups if not unit & group]
        groups.append(group.union(*overlapping))
    grouped_items = frozenset[int]().union(*groups)
    single_items = (frozenset({item}) for item in range(question.items) if item not in grouped_items)
    return tuple(sorted((*groups, *single_items), key=min))
