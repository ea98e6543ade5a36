"""Search for the cause of a failure that occurs in only some runs of a program.

No single run decides. A configuration that contains the whole cause fails at one rate, and any other configuration at a
lower rate. Both rates are unknown. Their priors are beta distributions, so the posterior is known in closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import accumulate
from math import ceil, exp, lgamma, log, log2, sqrt
from operator import mul
from statistics import NormalDist

from nsa_harness.core.search.exact_search import Chain, UnjudgedGap, points_around_zone, worst_case_probes
from nsa_harness.core.search.question import (
    BAD,
    GOOD,
    PROOFS,
    ProbeCache,
    ProbeResult,
    Purpose,
    Subset,
    expected_result,
)

_FAILING_PRIOR = (1.0, 1.0)  # prior of the higher rate: uniform
_PASSING_PRIOR = (0.25, 1.0)  # prior of the lower rate: mostly near 0, the rate of a program with no other fault
# While the probes of a round are chosen, each probe doubles the number of possible results. Only the likeliest
# combinations are weighed.
_MAX_FUTURES = 8


Runs = tuple[int, int]  # (number of runs that passed, number that failed)
WeightedRuns = tuple[float, float]
Reference = tuple[Runs, Runs]  # the runs of sets that are known to fail, and of sets that are known to pass


class Belief:
    """A probability distribution over the number of items that must be on before a program starts to fail.

    Items are switched on in the order of a `Chain`. For each length of the chain there is the probability that it is
    the first failing one. The last probability is that no set of the chain fails.
    """

    def __init__(self, chain: Chain, end: Subset, runs_of: Mapping[Subset, Runs]) -> None:
        """Compute the distribution from all runs so far.

        `end` is a set known to fail more often than the empty set. Both have been launched. `runs_of` has the runs of
        each launched set.
        """
        self._chain = chain
        edges = range(len(chain) + 1)
        # For each possible first failing length: the runs of the sets that must fail if it is the right one, ...
        self._runs_if_failing = [[0, 0] for _ in edges]
        self._runs_if_passing = [[0, 0] for _ in edges]  # ... the runs of the sets that must pass, ...
        self._log_weights = [0.0 for _ in edges]  # ... and the log-probability of the runs of all other sets
        self._edge_probabilities: list[float] | None = None
        failing, passing = runs_of.get(end, (0, 0)), runs_of.get(frozenset(), (0, 0))
        for subset, runs in runs_of.items():
            inside = len(edges) if end <= subset else chain.longest_inside(subset)
            either = (
                _log_marginal_after(runs, failing, _FAILING_PRIOR),
                _log_marginal_after(runs, passing, _PASSING_PRIOR),
            )
            self._add_runs(inside, chain.shortest_around(subset), runs, _log_mean(*either))

    def learn(self, point: int, counts_as: ProbeResult) -> None:
        """Update the distribution with the result of one more run, in which the first `point` items were on."""
        if counts_as in (GOOD, BAD):
            self._add_runs(point, point, (int(counts_as is GOOD), int(counts_as is BAD)), 0.0)

    def edge_probabilities(self) -> list[float]:
        """Return the probability that the program starts to fail at 1 item, at 2 and so on, and last, at none."""
        if self._edge_probabilities is None:
            weights = [
                _log_marginal(failing_runs[0], failing_runs[1], _FAILING_PRIOR)
                + _log_marginal(passing_runs[0], passing_runs[1], _PASSING_PRIOR)
                + open_weight
                for failing_runs, passing_runs, open_weight in zip(
                    self._runs_if_failing, self._runs_if_passing, self._log_weights, strict=True
                )
            ]
            most = max(weights)
            shares = [exp(weight - most) for weight in weights]
            total = sum(shares)
            self._edge_probabilities = [share / total for share in shares]
        return self._edge_probabilities

    def credible_lengths(self, doubt: float) -> tuple[int, int]:
        """Return a number of items that passes and one that fails, with a probability of error of at most `doubt`."""
        shares = list(accumulate(self.edge_probabilities()))
        low = sum(share <= doubt / 2 for share in shares)
        high = 1 + sum(share < 1 - doubt / 2 for share in shares)
        return low, min(high, len(self._chain))

    def best_lengths(self, at_once: int, excluded_lengths: frozenset[int]) -> list[int]:
        """Return, in ascending order, the `at_once` numbers of items whose parallel runs give the most information."""
        futures = [(1.0, self)]
        points = [k for k in range(len(self._chain) + 1) if k not in excluded_lengths]
        lengths: list[int] = []
        while points and len(lengths) < at_once:
            futures = _next_futures(futures, lengths[-1]) if lengths else futures
            worth = [(chance, belief.information()) for chance, belief in futures]
            lengths.append(max(points, key=lambda point: sum(chance * bits[point] for chance, bits in worth)))
            points.remove(lengths[-1])
        return sorted(lengths)

    def information(self) -> list[float]:
        """Return, for each number of items from 0, the information in bits to expect from one more run with them."""
        rates = self._expected_rates()
        shares = self.edge_probabilities()
        bad = sum(share * lower for share, (_, lower) in zip(shares, rates, strict=True))
        conditional_bits = sum(share * _entropy(lower) for share, (_, lower) in zip(shares, rates, strict=True))
        bits = [_entropy(bad) - conditional_bits]
        for share, (higher, lower) in zip(shares, rates, strict=True):
            bad += share * (higher - lower)
            conditional_bits += share * (_entropy(higher) - _entropy(lower))
            bits.append(_entropy(bad) - conditional_bits)
        return bits

    def outcomes(self, point: int) -> Iterator[tuple[float, Belief]]:
        """Yield the probability of each result of running the first `point` items, and the updated belief."""
        rates = [
            higher if edge <= point else lower for edge, (higher, lower) in enumerate(self._expected_rates(), start=1)
        ]
        chance = sum(map(mul, self.edge_probabilities(), rates))
        for likely, counts_as in ((chance, BAD), (1 - chance, GOOD)):
            then = copy(self)
            then._runs_if_failing, then._runs_if_passing = (
                [[*counts] for counts in side] for side in (self._runs_if_failing, self._runs_if_passing)
            )
            then.learn(point, counts_as)
            yield likely, then

    def _expected_rates(self) -> list[tuple[float, float]]:
        pairs = zip(self._runs_if_failing, self._runs_if_passing, strict=True)
        return [
            (
                _mean(failing_runs[0], failing_runs[1], _FAILING_PRIOR),
                _mean(passing_runs[0], passing_runs[1], _PASSING_PRIOR),
            )
            for failing_runs, passing_runs in pairs
        ]

    def _add_runs(self, inside: int, around: int, runs: Runs, open_weight: float) -> None:
        for edge in range(len(self._log_weights)):
            if edge < inside or edge >= around:
                counts = self._runs_if_failing[edge] if edge < inside else self._runs_if_passing[edge]
                counts[0] += runs[0]
                counts[1] += runs[1]
            else:
                self._log_weights[edge] += open_weight
        self._edge_probabilities = None


def _next_futures(futures: Sequence[tuple[float, Belief]], point: int) -> list[tuple[float, Belief]]:
    after = [(chance * likely, then) for chance, belief in futures for likely, then in belief.outcomes(point)]
    return sorted(after, key=lambda future: -future[0])[:_MAX_FUTURES]


def _mean(goods: float, bads: float, prior: tuple[float, float]) -> float:
    return (bads + prior[0]) / (goods + bads + prior[0] + prior[1])


@lru_cache(maxsize=100_000)
def _log_marginal(goods: float, bads: float, prior: tuple[float, float]) -> float:
    """Return the log-probability of `goods` passes and `bads` failures, averaged over all possible failure rates."""
    return lgamma(bads + prior[0]) + lgamma(goods + prior[1]) - lgamma(goods + bads + prior[0] + prior[1])


@lru_cache(maxsize=100_000)
def _entropy(chance: float) -> float:
    if chance <= 0 or chance >= 1:
        return 0.0
    return -chance * log2(chance) - (1 - chance) * log2(1 - chance)


_MAX_EFFORT_FACTOR = 8  # a search stops after this many times its expected number of probes
_MIN_BITS = 0.05  # assumed minimum information of a run; it limits the probes if both rates are close together
_MAX_REPEATS = 100  # launches of one set; a failure rate of 5 % shows at least once with 99 % probability
# An end that was judged before needs the expected result only once.
_EXPECTED_RESULT = {Purpose.RECHECK_GOOD: GOOD, Purpose.RECHECK_BAD: BAD}
# The purposes whose results the final answer claims. A probe for ELSEWHERE shows that not only the count matters.
_CLAIM_PURPOSES = (PROOFS | {Purpose.ELSEWHERE}) - {*_EXPECTED_RESULT}
_MAX_CONFIDENCE = 0.999
# Consecutive runs that are independent exceed this number of standard deviations in one of a hundred searches.
_BURST_DEVIATIONS = NormalDist().inv_cdf(0.99)
# From this number of standard deviations on, a control runs between two runs of the same set. Independent runs exceed
# it in one of six searches.
_SUSPICIOUS_DEVIATIONS = 1.0
_MAX_CORRELATION = 0.9  # of consecutive runs; with more, no number of runs would be enough
_MAX_UNJUDGED = 2  # a point that could not be judged this often is skipped


class Inconclusive(Exception):
    """Raised if the runs do not show which items cause the failure. `open_units` could still matter."""

    def __init__(self, why: str, open_units: Subset = frozenset()) -> None:
        super().__init__(why)
        self.open_units = open_units


class _ProvenSets:
    """The sets of items known to make a program fail or pass, from which the results of other sets follow."""

    def __init__(self, failing: Subset, passing: Subset) -> None:
        self.sets: dict[ProbeResult, set[Subset]] = {BAD: {failing}, GOOD: {passing}}
        self.size = 2
        # For each queried set: how many known sets imply that it fails, and how many that it passes.
        self._implied: dict[Subset, dict[ProbeResult, int]] = {}

    def add(self, subset: Subset, counts_as: ProbeResult) -> None:
        if subset in self.sets[counts_as]:
            return
        self.sets[counts_as].add(subset)
        self.size += 1
        for other, implication_counts in self._implied.items():
            implication_counts[counts_as] += _implies(subset, other, counts_as)

    def implied_result(self, other: Subset, without: Subset | None = None) -> ProbeResult | None:
        """Return the only result that the known sets, except `without`, imply for `other`, or None."""
        counts = self._implied.get(other)
        if counts is None:
            counts = self._implied[other] = {
                result: sum(_implies(subset, other, result) for subset in subsets)
                for result, subsets in self.sets.items()
            }
        fails = counts[BAD] > (without is not None and without in self.sets[BAD] and without <= other)
        passes = counts[GOOD] > (without is not None and without in self.sets[GOOD] and other <= without)
        return None if fails == passes else BAD if fails else GOOD


def _implies(known_set: Subset, other: Subset, counts_as: ProbeResult) -> bool:
    """Return whether `other` must have the result of `known_set`, because one of them contains the other."""
    return known_set <= other if counts_as is BAD else other <= known_set


class _Tally:
    """Counts of runs in the order in which they were made, and how often two consecutive runs both failed."""

    def __init__(self) -> None:
        self.passes = self.failures = self._both_failed = 0
        self._first_failed = self._last_failed = False

    def add(self, failed: bool) -> None:
        """Count one more run."""
        self._first_failed = self._first_failed if self.passes + self.failures else failed
        self._both_failed += failed and self._last_failed
        self.failures += failed
        self.passes += not failed
        self._last_failed = failed

    @property
    def runs(self) -> Runs:
        """The numbers of runs that passed and that failed."""
        return self.passes, self.failures

    @property
    def pairs(self) -> int:
        """The number of pairs of consecutive runs."""
        return max(self.passes + self.failures - 1, 0)

    @property
    def variance(self) -> float:
        """The variance of one run, which counts 1 if it fails and 0 if it passes."""
        rate = self.failures / max(self.passes + self.failures, 1)
        return rate * (1 - rate)

    @property
    def covariance(self) -> float:
        """The covariance of two consecutive runs, summed over all pairs. For independent runs it is about 0."""
        rate = self.failures / max(self.passes + self.failures, 1)
        failures_in_pairs = 2 * self.failures - self._first_failed - self._last_failed
        return self._both_failed - rate * failures_in_pairs + self.pairs * rate * rate


class BayesianSearch:
    """A search strategy for flaky programs, which repeats runs until each result is likely enough.

    `end` is a set known to fail more often than the empty set. `doubt` is the allowed probability of a wrong
    conclusion.
    """

    def __init__(self, probes: ProbeCache, end: Subset, doubt: float) -> None:
        self._probes = probes
        self._end = end
        self._min_confidence = 1 - doubt
        self._claims: dict[Subset, ProbeResult] = {}
        self._known = _ProvenSets(failing=end, passing=frozenset())
        self._stored_tallies: dict[Subset | None, tuple[int, dict[ProbeResult, _Tally]]] = {}
        self._tallied_known = self._known.size
        self._fresh: dict[tuple[Subset, Purpose], list[ProbeResult]] = {}  # results of proofs that are not judged yet

    @property
    def confidence(self) -> float:
        """The probability that all conclusions so far are correct. It never reaches 1."""
        chance = 1.0
        for subset, counts_as in self._claims.items():
            chance *= self._probability(subset, counts_as)
        return min(chance, _MAX_CONFIDENCE)

    @property
    def failure_rate(self) -> float:
        """The fraction of runs that failed with the set of items that is known to fail."""
        passes, failures = self._runs(self._end)
        return failures / max(passes + failures, 1)

    @property
    def comes_in_bursts(self) -> bool:
        """Whether consecutive runs end alike more often than independent runs would."""
        return self._burst_deviations() > _BURST_DEVIATIONS

    def _burst_deviations(self) -> float:
        """Return by how many standard deviations consecutive runs end alike more often than independent runs would."""
        tallies = self._tallies(None).values()
        deviation = sqrt(sum(tally.pairs * tally.variance**2 for tally in tallies))
        return sum(tally.covariance for tally in tallies) / deviation if deviation else 0.0

    def _weight_of_runs(self) -> float:
        """Return the number of independent runs that tell as much as one run.

        It is 1 unless failures come in bursts. In bursts, it follows from the correlation of consecutive runs, as for
        an autoregressive series of order one.
        """
        if not self.comes_in_bursts:
            return 1.0
        tallies = self._tallies(None).values()
        correlation = sum(tally.covariance for tally in tallies) / sum(
            tally.pairs * tally.variance for tally in tallies
        )
        correlation = min(correlation, _MAX_CORRELATION)
        return (1 - correlation) / (1 + correlation)

    def first_failing_length(self, chain: Chain, purpose: Purpose) -> int:
        """Return the length of the chain's shortest failing set. Raises Inconclusive or UnjudgedGap."""
        runs_of = {subset: self._runs(subset) for subset in self._probes.launched_sets()}
        belief = Belief(chain, self._end, runs_of)
        max_observations = len(self._probes.observations) + self._max_probes(len(chain))
        while max(belief.edge_probabilities()) < self._min_confidence:
            points = self._next_points(chain, belief)
            if not points or len(self._probes.observations) >= max_observations:
                rate = f"the bad end fails in {self.failure_rate:.0%} of its runs"
                raise Inconclusive(f"the runs do not show where the failure begins; {rate}")
            self._launch_at(chain, points, belief, purpose)
        edges = belief.edge_probabilities()
        length = edges.index(max(edges)) + 1
        if length > len(chain):
            raise Inconclusive(
                "a set that was taken to fail passes when it is launched again", chain.set_at(len(chain))
            )
        self._known.add(chain.set_at(length), BAD)
        self._known.add(chain.set_at(length - 1), GOOD)
        return length

    def failing_sets(self) -> Iterable[Subset]:
        """Return every set of items for which the program is known to fail."""
        return self._known.sets[BAD]

    def judge_sets(
        self,
        subsets: Sequence[Subset],
        purpose: Purpose,
        among: Iterable[int],
        times: int = 1,
        against: Subset | None = None,
    ) -> Iterator[ProbeResult]:
        """Yield, for each set of items, whether the program passes or fails.

        `among` has the items that may still belong to the answer. If the purpose is a proof, each set is run at least
        `times` more, in turn with the set `against`, which should fail. Raises Inconclusive.
        """
        if against is not None and purpose in PROOFS:
            requests = [(subset, purpose) for subset in subsets for _ in range(times)]
            self.launch_together([*requests, (against, Purpose.PROOF_BAD)], among)
        for subset in subsets:
            yield self._judge(subset, purpose, tuple(among), times)

    def launch_together(self, requests: Sequence[tuple[Subset, Purpose]], among: Iterable[int]) -> None:
        """Run the sets of several proofs in turn, each time in random order, until each is known to fail or to pass.

        Each set runs at least as often as `requests` contains it. The runs end early if a set has an unexpected result.
        """
        among = tuple(among)
        least = Counter(requests)
        open_requests = list(least)
        while open_requests:
            if not any(self._launch_control(subset) for subset, _ in open_requests):
                self._probes.launch_ahead(open_requests, among)
                for request in open_requests:
                    self._fresh.setdefault(request, []).extend(self._probes.launch([request[0]], request[1], among))
            decided = {request: self._decision(*request, least[request]) for request in open_requests}
            if any(decision not in (None, expected_result(purpose)) for (_, purpose), decision in decided.items()):
                return
            open_requests = [request for request, decision in decided.items() if decision is None]

    def reach_confidence(self, confidence: float) -> None:
        """Repeat the least certain runs until the whole answer has this confidence, or raise Inconclusive."""
        while self.confidence < confidence:
            chances = {subset: self._probability(subset, counts_as) for subset, counts_as in self._claims.items()}
            weakest = min(chances, key=lambda subset: chances[subset])
            if chances[weakest] < 0.5 or len(self._probes.answers(weakest)) >= _MAX_REPEATS:
                raise Inconclusive("the answer does not hold when it is launched again", weakest)
            purpose = Purpose.PROOF_BAD if self._claims[weakest] is BAD else Purpose.PROOF_GOOD
            list(self._probes.launch([weakest] * self._probes.question.at_once, purpose, weakest))

    def _judge(self, subset: Subset, purpose: Purpose, among: tuple[int, ...], least: int) -> ProbeResult:
        while (counts_as := self._decision(subset, purpose, least)) is None:
            if not self._launch_control(subset):
                launches = self._probes.launch([subset] * self._probes.question.at_once, purpose, among)
                self._fresh.setdefault((subset, purpose), []).extend(launches)
        self._fresh.pop((subset, purpose), None)
        if counts_as is not ProbeResult.UNRESOLVED and purpose not in _EXPECTED_RESULT:
            self._known.add(subset, counts_as)
            if purpose in _CLAIM_PURPOSES:
                self._claims[subset] = counts_as
        return counts_as

    def _decision(self, subset: Subset, purpose: Purpose, least: int) -> ProbeResult | None:
        """Return the result of a set, or None if it is not clear yet. A proof takes at least `least` runs."""
        fresh = self._fresh.get((subset, purpose), []) if purpose in PROOFS else self._probes.answers(subset)
        if (expected := _EXPECTED_RESULT.get(purpose)) in fresh:
            return expected
        chances = {result: self._probability(subset, result) for result in (BAD, GOOD)}
        counts_as = max(chances, key=lambda result: chances[result])
        if chances[counts_as] >= self._min_confidence and len(fresh) >= (least if purpose in PROOFS else 0):
            return counts_as
        if fresh[:_MAX_UNJUDGED].count(ProbeResult.UNRESOLVED) == _MAX_UNJUDGED:
            return ProbeResult.UNRESOLVED
        if len(fresh) >= _MAX_REPEATS:
            raise Inconclusive(f"{_MAX_REPEATS} runs do not show whether this set fails or passes", subset)
        return None

    def _launch_control(self, subset: Subset) -> bool:
        """Run the program with all items on or all off if a run of `subset` has to wait for that."""
        runs = sum(self._runs(subset))
        failing, passing = self._reference(subset)
        ends = ((frozenset[int](), Purpose.CONTROL_GOOD, passing), (self._end, Purpose.CONTROL_BAD, failing))
        for end, purpose, runs_at_rate in ends:
            if subset != end and sum(runs_at_rate) < runs:
                list(self._probes.launch([end], purpose, self._end))
                return True
        ran_last = self._probes.observations[-1].subset == subset and subset not in (frozenset(), self._end)
        if not ran_last or self._burst_deviations() <= _SUSPICIOUS_DEVIATIONS:
            return False
        is_likely_good = self._probability_given(subset, BAD, (failing, passing)) < 0.5
        end, purpose, _ = ends[is_likely_good]
        list(self._probes.launch([end], purpose, self._end))
        return True

    def _probability(self, subset: Subset, counts_as: ProbeResult) -> float:
        return self._probability_given(subset, counts_as, self._reference(subset))

    def _probability_given(self, subset: Subset, counts_as: ProbeResult, reference: Reference) -> float:
        """Return the probability that `subset` has the result `counts_as`, given the results of other sets."""
        weight = self._weight_of_runs()
        own, failing, passing = ((weight * good, weight * bad) for good, bad in (self._runs(subset), *reference))
        for_bad = _log_marginal_after(own, failing, _FAILING_PRIOR) - _log_marginal_after(own, passing, _PASSING_PRIOR)
        # Few of the sets that a search launches fail, so the prior odds of a failing set are one to the number of
        # units.
        odds = for_bad - log(len(self._probes.units)) if counts_as is BAD else -for_bad
        return 1 / (1 + exp(min(-odds, 700.0)))

    def _runs(self, subset: Subset) -> Runs:
        return self._probes.count(subset, GOOD), self._probes.count(subset, BAD)

    def _reference(self, subset: Subset | None) -> Reference:
        """Return the results of all sets known to fail and of all sets known to pass, leaving out `subset`."""
        is_known = subset is None or any(subset in sets for sets in self._known.sets.values())
        failing, passing = (tally.runs for tally in self._tallies(subset if is_known else None).values())
        if subset is None or is_known or (implied_result := self._known.implied_result(subset)) is None:
            return failing, passing
        passes, failures = self._runs(subset)
        if implied_result is BAD:
            return (failing[0] - passes, failing[1] - failures), passing
        return failing, (passing[0] - passes, passing[1] - failures)

    def _tallies(self, subset: Subset | None) -> dict[ProbeResult, _Tally]:
        """Return the tallies of the sets known to fail and of those known to pass, without `subset`."""
        if self._tallied_known != self._known.size:
            self._stored_tallies.clear()
            self._tallied_known = self._known.size
        seen, tallies = self._stored_tallies.get(subset) or (0, {BAD: _Tally(), GOOD: _Tally()})
        for observation in self._probes.observations[seen:]:
            if observation.counts_as not in (GOOD, BAD) or observation.subset == subset:
                continue
            implied_result = self._known.implied_result(observation.subset, without=subset)
            if implied_result is not None:
                tallies[implied_result].add(observation.counts_as is BAD)
        self._stored_tallies[subset] = (len(self._probes.observations), tallies)
        return tallies

    def _launch_at(self, chain: Chain, points: Sequence[int], belief: Belief, purpose: Purpose) -> None:
        likely_lengths = [
            k for k, share in enumerate(belief.edge_probabilities()) if share > (1 - self._min_confidence) / 10
        ]
        probes_left = worst_case_probes(len(likely_lengths), self._probes.question.at_once)
        among = chain.order[min(likely_lengths) : max(likely_lengths) + 1]
        subsets = [chain.set_at(point) for point in points]
        answers = list(self._probes.launch(subsets, purpose, among, ceil(probes_left / max(self.failure_rate, 0.01))))
        for point, counts_as in zip(points, answers, strict=True):
            belief.learn(point, counts_as)

    def _next_points(self, chain: Chain, belief: Belief) -> list[int]:
        """Return the most informative lengths of the chain to run next. UnjudgedGap: none of them is usable."""
        at_once, unjudged_lengths = self._probes.question.at_once, self._skipped_lengths(chain)
        # The zone ends at judged lengths: each of many unjudged lengths is on its own unlikely to be the first failing.
        judged_lengths = [0, *self._lengths(chain, (GOOD, BAD)), len(chain)] if unjudged_lengths else [0, len(chain)]
        lower, upper = belief.credible_lengths(1 - self._min_confidence)
        low = max(length for length in judged_lengths if length <= lower)
        high = min(length for length in judged_lengths if length >= upper)
        between = [length for length in unjudged_lengths if low < length < high]
        if not between:
            return belief.best_lengths(at_once, unjudged_lengths)
        if points := points_around_zone(low, high, between, at_once):
            return points
        self._known.add(chain.set_at(high), BAD)
        self._known.add(chain.set_at(low), GOOD)
        raise UnjudgedGap(passing=chain.set_at(low), failing=chain.set_at(high))

    def _skipped_lengths(self, chain: Chain) -> frozenset[int]:
        times = Counter(self._lengths(chain, (ProbeResult.DIFFERENT, ProbeResult.UNRESOLVED)))
        return frozenset(length for length, count in times.items() if count >= _MAX_UNJUDGED)

    def _lengths(self, chain: Chain, results: Collection[ProbeResult]) -> Iterator[int]:
        subsets = (answer.subset for answer in self._probes.observations if answer.counts_as in results)
        return (length for length in map(chain.length_of, subsets) if length is not None)

    def _max_probes(self, length: int) -> int:
        """Return the maximum number of test runs to spend on a chain of `length` sets."""
        failing, passing = self._reference(None)
        higher, lower = _mean(*failing, _FAILING_PRIOR), _mean(*passing, _PASSING_PRIOR)
        bits_per_run = _entropy((higher + lower) / 2) - (_entropy(higher) + _entropy(lower)) / 2
        bits = log2(length) + log2(1 / (1 - self._min_confidence))
        return ceil(_MAX_EFFORT_FACTOR * bits / max(bits_per_run, _MIN_BITS)) * self._probes.question.at_once


def _log_mean(first: float, second: float) -> float:
    """Return the logarithm of the mean of two probabilities, given as logarithms."""
    most = max(first, second)
    return most + log((exp(first - most) + exp(second - most)) / 2)


def _log_marginal_after(own: WeightedRuns, others: WeightedRuns, prior: tuple[float, float]) -> float:
    """Return the log-probability of the results `own`, given other results with the same unknown failure rate."""
    both = (own[0] + others[0], own[1] + others[1])
    return _log_marginal(*both, prior) - _log_marginal(*others, prior)
