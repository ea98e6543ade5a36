"""The Bayesian search among flaky runs: every answer is evidence, and no single answer decides.

A set that contains the whole culprit fails at one rate, any other set at a lower rate. Both rates are unknown, and
every run is evidence about them. Their priors are beta distributions, so the posterior is known in closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import accumulate
from math import ceil, exp, lgamma, log, log2
from operator import mul

from nsa_harness.core.search.exact_search import Chain, Unjudged, points_around_zone, probes_at_worst
from nsa_harness.core.search.question import BAD, GOOD, PROOFS, CountsAs, ProbeCache, Purpose, Subset

_FAILS = (1.0, 1.0)  # prior of the higher rate: uniform
_PASSES = (0.25, 1.0)  # prior of the lower rate: mostly near 0, the rate of a program with no other fault
_MOST_FUTURES = 8  # each unanswered probe doubles the futures to weigh; the likeliest are enough to spread a round


Runs = tuple[int, int]  # how many runs passed, how many failed
Reference = tuple[Runs, Runs]  # the runs of sets that are known to fail, and of sets that are known to pass


class Belief:
    """The probability of each length of a chain to be the first that fails, while both rates are unknown.

    The last of them is the probability that no set of the chain fails, because earlier answers are not certain.
    """

    def __init__(self, chain: Chain, end: Subset, asked: Mapping[Subset, Runs]) -> None:
        """Search below `end`, which is known to fail more often than the empty set; both have been launched."""
        self._chain = chain
        edges = range(len(chain) + 1)
        # For each possible edge: the runs of the sets that must fail if this is the edge, ...
        self._reached = [[0, 0] for _ in edges]
        self._before = [[0, 0] for _ in edges]  # ... the runs of the sets that must pass, ...
        self._open = [0.0 for _ in edges]  # ... and the log-probability of the runs of all other sets
        self._shares: list[float] | None = None
        failing, passing = asked.get(end, (0, 0)), asked.get(frozenset(), (0, 0))
        for subset, runs in asked.items():
            inside = len(edges) if end <= subset else chain.longest_inside(subset)
            either = (_log_marginal_after(runs, failing, _FAILS), _log_marginal_after(runs, passing, _PASSES))
            self._note(inside, chain.shortest_around(subset), runs, _log_mean(*either))

    def learn(self, point: int, counts_as: CountsAs) -> None:
        """Add one more answer at a length of the chain."""
        if counts_as in (GOOD, BAD):
            self._note(point, point, (int(counts_as is GOOD), int(counts_as is BAD)), 0.0)

    def edges(self) -> list[float]:
        """Return the probability of each length from 1 to be the first that fails, and last, that none fails."""
        if self._shares is None:
            weights = [
                _log_marginal(reached[0], reached[1], _FAILS) + _log_marginal(before[0], before[1], _PASSES) + either
                for reached, before, either in zip(self._reached, self._before, self._open, strict=True)
            ]
            most = max(weights)
            shares = [exp(weight - most) for weight in weights]
            total = sum(shares)
            self._shares = [share / total for share in shares]
        return self._shares

    def likely(self, doubt: float) -> tuple[int, int]:
        """Return the lengths around the edge, one that passes and one that fails, wrong with probability `doubt`."""
        shares = list(accumulate(self.edges()))
        low = sum(share <= doubt / 2 for share in shares)
        high = 1 + sum(share < 1 - doubt / 2 for share in shares)
        return low, min(high, len(self._chain))

    def best(self, at_once: int, excluded: frozenset[int]) -> list[int]:
        """Return the `at_once` different lengths that are most informative when they are launched at the same time.

        Both ends of the chain are candidates: while the rates are hardly known, they may be the most informative.
        """
        futures = [(1.0, self)]
        points = [k for k in range(len(self._chain) + 1) if k not in excluded]
        chosen: list[int] = []
        while points and len(chosen) < at_once:
            futures = _futures(futures, chosen[-1]) if chosen else futures
            worth = [(chance, belief.information()) for chance, belief in futures]
            chosen.append(max(points, key=lambda point: sum(chance * bits[point] for chance, bits in worth)))
            points.remove(chosen[-1])
        return sorted(chosen)

    def information(self) -> list[float]:
        """Return the mutual information, in bits, of the edge and the answer at each length from 0."""
        rates = self._rates()
        shares = self.edges()
        bad = sum(share * lower for share, (_, lower) in zip(shares, rates, strict=True))
        known = sum(share * _entropy(lower) for share, (_, lower) in zip(shares, rates, strict=True))
        bits = [_entropy(bad) - known]
        for share, (higher, lower) in zip(shares, rates, strict=True):
            bad += share * (higher - lower)
            known += share * (_entropy(higher) - _entropy(lower))
            bits.append(_entropy(bad) - known)
        return bits

    def after(self, point: int) -> Iterator[tuple[float, Belief]]:
        """Yield each possible answer at this length as its probability and the belief after it."""
        rates = [higher if edge <= point else lower for edge, (higher, lower) in enumerate(self._rates(), start=1)]
        chance = sum(map(mul, self.edges(), rates))
        for likely, counts_as in ((chance, BAD), (1 - chance, GOOD)):
            then = copy(self)
            then._reached, then._before = ([[*counts] for counts in side] for side in (self._reached, self._before))
            then.learn(point, counts_as)
            yield likely, then

    def _rates(self) -> list[tuple[float, float]]:
        """Return for each possible edge the expected rates of sets that should fail and of sets that should pass."""
        pairs = zip(self._reached, self._before, strict=True)
        return [
            (_mean(reached[0], reached[1], _FAILS), _mean(before[0], before[1], _PASSES)) for reached, before in pairs
        ]

    def _note(self, inside: int, around: int, runs: Runs, either: float) -> None:
        for edge in range(len(self._open)):
            if edge < inside or edge >= around:
                counts = self._reached[edge] if edge < inside else self._before[edge]
                counts[0] += runs[0]
                counts[1] += runs[1]
            else:
                self._open[edge] += either
        self._shares = None


def _futures(futures: Sequence[tuple[float, Belief]], point: int) -> list[tuple[float, Belief]]:
    after = [(chance * likely, then) for chance, belief in futures for likely, then in belief.after(point)]
    return sorted(after, key=lambda future: -future[0])[:_MOST_FUTURES]


def _mean(goods: int, bads: int, prior: tuple[float, float]) -> float:
    return (bads + prior[0]) / (goods + bads + prior[0] + prior[1])


@lru_cache(maxsize=100_000)
def _log_marginal(goods: int, bads: int, prior: tuple[float, float]) -> float:
    """Return the log-probability of these runs over all rates, up to a constant that depends on the prior."""
    return lgamma(bads + prior[0]) + lgamma(goods + prior[1]) - lgamma(goods + bads + prior[0] + prior[1])


@lru_cache(maxsize=100_000)
def _entropy(chance: float) -> float:
    if chance <= 0 or chance >= 1:
        return 0.0
    return -chance * log2(chance) - (1 - chance) * log2(1 - chance)


_PATIENCE = 8  # a search is given up after this many times its expected probes
_LEAST_BITS = 0.05  # lower bound of the bits that a run gives; it bounds the probes of rates that are close together
_MOST_REPEATS = 100  # launches of one set: a failure in one of twenty runs shows at least once with 99 %
# An end that was judged before needs only one expected answer.
_EXPECTED = {Purpose.RECHECK_GOOD: GOOD, Purpose.RECHECK_BAD: BAD}
# The purposes whose answers are claims of the final answer; ELSEWHERE shows that it is more than a number of items.
_CLAIMS = (PROOFS | {Purpose.ELSEWHERE}) - {*_EXPECTED}
_NEVER_CERTAIN = 0.999
_TWICE = 2  # a point that could not be judged this often is skipped


class Unsettled(Exception):
    """The answers do not settle the question. The message says why, `open_units` names the units left, if known."""

    def __init__(self, why: str, open_units: Subset = frozenset()) -> None:
        super().__init__(why)
        self.open_units = open_units


class _KnownSets:
    """The sets that are known to fail or to pass, and the sets that must fail or pass because of them."""

    def __init__(self, failing: Subset, passing: Subset) -> None:
        self.sets: dict[CountsAs, set[Subset]] = {BAD: {failing}, GOOD: {passing}}
        # For each queried set: how many known sets imply that it fails, and how many that it passes.
        self._implied: dict[Subset, dict[CountsAs, int]] = {}

    def add(self, subset: Subset, counts_as: CountsAs) -> None:
        if subset in self.sets[counts_as]:
            return
        self.sets[counts_as].add(subset)
        for other, implied in self._implied.items():
            implied[counts_as] += _implies(subset, other, counts_as)

    def implies(self, other: Subset, counts_as: CountsAs, without: Subset | None) -> bool:
        """Whether a known set, apart from `without`, implies that `other` counts as `counts_as`."""
        if other not in self._implied:
            sides = self.sets.items()
            self._implied[other] = {side: sum(_implies(known, other, side) for known in sets) for side, sets in sides}
        without_implies = without in self.sets[counts_as] and _implies(without, other, counts_as)
        return self._implied[other][counts_as] > without_implies


def _implies(known: Subset, other: Subset, counts_as: CountsAs) -> bool:
    """Whether `known` decides `other`: a superset of a failing set fails, and a subset of a passing set passes."""
    return known <= other if counts_as is BAD else other <= known


class BayesianSearch:
    """A judge that repeats probes until it is sure enough.

    `sure` is the probability that all claims it had to prove hold. It is computed from all runs so far: for each claim,
    how much likelier its runs are at one rate than at the other.
    """

    def __init__(self, probes: ProbeCache, end: Subset, doubt: float) -> None:
        self._probes = probes
        self._end = end
        self._enough = 1 - doubt
        self._claims: dict[Subset, CountsAs] = {}
        self._known = _KnownSets(failing=end, passing=frozenset())

    @property
    def sure(self) -> float:
        chance = 1.0
        for subset, counts_as in self._claims.items():
            chance *= self._chance(subset, counts_as)
        return min(chance, _NEVER_CERTAIN)

    @property
    def rate(self) -> float:
        """The failure rate of the bad end, which was known to fail from the start."""
        passed, failed = self._runs(self._end)
        return failed / max(passed + failed, 1)

    def edge(self, chain: Chain, purpose: Purpose) -> int:
        """Return the likeliest length of the first set that fails.

        Raises Unsettled if no length becomes likely enough, and Unjudged if sets that count as neither good nor bad
        hide it.
        """
        asked = {subset: self._runs(subset) for subset in self._probes.asked()}
        belief = Belief(chain, self._end, asked)
        bound = len(self._probes.observations) + self._at_most(len(chain))
        while max(belief.edges()) < self._enough:
            points = self._points(chain, belief)
            if not points or len(self._probes.observations) >= bound:
                raise Unsettled(f"the runs do not settle where it begins, at {self.rate:.0%} failing")
            self._ask_at(chain, points, belief, purpose)
        edges = belief.edges()
        length = edges.index(max(edges)) + 1
        if length > len(chain):
            raise Unsettled("what was taken to fail does not when it is asked again", chain.at(len(chain)))
        self._known.add(chain.at(length), BAD)
        self._known.add(chain.at(length - 1), GOOD)
        return length

    def failed(self) -> Iterable[Subset]:
        """Return the sets that are known to fail."""
        return self._known.sets[BAD]

    def each(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[CountsAs]:
        """Yield what each set counts as, after repeating it until that is sure enough.

        A proof launches its set at least `times` more often.
        """
        for subset in subsets:
            yield self._settle(subset, purpose, tuple(among), times)

    def make_sure(self, confidence: float) -> None:
        """Repeat the claim that is least sure until all claims together hold at this confidence. Raises Unsettled."""
        while self.sure < confidence:
            chances = {subset: self._chance(subset, counts_as) for subset, counts_as in self._claims.items()}
            weakest = min(chances, key=lambda subset: chances[subset])
            if chances[weakest] < 0.5 or len(self._probes.answers(weakest)) >= _MOST_REPEATS:
                raise Unsettled("what was found does not hold when it is asked again", weakest)
            purpose = Purpose.PROOF_BAD if self._claims[weakest] is BAD else Purpose.PROOF_GOOD
            list(self._probes.ask([weakest] * self._probes.question.at_once, purpose, weakest))

    def _settle(self, subset: Subset, purpose: Purpose, among: tuple[int, ...], least: int) -> CountsAs:
        proof = purpose in PROOFS
        old = len(self._probes.answers(subset)) if proof else 0
        while True:
            reference = self._reference(subset)
            answers = self._probes.answers(subset)
            fresh = answers[old:]
            if (expected := _EXPECTED.get(purpose)) in fresh:
                return expected
            chances = {side: self._chance_given(subset, side, reference) for side in (BAD, GOOD)}
            counts_as = max(chances, key=lambda side: chances[side])
            if chances[counts_as] >= self._enough and len(fresh) >= (least if proof else 0):
                self._known.add(subset, counts_as)
                if purpose in _CLAIMS:
                    self._claims[subset] = counts_as
                return counts_as
            if fresh[:_TWICE].count(CountsAs.UNRESOLVED) == _TWICE:
                return CountsAs.UNRESOLVED
            if len(fresh) >= _MOST_REPEATS:
                raise Unsettled(f"{_MOST_REPEATS} runs do not tell at which of both rates it fails", subset)
            if not self._launch_undersampled_end(subset, reference):
                list(self._probes.ask([subset] * self._probes.question.at_once, purpose, among))

    def _launch_undersampled_end(self, subset: Subset, reference: Reference) -> bool:
        """Launch the good or the bad end once if its rate rests on fewer runs than the subset has; say whether it did.

        The subset's runs are weighed against both rates, so more runs of the subset alone would not help.
        """
        runs = sum(self._runs(subset))
        failing, passing = reference
        ends = ((frozenset[int](), Purpose.CONTROL_GOOD, passing), (self._end, Purpose.CONTROL_BAD, failing))
        for end, purpose, runs_at_rate in ends:
            if subset != end and sum(runs_at_rate) < runs:
                list(self._probes.ask([end], purpose, self._end))
                return True
        return False

    def _chance(self, subset: Subset, counts_as: CountsAs) -> float:
        """Return the probability that the set counts as `counts_as`."""
        return self._chance_given(subset, counts_as, self._reference(subset))

    def _chance_given(self, subset: Subset, counts_as: CountsAs, reference: Reference) -> float:
        """Return that probability from the set's own runs, weighed at the rates that the `reference` runs show.

        Few of the sets that a search visits fail, so the prior odds that a set fails are one to the number of units.
        """
        own, (failing, passing) = self._runs(subset), reference
        for_bad = _log_marginal_after(own, failing, _FAILS) - _log_marginal_after(own, passing, _PASSES)
        odds = for_bad - log(len(self._probes.units)) if counts_as is BAD else -for_bad
        return 1 / (1 + exp(min(-odds, 700.0)))

    def _runs(self, subset: Subset) -> Runs:
        return self._probes.count(subset, GOOD), self._probes.count(subset, BAD)

    def _reference(self, subset: Subset | None) -> Reference:
        """Return the runs of all other sets that are known to fail, and of all that are known to pass."""
        runs = {BAD: [0, 0], GOOD: [0, 0]}
        for other in self._probes.asked():
            implied = [side for side in runs if self._known.implies(other, side, without=subset)]
            if other != subset and len(implied) == 1:
                for index, counts_as in enumerate((GOOD, BAD)):
                    runs[implied[0]][index] += self._probes.count(other, counts_as)
        return (runs[BAD][0], runs[BAD][1]), (runs[GOOD][0], runs[GOOD][1])

    def _ask_at(self, chain: Chain, points: Sequence[int], belief: Belief, purpose: Purpose) -> None:
        likely = [k for k, share in enumerate(belief.edges()) if share > (1 - self._enough) / 10]
        left = probes_at_worst(len(likely), self._probes.question.at_once)
        among = chain.order[min(likely) : max(likely) + 1]
        subsets = [chain.at(point) for point in points]
        answers = list(self._probes.ask(subsets, purpose, among, ceil(left / max(self.rate, 0.01))))
        for point, counts_as in zip(points, answers, strict=True):
            belief.learn(point, counts_as)

    def _points(self, chain: Chain, belief: Belief) -> list[int]:
        """Return the most informative lengths, or lengths around a zone near the edge that counts as neither."""
        at_once, silent = self._probes.question.at_once, self._skipped_lengths(chain)
        # Only judged lengths are borders: among many lengths that cannot be judged, each alone is an unlikely edge.
        judged = [0, *self._lengths(chain, (GOOD, BAD)), len(chain)] if silent else [0, len(chain)]
        after, upto = belief.likely(1 - self._enough)
        low = max(length for length in judged if length <= after)
        high = min(length for length in judged if length >= upto)
        between = [length for length in silent if low < length < high]
        if not between:
            return belief.best(at_once, silent)
        if points := points_around_zone(low, high, between, at_once):
            return points
        self._known.add(chain.at(high), BAD)
        self._known.add(chain.at(low), GOOD)
        raise Unjudged(passing=chain.at(low), failing=chain.at(high))

    def _skipped_lengths(self, chain: Chain) -> frozenset[int]:
        times = Counter(self._lengths(chain, (CountsAs.DIFFERENT, CountsAs.UNRESOLVED)))
        return frozenset(length for length, count in times.items() if count >= _TWICE)

    def _lengths(self, chain: Chain, counted: Collection[CountsAs]) -> Iterator[int]:
        """Yield the length of the chain of each probe that counted as one of `counted`."""
        subsets = (answer.subset for answer in self._probes.observations if answer.counts_as in counted)
        return (length for length in map(chain.length_of, subsets) if length is not None)

    def _at_most(self, length: int) -> int:
        """Return the limit of probes for a chain, from the most bits that a run can give."""
        failing, passing = self._reference(None)
        higher, lower = _mean(*failing, _FAILS), _mean(*passing, _PASSES)
        bits_a_run = _entropy((higher + lower) / 2) - (_entropy(higher) + _entropy(lower)) / 2
        bits = log2(length) + log2(1 / (1 - self._enough))
        return ceil(_PATIENCE * bits / max(bits_a_run, _LEAST_BITS)) * self._probes.question.at_once


def _log_mean(first: float, second: float) -> float:
    """Return the logarithm of the mean of two probabilities given by their logarithms."""
    most = max(first, second)
    return most + log((exp(first - most) + exp(second - most)) / 2)


def _log_marginal_after(own: Runs, others: Runs, prior: tuple[float, float]) -> float:
    """Return the log-probability of a set's `own` runs, given the runs of `others` at the same unknown rate."""
    both = (own[0] + others[0], own[1] + others[1])
    return _log_marginal(*both, prior) - _log_marginal(*others, prior)
