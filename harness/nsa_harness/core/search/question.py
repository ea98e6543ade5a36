"""The question of a search, its answer, and the cache of its probes.

The search gives each `Round` to the command that launches, and gets a `CountsAs` for each set. Stored files write sets
of items as spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby, islice, pairwise


class ProbeResult(StrEnum):
    """The result of a probe. DIFFERENT failed in another way than the one sought; UNRESOLVED could not be judged."""

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
    ELSEWHERE = "elsewhere"  # another set of the same size: does only the number matter?
    REDUCE = "reduce"  # towards a smallest set, item by item
    REPEAT = "repeat"  # the same set again: is the run flaky?
    DROP_ONE = "drop_one"  # the answer without one member: is each member needed?
    AS_MANY = "as_many"  # more sets of the same size: does each of them fail?
    ONE_FEWER = "one_fewer"  # sets with one item fewer: does each of them pass?
    PROOF_BAD = "proof_bad"  # only the answer
    PROOF_GOOD = "proof_good"  # everything but the answer
    RECHECK_GOOD = "recheck_good"
    RECHECK_BAD = "recheck_bad"


CONTROLS = frozenset({Purpose.CONTROL_GOOD, Purpose.CONTROL_BAD})
# The purposes of the probes that prove an answer; all others find it.
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
    """Subsets to launch at the same time, at most as many as the question allows.

    A subset that was launched before, in an earlier round or in this one, is to be launched again. A caller that stores
    launches of a killed search answers the n-th request for a subset with its n-th stored launch. `open` is the
    half-open range of items that are still open before the answers, `left` the most probes still to come in this
    search. `each` has one purpose per subset, if they differ.
    """

    subsets: tuple[Subset, ...]
    purpose: Purpose
    open: tuple[int, int]
    probes_left: int
    purpose_of_each: tuple[Purpose, ...] = ()

    @property
    def purposes(self) -> tuple[Purpose, ...]:
        return self.purpose_of_each or (self.purpose,) * len(self.subsets)


Probe = Callable[[Round], Sequence[ProbeResult]]  # returns one answer per subset, in order


@dataclass(frozen=True, kw_only=True)
class Observation:
    subset: Subset
    counts_as: ProbeResult


class OutOfBudget(Exception):
    """Raised by a probe that may launch no more; the text is the reason. The search then reports what is known."""


class QuestionKind(StrEnum):
    """The subsets that may be launched.

    `SET`: any subset, of layers, names or deltas. `ORDERED`: only prefixes, because a value includes all smaller ones.
    `RANGE`: only neighbours, or nothing, because the program takes a start and a stop. `CHOICE`: only sets of one item,
    because the items are alternative values.
    """

    SET = "set"
    ORDERED = "ordered"
    RANGE = "range"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True)
class SearchQuestion:
    """A question about `items`, numbered from 0. With all items off it passes, with all items on it fails.

    In an ORDERED question, the prefix of length k stands for the k-th larger value, and length 0 for the good end.
    `together` are groups of items that are switched on and off as one.
    """

    kind: QuestionKind
    items: int
    together: tuple[frozenset[int], ...] = ()
    # Time of a bad probe as a multiple of a good one's. It is read after both controls, which measure it.
    bad_cost: Callable[[], float] = lambda: 1.0
    at_once: int = 1
    confidence: float = 0.95
    repeat: int = 1  # launches of the final proof
    unbounded: bool = False  # ORDERED only: the bad end is not known to be bad, so gallop up to it
    max_probes: int | None = None  # None: no limit but the search's own
    baseline: int = 1  # launches of the good end before any probe is compared with it
    controls: int = 3  # passes of the bad end before the report states that it passes
    flaky: bool = False  # an end is known to have passed and failed, so no single answer is final

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
    INDEPENDENT = "independent"  # both ends fail equally often: the failure does not depend on what was varied
    NONE = "none"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Zone:
    """Neighbouring lengths of an ordered question with equal results: from `start` to before `stop`, 0 the good end."""

    start: int
    stop: int
    counts_as: ProbeResult


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """The answer of a search. `items` depends on `kind`.

    SINGLE (7,); RANGE (start, stop); SET and SEVERAL all members; THRESHOLD and COUNT (smallest bad,). A threshold is a
    prefix length. In a SET all items are needed together; in SEVERAL each of `groups` is enough. In a CHOICE `items`
    are the values that fail, and all others except `open` pass. `confidence` is 1.0 if every claim was launched, and
    less if runs are flaky or only a sample was launched.
    """

    kind: AnswerKind
    items: tuple[int, ...] = ()
    groups: tuple[Subset, ...] = ()  # SEVERAL, and a CHOICE with several failing values
    confidence: float = 1.0
    p_bad: float | None = None  # flaky runs only: the failure rate of the failing set
    why: str = ""  # one sentence: the reason for NONE and UNDECIDED, or what an answer could not prove
    open: tuple[int, ...] = ()  # items that may still matter
    known: tuple[int, ...] = ()  # UNDECIDED: items without which `failing` passes
    passing: Subset | None = None  # None: no set passed
    failing: Subset | None = None  # None: no set failed in the way sought
    zones: tuple[Zone, ...] = ()  # in order, if another failure hides where the sought one begins


Spans = tuple[tuple[int, int], ...]  # ordered, none empty, no two adjacent: equal sets have equal spans


def spans_of(indices: Iterable[int]) -> Spans:
    indices_in_order = sorted(set(indices))
    if not indices_in_order:
        return ()
    if indices_in_order[-1] - indices_in_order[0] + 1 == len(indices_in_order):
        return ((indices_in_order[0], indices_in_order[-1] + 1),)
    runs = (list(run) for _, run in groupby(enumerate(indices_in_order), key=lambda pair: pair[1] - pair[0]))
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


def indices_in(spans: Spans) -> frozenset[int]:
    return frozenset(chain.from_iterable(range(start, stop) for start, stop in spans))


def last_index(spans: Spans) -> int | None:
    """Return the last place, or None if the spans are empty."""
    return spans[-1][1] - 1 if spans else None


def are_valid_spans(spans: Collection[tuple[int, int]], items: int) -> bool:
    """Whether these are valid spans of places among `items` items."""
    edges = list(chain((-1,), chain.from_iterable(spans)))
    return edges[-1] <= items and all(before < after for before, after in pairwise(edges))


GOOD, BAD = ProbeResult.GOOD, ProbeResult.BAD


class ProbeCache:
    """All answers so far, what they imply, and the only way to launch further probes.

    It works in units, which are items or groups of items, in the order of their first items.
    """

    def __init__(self, question: SearchQuestion, probe: Probe) -> None:
        self.question = question
        self.units = group_units(question)
        self.observations: list[Observation] = []
        self._answers: dict[Subset, list[ProbeResult]] = {}
        self._counts = Counter[tuple[Subset, ProbeResult]]()
        self._early_answers: dict[
            tuple[Subset, Purpose], list[ProbeResult]
        ] = {}  # answers of `ahead` that `ask` has not taken
        self._probe_count = 0  # number of probes
        self._probe = probe

    @property
    def all_units(self) -> tuple[int, ...]:
        return tuple(range(len(self.units)))

    def items(self, subset: Iterable[int]) -> Subset:
        return frozenset(item for unit in subset for item in self.units[unit])

    def launch(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], left: int = 0
    ) -> Iterator[ProbeResult]:
        """Yield the answers in order. Sets are launched lazily, `at_once` at a time: an unread answer launches no more.

        `among` are the units that are still open; `left` is the most probes still to come after these. Raises
        OutOfBudget.
        """
        span = self._span(among)
        pending = iter(subsets)
        unlaunched = len(subsets)
        while batch := tuple(islice(pending, self.question.at_once)):
            unlaunched -= len(batch)
            yield from self._answer_batch(batch, purpose, span, left + unlaunched)

    def launch_missing(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int]
    ) -> Iterator[ProbeResult]:
        """Yield the answers in order, and launch only the sets that were never launched."""
        known_answers = [self.answers(subset) for subset in subsets]
        missing = [subset for subset, answers in zip(subsets, known_answers, strict=True) if not answers]
        fresh = self.launch(missing, purpose, among)
        for answers in known_answers:
            yield combine_answers(answers) if answers else next(fresh)

    def answers(self, subset: Subset) -> list[ProbeResult]:
        """Return the answers of all launches of the set."""
        return list(self._answers.get(subset, ()))

    def launched_sets(self) -> Iterable[Subset]:
        """Return each set that was launched."""
        return self._answers.keys()

    def count(self, subset: Subset, counts_as: ProbeResult) -> int:
        """Return how often the set counted as `counts_as`."""
        return self._counts[subset, counts_as]

    def implied_result(self, subset: Subset) -> ProbeResult | None:
        """Return what the set must count as if more items never turn bad into good; None: no answer implies it."""
        if any(answer.counts_as is BAD and answer.subset <= subset for answer in self.observations):
            return BAD
        if any(answer.counts_as is GOOD and answer.subset >= subset for answer in self.observations):
            return GOOD
        return None

    def launch_ahead(self, requests: Sequence[tuple[Subset, Purpose]], among: Iterable[int]) -> None:
        """Launch in parallel the sets that the search will need in any case; `ask` takes their answers later.

        If probes run one at a time, launch nothing: the first answer may make the others needless.
        """
        if self.question.at_once == 1 or len(requests) < 2:
            return
        span, pending = self._span(among), iter(requests)
        while batch := tuple(islice(pending, self.question.at_once)):
            for set_and_purpose, counts_as in zip(batch, self._launch(batch, span, 0), strict=True):
                self._early_answers.setdefault(set_and_purpose, []).append(counts_as)

    def _answer_batch(
        self, batch: tuple[Subset, ...], purpose: Purpose, span: tuple[int, int], left: int
    ) -> list[ProbeResult]:
        early_answers = [
            self._early_answers[subset, purpose].pop(0) if self._early_answers.get((subset, purpose)) else None
            for subset in batch
        ]
        missing = [
            (subset, purpose) for subset, counts_as in zip(batch, early_answers, strict=True) if counts_as is None
        ]
        fresh = iter(self._launch(missing, span, left) if missing else ())
        answers = [next(fresh) if counts_as is None else counts_as for counts_as in early_answers]
        for subset, counts_as in zip(batch, answers, strict=True):
            self.observations.append(Observation(subset=subset, counts_as=counts_as))
            self._answers.setdefault(subset, []).append(counts_as)
            self._counts[subset, counts_as] += 1
        return answers

    def _launch(
        self, batch: Sequence[tuple[Subset, Purpose]], span: tuple[int, int], left: int
    ) -> Sequence[ProbeResult]:
        limit = self.question.max_probes
        if limit is not None and self._probe_count + len(batch) > limit:
            raise OutOfBudget(f"{limit} probes are the most that one search makes, and they gave no proven answer")
        self._probe_count += len(batch)
        purposes = tuple(purpose for _, purpose in batch)
        round_ = Round(
            subsets=tuple(self.items(subset) for subset, _ in batch), purpose=purposes[0], open=span, probes_left=left,
            purpose_of_each=purposes if len(set(purposes)) > 1 else (),
        )  # fmt: skip
        answers = self._probe(round_)
        assert len(answers) == len(batch)
        return answers

    def _span(self, units: Iterable[int]) -> tuple[int, int]:
        items = self.items(units)
        return (min(items), max(items) + 1) if items else (0, 0)


def combine_answers(answers: Sequence[ProbeResult]) -> ProbeResult:
    """Return one answer for several launches of a set that do not contradict each other."""
    return next((counts_as for counts_as in answers if counts_as in (GOOD, BAD)), answers[-1])


def group_units(question: SearchQuestion) -> tuple[Subset, ...]:
    """Return the units: groups that share an item are one unit, and an item without a group is its own unit."""
    merged: list[Subset] = []
    for group in question.together:
        overlapping = [unit for unit in merged if unit & group]
        merged = [unit for unit in merged if not unit & group]
        merged.append(group.union(*overlapping))
    grouped_items = frozenset[int]().union(*merged)
    single_items = (frozenset({item}) for item in range(question.items) if item not in grouped_items)
    return tuple(sorted((*merged, *single_items), key=min))
