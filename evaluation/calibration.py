"""Is a search that says it is 95 % sure right 95 times of 100? Simulated programs of every shape and noise answer it.

A case is SHAPE/RATE-BACKGROUND/ITEMS, or SHAPE/RATE-BACKGROUND/ITEMS+TROUBLE. What holds a culprit fails at the rate,
anything else at the background; `Trouble` tells what else happens to the runs. Each case is searched 200 times, with
another culprit and other luck each time; the seed is the number of the search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product
from math import comb, log2
from random import Random
from statistics import mean
from typing import Any

from evaluation import claims, experiments
from evaluation.experiments import Experiment
from evaluation.scoring import Row, chance_of_as_many, paragraph
from nsa_harness.core.experiment.statistics import runs_to_show
from nsa_harness.core.search.plan import find_smallest_difference
from nsa_harness.core.search.question import (
    AnswerKind,
    ProbeResult,
    QuestionKind,
    Round,
    SearchAnswer,
    SearchQuestion,
    Subset,
)

SEARCHES = 200  # per case
# Version of the search. Increase it when core/search decides otherwise: the cases of earlier versions are then due.
VERSION = 3
CONFIDENCE = 0.95
RATES = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
BACKGROUNDS = (0.0, 0.05, 0.1, 0.2)
SIZES = (8, 12, 48, 96)
APART = 0.4  # a search must answer where the rates differ by this much
ANSWERED = 0.9  # share of searches that must answer there
ALIKE = 0.2  # rates that differ by less may be called equal: the answer shows what would have been seen
MOST_PROBES = 1000  # as the command has it
MOST_OF_CLOSE_RATES = 300  # where a search need not answer
# "The bad end passed 14 of 14: never seen failing; it may in less than 19 % of runs."
NEVER_BELOW = 1 - (1 - CONFIDENCE) ** (1 / runs_to_show(0.2, CONFIDENCE))
BAD, GOOD, DIFFERENT, UNRESOLVED = ProbeResult.BAD, ProbeResult.GOOD, ProbeResult.DIFFERENT, ProbeResult.UNRESOLVED
_NOTHING_NAMED = (AnswerKind.NONE, AnswerKind.INDEPENDENT)

Fails = Callable[[Subset], bool]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A culprit, and the answer that names it."""

    fails: Fails
    kind: AnswerKind
    items: tuple[int, ...]


def single(items: int, luck: Random) -> Truth:
    item = luck.randrange(items)
    return Truth(fails=lambda on: item in on, kind=AnswerKind.SINGLE, items=(item,))


def pair(items: int, luck: Random) -> Truth:
    both = frozenset(luck.sample(range(items), 2))
    low, high = sorted(both)
    side_by_side = high == low + 1
    kind = AnswerKind.RANGE if side_by_side else AnswerKind.SET
    return Truth(fails=both.issubset, kind=kind, items=(low, low + 2) if side_by_side else (low, high))


def span(items: int, luck: Random) -> Truth:
    length = luck.randrange(2, items // 3 + 1)
    start = luck.randrange(items - length)
    return Truth(
        fails=frozenset(range(start, start + length)).issubset, kind=AnswerKind.RANGE, items=(start, start + length)
    )


def several(items: int, luck: Random) -> Truth:
    both = frozenset(luck.sample(range(items), 2))
    return Truth(fails=lambda on: bool(both & on), kind=AnswerKind.SEVERAL, items=tuple(sorted(both)))


def threshold(items: int, luck: Random) -> Truth:
    first = luck.randrange(1, items + 1)
    return Truth(fails=lambda on: len(on) >= first, kind=AnswerKind.THRESHOLD, items=(first,))


def number(items: int, luck: Random) -> Truth:
    count = luck.randrange(2, items)
    return Truth(fails=lambda on: len(on) >= count, kind=AnswerKind.COUNT, items=(count,))


SHAPES: dict[str, Callable[[int, Random], Truth]] = {
    "single": single, "pair": pair, "range": span, "several": several, "threshold": threshold, "count": number,
}  # fmt: skip


class Trouble(StrEnum):
    """What makes the runs of a program harder to judge than a rate alone."""

    SECOND = "second"  # another failure: always with one item while another item is off, and in 5 % of all runs
    UNRESOLVED = "unresolved"  # runs without a verdict: for the same sets, and in 5 % of all runs
    BURSTS = "bursts"  # a run has the luck of the run before it in half of the cases
    SIGNATURES = "signatures"  # half of the failures look like another failure


TROUBLED_RATES, TROUBLED_BACKGROUNDS, TROUBLED_SIZE = (0.5, 1.0), (0.0, 0.1), 12


class Luck:
    """The runs of one simulated program: whether each fails, and what that looks like."""

    def __init__(self, cell: Cell, truth: Truth, random: Random) -> None:
        self._cell, self._truth, self._random = cell, truth, random
        pair = random.sample(range(cell.items), 2) if cell.trouble else [0, 0]
        self._with, self._without = sorted(pair) if cell.shape == "threshold" else pair
        self._last: float | None = None

    def run(self, on: Subset) -> ProbeResult:
        trouble, random = self._cell.trouble, self._random
        if trouble in (Trouble.SECOND, Trouble.UNRESOLVED):
            hidden = self._with in on and self._without not in on
            if random.random() < 0.05 or hidden:
                return DIFFERENT if trouble is Trouble.SECOND else UNRESOLVED
        luck = random.random()
        if trouble is Trouble.BURSTS:
            self._last = luck = luck if self._last is None or random.random() < 0.5 else self._last
        if luck >= (self._cell.rate if self._truth.fails(on) else self._cell.background):
            return GOOD
        return DIFFERENT if trouble is Trouble.SIGNATURES and random.random() < 0.5 else BAD


@dataclass(frozen=True, kw_only=True)
class Cell:
    shape: str
    rate: float
    background: float
    items: int
    trouble: Trouble | None = None

    def __str__(self) -> str:
        trouble = f"+{self.trouble}" if self.trouble else ""
        return f"{self.shape}/{self.rate:g}-{self.background:g}/{self.items}{trouble}"

    def untrue(self, kind: AnswerKind) -> bool:
        """Whether "never seen failing", or "does not depend", is a wrong answer here."""
        return self.rate >= NEVER_BELOW if kind is AnswerKind.NONE else self.rate - self.background >= ALIKE

    @property
    def apart(self) -> bool:
        """Whether a search must answer here; never while other failures may hide the answer."""
        return self.trouble is None and self.rate - self.background >= APART - 1e-9

    @property
    def answers(self) -> int:
        """The number of possible answers."""
        pairs = comb(self.items, 2)
        return {"pair": pairs, "several": pairs, "range": pairs}.get(self.shape, self.items)

    @property
    def floor(self) -> float:
        """The probes that every search needs on average: bits of the answer by the bits that one run can show."""
        bits = capacity(self.rate, self.background)
        return log2(self.answers) / bits if bits else float("inf")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The counts of all searches of a case."""

    searches: int
    sure: int  # answers with the requested confidence or more
    wrong: int  # wrong answers among them
    kinds: dict[str, int]
    probes_mean: float
    probes_most: int
    certain: int = 0  # answers that the search calls certain; not counted by version 1
    certain_wrong: int = 0  # wrong answers among them
    version: int = 1  # of the search

    @property
    def answered(self) -> float:
        return 1 - self.count(AnswerKind.UNDECIDED) / self.searches

    def count(self, *kinds: AnswerKind) -> int:
        return sum(self.kinds.get(kind.value, 0) for kind in kinds)

    @property
    def named(self) -> int:
        """The number of searches that named something with the requested confidence."""
        return self.sure - self.count(*_NOTHING_NAMED)


def results_of(stored: Mapping[str, Any]) -> dict[Cell, Result]:
    """The results by case, in the order of the cases."""
    return {cell: Result(**stored[str(cell)]) for cell in cells() if str(cell) in stored}


def cells() -> Iterator[Cell]:
    for items, shape, rate, background in product(SIZES, SHAPES, RATES, BACKGROUNDS):
        yield Cell(shape=shape, rate=rate, background=background, items=items)
    for trouble, shape, rate, background in product(Trouble, SHAPES, TROUBLED_RATES, TROUBLED_BACKGROUNDS):
        yield Cell(shape=shape, rate=rate, background=background, items=TROUBLED_SIZE, trouble=trouble)


def capacity(rate: float, background: float) -> float:
    """The most bits that one run can show about whether a set contains the culprit (Shannon), by trying every share."""
    shares = (step / 200 for step in range(201))
    noise = [entropy(rate), entropy(background)]
    return max(
        entropy(share * rate + (1 - share) * background) - share * noise[0] - (1 - share) * noise[1] for share in shares
    )


def entropy(chance: float) -> float:
    return 0.0 if chance in (0.0, 1.0) else -chance * log2(chance) - (1 - chance) * log2(1 - chance)


def searched(cell: Cell, seed: int) -> tuple[SearchAnswer, Truth, int]:
    """Run one search with its own culprit and luck. Return its answer, the truth, and the number of probes."""
    luck = Random(f"{cell} {seed}")
    truth = SHAPES[cell.shape](cell.items, luck)
    program, taken = Luck(cell, truth, luck), 0

    def probe(tried: Round) -> list[ProbeResult]:
        nonlocal taken
        taken += len(tried.subsets)
        return [program.run(on) for on in tried.subsets]

    question = SearchQuestion(
        kind=QuestionKind.ORDERED if cell.shape == "threshold" else QuestionKind.SET,
        items=cell.items,
        confidence=CONFIDENCE,
        controls=runs_to_show(0.2, CONFIDENCE),
        max_probes=MOST_PROBES if cell.apart or cell.trouble else MOST_OF_CLOSE_RATES,
        order_seed=str(seed),
    )
    return find_smallest_difference(question, probe), truth, taken


def right(cell: Cell, truth: Truth, answer: SearchAnswer) -> bool:
    """Whether the answer is true. If the rates do not differ, nothing may be named."""
    if answer.kind in _NOTHING_NAMED:
        return not cell.untrue(answer.kind)
    return cell.rate > cell.background and (answer.kind, answer.items) == (truth.kind, truth.items)


def result_of(cell: Cell) -> Result:
    searches = [searched(cell, seed) for seed in range(SEARCHES)]
    sure = [
        (answer, truth)
        for answer, truth, _ in searches
        if answer.kind is not AnswerKind.UNDECIDED and answer.confidence >= CONFIDENCE
    ]
    wrong = [answer for answer, truth in sure if not right(cell, truth, answer)]
    return Result(
        searches=SEARCHES,
        sure=len(sure),
        wrong=len(wrong),
        kinds=dict(sorted(Counter(answer.kind.value for answer, _, _ in searches).items())),
        probes_mean=round(mean(taken for _, _, taken in searches), 1),
        probes_most=max(taken for _, _, taken in searches),
        certain=sum(answer.confidence == 1 for answer, _ in sure),
        certain_wrong=sum(answer.confidence == 1 for answer in wrong),
        version=VERSION,
    )


def launch(case: str) -> dict[str, Any]:
    return asdict(result_of(next(cell for cell in cells() if str(cell) == case)))


def rows(results: experiments.Results) -> dict[str, Row]:
    """The cases whose searches are as often right as they say."""
    known = results_of(results["cells"])
    right = len(known) - len({name.partition(" ")[0] for name in refuted(chances_of(known))})
    return {"calibration": {"cases": str(len(known)), "answer": f"{right} of {len(known)}"}}


EXPERIMENT = Experiment(
    name="calibration",
    cases=tuple(map(str, cells())),
    launch=launch,
    describe=lambda _, cell: f"{cell['wrong']} of {cell['sure']} wrong",
    rows=rows,
    bare=True,
    fingerprint=lambda _: {"version": VERSION},
    executor=ProcessPoolExecutor,
)


def errors(cell: Cell, result: Result) -> Iterator[tuple[int, int]]:
    """Yield for each statement that is made with the confidence how often it is wrong, and of how many.

    A named culprit counts among the answers that name something. "Never seen failing" and "does not depend" are answers
    of a test of the ends before the search, and count among all searches.
    """
    tests = [result.count(kind) if cell.untrue(kind) else 0 for kind in _NOTHING_NAMED]
    yield result.wrong - sum(tests), result.named
    yield from ((wrong, result.searches) for wrong in tests)


def chances_of(results: Mapping[Cell, Result]) -> dict[str, float]:
    """Return by case and statement how likely this many errors are if the confidence holds."""
    return {
        f"{cell} {what}": chance_of_as_many(*seen, 1 - CONFIDENCE)
        for cell, result in results.items()
        for what, seen in zip(("named", "none", "independent"), errors(cell, result), strict=True)
    }


def refuted(chances: dict[str, float], level: float = 0.05) -> list[str]:
    """The cases that refute the confidence, corrected over all cases (Holm, 1979)."""
    names = sorted(chances, key=lambda name: chances[name])
    refuting: list[str] = []
    for place, name in enumerate(names):
        if chances[name] > level / (len(names) - place):
            break
        refuting.append(name)
    return refuting


def ddmin(items: int, fails: Fails) -> Subset:
    """Search as Zeller and Hildebrandt (2002) do, for comparison. It believes every answer."""
    failing, parts = list(range(items)), 2
    while len(failing) > 1:
        cut = [failing[len(failing) * i // parts : len(failing) * (i + 1) // parts] for i in range(parts)]
        rests = [[item for item in failing if item not in part] for part in cut]
        smaller = next((part for part in cut if fails(frozenset(part))), None)
        rest = None if smaller else next((part for part in rests if fails(frozenset(part))), None)
        if smaller is None and rest is None and parts >= len(failing):
            break
        parts = 2 if smaller else max(parts - 1, 2) if rest else min(2 * parts, len(failing))
        failing = smaller or rest or failing
    return frozenset(failing)


def halving(items: int, fails: Fails) -> Subset:
    """Search as `git bisect` does: for the first item with which a prefix fails."""
    low, high = 0, items
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(frozenset(range(middle))) else (middle, high)
    return frozenset({high - 1})


def go_bisect(items: int, fails: Fails) -> Subset:
    """Search as Go's `bisect` (R. Cox) does: each half, while what the other half needs stays on."""

    def needed(among: list[int], on: Subset) -> Subset:
        if len(among) == 1:
            return frozenset(among)
        left, right_half = among[: len(among) // 2], among[len(among) // 2 :]
        for half in (left, right_half):
            if fails(on | frozenset(half)):
                return needed(half, on)
        of_right = needed(right_half, on | frozenset(left))
        return of_right | (needed(left, on | of_right) if not fails(on | of_right) else frozenset())

    return needed(list(range(items)), frozenset())


OTHERS: dict[str, Callable[[int, Fails], Subset]] = {"git bisect": halving, "ddmin": ddmin, "Go bisect": go_bisect}
COMPARED = ((1.0, 0.0), (0.8, 0.0), (0.5, 0.0), (1.0, 0.1))


def compared(shape: str, items: int) -> Iterator[str]:
    """Yield a row per search method: how often it is right at each noise, and with how many probes."""
    ways = [name for name in OTHERS if not (shape == "pair" and name == "git bisect")]
    for name in (*ways, "nsa-harness"):
        shares = []
        for rate, background in COMPARED:
            cell = Cell(shape=shape, rate=rate, background=background, items=items)
            runs = [
                _ours(cell, seed) if name == "nsa-harness" else _other(name, cell, seed) for seed in range(SEARCHES)
            ]
            shares.append(f"{sum(ok for ok, _ in runs) / SEARCHES:.0%}, {mean(taken for _, taken in runs):.1f}")
        yield f"| {shape}, {items} | {name} | {' | '.join(shares)} |"


def _ours(cell: Cell, seed: int) -> tuple[bool, int]:
    answer, truth, taken = searched(cell, seed)
    return (answer.kind, answer.items) == (truth.kind, truth.items), taken


def _other(name: str, cell: Cell, seed: int) -> tuple[bool, int]:
    luck, taken = Random(f"{cell} {seed}"), 0
    truth = SHAPES[cell.shape](cell.items, luck)

    def fails(on: Subset) -> bool:
        nonlocal taken
        taken += 1
        return luck.random() < (cell.rate if truth.fails(on) else cell.background)

    named = OTHERS[name](cell.items, fails)
    without = (named - {item} for item in named)
    return truth.fails(named) and not any(map(truth.fails, without)), taken


def page(stored: experiments.Results) -> list[str]:
    return [*lines(results_of(stored["cells"])), *beside_others(), *claims.lines(), ""]


def lines(results: Mapping[Cell, Result]) -> Iterator[str]:
    named, none, independent = (
        [sum(counts) for counts in zip(*seen, strict=True)]
        for seen in zip(*(errors(cell, result) for cell, result in results.items()), strict=True)
    )
    apart = {cell: result for cell, result in results.items() if cell.apart}
    too_few = [str(cell) for cell, result in apart.items() if result.answered < ANSWERED]
    searches = sum(result.searches for result in results.values())
    yield from (
        "# Is a bisection with 95 % confidence right in 95 of 100 cases?",
        "",
        "```text",
        "python -m evaluation run calibration",
        "python -m evaluation score --write",
        "```",
        "",
    )
    yield from paragraph(
        f"""
        `nsa-harness bisect` states a confidence with each answer ([bisect.md](../bisect.md)). This page tests that
        number with {searches:,} simulated searches in {len(results)} of {len(list(cells()))} cases. A case combines
        one of six kinds of answer, one of {len(RATES)} failure rates (how often a bad configuration fails), one of
        {len(BACKGROUNDS)} background rates (how often a run fails for an unrelated reason), and
        {", ".join(map(str, SIZES[:-1]))} or {SIZES[-1]} items. `pair/0.8-0.1/12` means: two items together fail in 80
        % of the runs, other runs fail in 10 %, and there are 12 items. `+second` and other words after the number of
        items name something else that happens to the runs ([below](#other-failures-and-dependent-runs)).
        """
    )
    bullets = (
        f"""
        Answers that name items with at least 95 % confidence: {named[1]:,}. Wrong: {named[0]:,}
        ({named[0] / max(named[1], 1):.2%}).
        """,
        f"""
        Searches that report that the bad end never failed, and so fails in less than {NEVER_BELOW:.0%} of its runs,
        although it fails more often: {none[0]:,} ({none[0] / max(none[1], 1):.2%} of all).
        """,
        f"""
        Searches that report that the failure does not depend on the items, although the two rates differ by
        {ALIKE:.0%} or more: {independent[0]:,} ({independent[0] / max(independent[1], 1):.2%} of all).
        """,
        f"""
        Cases in which one of these statements is wrong more often than once in twenty, by a one-sided binomial test
        with Holm's correction over all cases: {", ".join(refuted(chances_of(results))) or "none"}.
        """,
        f"""
        Cases with a failure rate at least {APART} above the background: {len(apart)}. In these, a search should end
        with an answer and not with `undecided`. Cases in which less than {ANSWERED:.0%} of the searches did:
        {", ".join(too_few) or "none"}.
        """,
        f"""
        If the failure rate is not above the background, every named item is wrong, and "it does not depend on the
        items" is right. If two rates differ by less than {ALIKE:.0%}, a search may report that they do not differ;
        its answer states which difference it would have found.
        """,
        f"""
        A search was limited to {MOST_PROBES:,} probes, and to {MOST_OF_CLOSE_RATES} if the rates differ by less than
        {APART}.
        """,
        _versions(results),
    )
    yield ""
    for bullet in bullets:
        first, *more = paragraph(bullet)
        yield from (f"- {first}", *(f"  {line}" for line in more))
    yield from (
        "",
        "![Share of wrong answers among those that name items with at least 95 % confidence](calibration.svg)",
        "",
        "## By failure rate and background",
        "",
    )
    yield from paragraph(
        """
        Each cell covers all kinds of answer and all numbers of items. It shows the wrong answers among those that
        name items with at least 95 % confidence, the share of searches with an answer, and the mean and the largest
        number of probes.
        """
    )
    yield ""
    yield f"| rate | {' | '.join(f'background {background:g}' for background in BACKGROUNDS)} |"
    yield f"| --- | {' | '.join('---' for _ in BACKGROUNDS)} |"
    for rate in RATES:
        found = [
            {
                cell: result
                for cell, result in results.items()
                if (cell.rate, cell.background, cell.trouble) == (rate, back, None)
            }
            for back in BACKGROUNDS
        ]
        yield f"| {rate:g} | {' | '.join(map(_summary, found))} |"
    yield from _troubled_lines(results)
    yield from ("", "## Probes", "")
    yield from paragraph(
        """
        Each cell shows the mean number of probes and, in parentheses, the largest. The last number is a lower bound
        for the mean of any search: the bits of the answer divided by the bits that one run can give at these rates.
        It does not include the tests of both ends, the proofs, and the runs that raise the confidence to 95 %. `0.8
        over 0.1` means a failure rate of 0.8 and a background of 0.1.
        """
    )
    yield ""
    quiet = ((1.0, 0.0), (0.8, 0.0), (0.5, 0.0), (0.8, 0.1), (1.0, 0.2))
    yield f"| answer, items | {' | '.join(f'{rate:g} over {back:g}' for rate, back in quiet)} |"
    yield f"| --- | {' | '.join('---' for _ in quiet)} |"
    for shape, items in product(SHAPES, SIZES):
        row = [Cell(shape=shape, rate=rate, background=back, items=items) for rate, back in quiet]
        yield f"| {shape}, {items} | {' | '.join(_probes(cell, results.get(cell)) for cell in row)} |"


_TROUBLES = {
    Trouble.SECOND: "another failure: always with one item while a second one is off, and in 5 % of all runs",
    Trouble.UNRESOLVED: "no verdict: always with one item while a second one is off, and in 5 % of all runs",
    Trouble.BURSTS: "bursts: half of all runs have the luck of the run before them",
    Trouble.SIGNATURES: "two signatures: half of the failures look like another failure",
}


def _troubled_lines(results: Mapping[Cell, Result]) -> Iterator[str]:
    yield from ("", "## Other failures and dependent runs", "")
    yield from paragraph(
        f"""
        In these cases something else happens to the runs of a program with {TROUBLED_SIZE} items. Each cell covers all
        kinds of answer. It shows the wrong answers among those that name items with at least 95 % confidence, the wrong
        answers among those called `certain`, and the share of searches with an answer. If a search notices bursts, it
        counts each run as only a part of an independent run, and makes more runs.
        """
    )
    bursts = [result for cell, result in results.items() if cell.trouble is Trouble.BURSTS]
    wrong, certain = (sum(getattr(result, name) for result in bursts) for name in ("certain_wrong", "certain"))
    yield ""
    yield from paragraph(
        f"""
        In all cases with bursts, {wrong} of {certain:,} answers that are called `certain` are wrong
        ({wrong / max(certain, 1):.2%}). These are searches in which, by chance, no run contradicted another one.
        """
    )
    columns = list(product(TROUBLED_RATES, TROUBLED_BACKGROUNDS))
    yield from ("", f"| what happens | {' | '.join(f'{rate:g} over {back:g}' for rate, back in columns)} |")
    yield f"| --- | {' | '.join('---' for _ in columns)} |"
    for trouble, words in _TROUBLES.items():
        groups = [
            {
                cell: result
                for cell, result in results.items()
                if (cell.rate, cell.background, cell.trouble) == (rate, back, trouble)
            }
            for rate, back in columns
        ]
        yield f"| {words} | {' | '.join(map(_troubled_summary, groups))} |"


def _troubled_summary(some: Mapping[Cell, Result]) -> str:
    if not some:
        return "not run"
    named = [next(errors(cell, result)) for cell, result in some.items()]
    certain = [(result.certain_wrong, result.certain) for result in some.values()]
    shares = (f"{sum(wrong for wrong, _ in pairs)} of {sum(of for _, of in pairs)}" for pairs in (named, certain))
    return f"{'; '.join(shares)}; {mean(result.answered for result in some.values()):.0%}"


def beside_others() -> Iterator[str]:
    yield from ("", "## Compared with other searches", "")
    yield from paragraph(
        """
        All searches ran on the same simulated programs. Each cell shows the share of right answers and the mean
        number of probes. The other searches trust every run, do not test the two ends, and prove nothing. `git
        bisect` finds only a single item.
        """
    )
    yield ""
    yield f"| answer, items | search | {' | '.join(f'{rate:g} over {back:g}' for rate, back in COMPARED)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in COMPARED)} |"
    for shape, items in product(("single", "pair"), (12, 48)):
        yield from compared(shape, items)


def _summary(some: Mapping[Cell, Result]) -> str:
    if not some:
        return "not run"
    named = [next(errors(cell, result)) for cell, result in some.items()]
    said = f"{sum(wrong for wrong, _ in named)} of {sum(of for _, of in named)}"
    probes, most = (
        mean(result.probes_mean for result in some.values()),
        max(result.probes_most for result in some.values()),
    )
    return f"{said}; {mean(result.answered for result in some.values()):.0%}; {probes:.0f}, {most}"


def _probes(cell: Cell, result: Result | None) -> str:
    return "not run" if result is None else f"{result.probes_mean} ({result.probes_most}), {cell.floor:.1f}"


def _versions(results: Mapping[Cell, Result]) -> str:
    """Return a sentence that says how many cases were searched by which version of the search."""
    counts = Counter(result.version for result in results.values())
    earlier = {
        1: "{} with 48 or 96 items by one that did not look for bursts and ran its proofs one after the other",
        2: "{} with 8 or 12 items by one that ran its proofs one after the other",
    }
    parts = [text.format(counts[version]) for version, text in earlier.items() if counts[version]]
    current = f"Cases that were searched by the current version of `bisect`: {counts[VERSION]} of {len(results)}."
    return f"{current} Earlier versions searched the others: {', and '.join(parts)}." if parts else current


def picture(results: Mapping[Cell, Result]) -> str:
    """Return a plot with a dot per case: the share of wrong answers among those that name something (its size)."""
    left, top, width, height, most = 60, 20, 900, 260, 0.2
    column = width / len(RATES)
    colours = dict(zip(BACKGROUNDS, ("#0f766e", "#2563eb", "#b45309", "#be123c"), strict=True))
    box = f"{left + width + 20} {top + height + 70}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}" font-family="sans-serif" font-size="13">']
    parts.append('<rect width="100%" height="100%" fill="#ffffff"/>')
    for share in (0.0, 0.05, 0.1, 0.15, 0.2):
        y = top + height * (1 - share / most)
        dash = ' stroke-dasharray="6 4" stroke-width="2"' if share == 0.05 else ""
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#9ca3af"{dash}/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for place, rate in enumerate(RATES):
        x = left + column * (place + 0.5)
        parts.append(f'<text x="{x:.0f}" y="{top + height + 22}" text-anchor="middle">fails in {rate:.0%}</text>')
    spread = Random(1)
    for cell, result in results.items():
        wrong, of = next(errors(cell, result))
        if of and cell.trouble is None:
            beside = (BACKGROUNDS.index(cell.background) + 0.6 + spread.uniform(-0.3, 0.3)) / (len(BACKGROUNDS) + 0.2)
            x = left + column * (RATES.index(cell.rate) + beside)
            y = top + height * (1 - min(wrong / of, most) / most)
            dot = f'cx="{x:.1f}" cy="{y:.1f}" r="{1 + 4 * of / SEARCHES:.1f}" fill="{colours[cell.background]}"'
            parts.append(f'<circle {dot} fill-opacity="0.55"/>')
    for place, (background, colour) in enumerate(colours.items()):
        x = left + 20 + 220 * place
        parts.append(f'<circle cx="{x}" cy="{top + height + 48}" r="6" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="{top + height + 53}">background {background:.0%}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
