"""Whether a search that says it is 95 % sure is right 95 times of 100: simulated programs of every shape and noise.

    python tools/calibration.py run [--minutes N] [--jobs N] [--only 'single/*/96']    cells that have no result yet
    python tools/calibration.py page                                                   docs/calibration.md and its plot

A cell is SHAPE/RATE-BACKGROUND/ITEMS. What holds a culprit fails at the rate, anything else at the background. Each is
searched 200 times, with another culprit and other luck each time; the seed is the number of the search. Results go to
benchmarks/results/calibration.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import islice, product
from math import comb, log2
from pathlib import Path
from random import Random
from statistics import mean

from nsa_harness.core.experiment.statistics import tries
from nsa_harness.core.search.plan import find
from nsa_harness.core.search.question import (
    AnswerKind,
    CountsAs,
    QuestionKind,
    Round,
    SearchAnswer,
    SearchQuestion,
    Subset,
)

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "calibration.json"
PAGE = REPOSITORY / "docs" / "calibration.md"
PICTURE = REPOSITORY / "docs" / "calibration.svg"
SEARCHES = 200  # of each cell
CONFIDENCE = 0.95
RATES = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
BACKGROUNDS = (0.0, 0.05, 0.1, 0.2)
SIZES = (8, 12, 48, 96)
APART = 0.4  # rates that are at least so far apart must be answered
ANSWERED = 0.9  # of them so many at least
ALIKE = 0.2  # closer rates may be told as ones that do not differ: the answer says so
MOST_PROBES = 1000  # as the command has it
MOST_OF_CLOSE_RATES = 300  # where they need not be answered
# "The bad end passed 14 of 14: never seen failing; it may in less than 19 % of runs."
NEVER_BELOW = 1 - (1 - CONFIDENCE) ** (1 / tries(0.2, CONFIDENCE))
BAD, GOOD = CountsAs.BAD, CountsAs.GOOD
_NOTHING_NAMED = (AnswerKind.NONE, AnswerKind.INDEPENDENT)

Fails = Callable[[Subset], bool]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A culprit, and how it is told."""

    fails: Fails
    kind: AnswerKind
    items: tuple[int, ...]


def single(items: int, luck: Random) -> Truth:
    one = luck.randrange(items)
    return Truth(fails=lambda on: one in on, kind=AnswerKind.SINGLE, items=(one,))


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


@dataclass(frozen=True, kw_only=True)
class Cell:
    shape: str
    rate: float
    background: float
    items: int

    def __str__(self) -> str:
        return f"{self.shape}/{self.rate:g}-{self.background:g}/{self.items}"

    def untrue(self, kind: AnswerKind) -> bool:
        """Whether it is wrong here that the bad end is not seen failing, or fails as often as the good one."""
        return self.rate >= NEVER_BELOW if kind is AnswerKind.NONE else self.rate - self.background >= ALIKE

    @property
    def apart(self) -> bool:
        return self.rate - self.background >= APART - 1e-9

    @property
    def answers(self) -> int:
        """How many there are to choose from."""
        pairs = comb(self.items, 2)
        return {"pair": pairs, "several": pairs, "range": pairs}.get(self.shape, self.items)

    @property
    def floor(self) -> float:
        """Probes that no search does without on average: the bits of the answer by those that one run can tell."""
        told = capacity(self.rate, self.background)
        return log2(self.answers) / told if told else float("inf")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of all searches of a cell."""

    searches: int
    sure: int  # said to be at least so sure as was asked for
    wrong: int  # of those
    kinds: dict[str, int]
    probes_mean: float
    probes_most: int

    @property
    def answered(self) -> float:
        return 1 - self.told(AnswerKind.UNDECIDED) / self.searches

    def told(self, *kinds: AnswerKind) -> int:
        return sum(self.kinds.get(kind.value, 0) for kind in kinds)

    @property
    def named(self) -> int:
        """Searches that named something and were sure."""
        return self.sure - self.told(*_NOTHING_NAMED)


def stored_results() -> dict[Cell, Result]:
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {cell: Result(**stored[str(cell)]) for cell in cells() if str(cell) in stored}


def cells() -> Iterator[Cell]:
    for items, shape, rate, background in product(SIZES, SHAPES, RATES, BACKGROUNDS):
        yield Cell(shape=shape, rate=rate, background=background, items=items)


def capacity(rate: float, background: float) -> float:
    """Bits that a run can tell at best of whether a set holds the culprit (Shannon), by trying every share."""
    shares = (step / 200 for step in range(201))
    noise = [entropy(rate), entropy(background)]
    return max(
        entropy(share * rate + (1 - share) * background) - share * noise[0] - (1 - share) * noise[1] for share in shares
    )


def entropy(chance: float) -> float:
    return 0.0 if chance in (0.0, 1.0) else -chance * log2(chance) - (1 - chance) * log2(1 - chance)


def searched(cell: Cell, seed: int) -> tuple[SearchAnswer, Truth, int]:
    """One search with its own culprit and luck; how many probes it took."""
    luck = Random(f"{cell} {seed}")
    truth = SHAPES[cell.shape](cell.items, luck)
    taken = 0

    def probe(asked: Round) -> list[CountsAs]:
        nonlocal taken
        taken += len(asked.subsets)
        rates = (cell.rate if truth.fails(on) else cell.background for on in asked.subsets)
        return [BAD if luck.random() < rate else GOOD for rate in rates]

    question = SearchQuestion(
        kind=QuestionKind.ORDERED if cell.shape == "threshold" else QuestionKind.SET,
        items=cell.items,
        confidence=CONFIDENCE,
        controls=tries(0.2, CONFIDENCE),
        max_probes=MOST_PROBES if cell.apart else MOST_OF_CLOSE_RATES,
    )
    return find(question, probe), truth, taken


def right(cell: Cell, truth: Truth, answer: SearchAnswer) -> bool:
    """Whether what is said is so; of rates that do not differ nothing may be named."""
    if answer.kind in _NOTHING_NAMED:
        return not cell.untrue(answer.kind)
    return cell.rate > cell.background and (answer.kind, answer.items) == (truth.kind, truth.items)


def result_of(cell: Cell) -> Result:
    found = [searched(cell, seed) for seed in range(SEARCHES)]
    sure = [
        (answer, truth)
        for answer, truth, _ in found
        if answer.kind is not AnswerKind.UNDECIDED and answer.confidence >= CONFIDENCE
    ]
    return Result(
        searches=SEARCHES,
        sure=len(sure),
        wrong=sum(not right(cell, truth, answer) for answer, truth in sure),
        kinds=dict(sorted(Counter(answer.kind.value for answer, _, _ in found).items())),
        probes_mean=round(mean(taken for _, _, taken in found), 1),
        probes_most=max(taken for _, _, taken in found),
    )


def run(only: str, minutes: float, jobs: int) -> None:
    """What is done is kept after each cell; the same command goes on."""
    known = stored_results()
    wanted = [cell for cell in cells() if cell not in known and fnmatchcase(str(cell), only)]
    until = time.monotonic() + minutes * 60
    print(f"{len(wanted)} cells to search, {len(known)} done", flush=True)
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        waiting = iter(wanted)
        running = {pool.submit(result_of, cell): cell for cell in islice(waiting, jobs)}
        while running:
            done = next(as_completed(running))
            known[running.pop(done)] = done.result()
            rows = (f" {json.dumps(str(cell))}: {json.dumps(asdict(known[cell]))}" for cell in cells() if cell in known)
            RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
            if time.monotonic() < until and (following := next(waiting, None)) is not None:
                running[pool.submit(result_of, following)] = following
    print(f"{len(known)} cells done", flush=True)


def chance_of_as_many(wrong: int, of: int) -> float:
    """One-sided binomial test: how likely so many wrong ones or more are where one of twenty is."""
    doubt = 1 - CONFIDENCE
    return sum(comb(of, k) * doubt**k * (1 - doubt) ** (of - k) for k in range(wrong, of + 1))


def errors(cell: Cell, one: Result) -> Iterator[tuple[int, int]]:
    """So many wrong of so many, of each statement that is made with the confidence.

    What is named is wrong in so many of the answers that name something. That nothing was seen failing, or that it does
    not depend, is what a test of the ends says before the search: wrong in so many of all searches.
    """
    tests = [one.told(kind) if cell.untrue(kind) else 0 for kind in _NOTHING_NAMED]
    yield one.wrong - sum(tests), one.named
    yield from ((wrong, one.searches) for wrong in tests)


def chances_of(results: Mapping[Cell, Result]) -> dict[str, float]:
    """By cell and statement: how likely so many errors are where the confidence holds."""
    return {
        f"{cell} {what}": chance_of_as_many(*seen)
        for cell, one in results.items()
        for what, seen in zip(("named", "none", "independent"), errors(cell, one), strict=True)
    }


def refuted(chances: dict[str, float], level: float = 0.05) -> list[str]:
    """The cells in which the confidence does not hold, of all cells together (Holm, 1979)."""
    names = sorted(chances, key=lambda name: chances[name])
    found: list[str] = []
    for place, name in enumerate(names):
        if chances[name] > level / (len(names) - place):
            break
        found.append(name)
    return found


def ddmin(items: int, fails: Fails) -> Subset:
    """Zeller and Hildebrandt (2002), to compare with: every answer is believed."""
    failing, parts = list(range(items)), 2
    while len(failing) > 1:
        cut = [failing[len(failing) * i // parts : len(failing) * (i + 1) // parts] for i in range(parts)]
        rests = [[one for one in failing if one not in part] for part in cut]
        smaller = next((part for part in cut if fails(frozenset(part))), None)
        rest = None if smaller else next((part for part in rests if fails(frozenset(part))), None)
        if smaller is None and rest is None and parts >= len(failing):
            break
        parts = 2 if smaller else max(parts - 1, 2) if rest else min(2 * parts, len(failing))
        failing = smaller or rest or failing
    return frozenset(failing)


def halving(items: int, fails: Fails) -> Subset:
    """`git bisect`: the first item with which a prefix fails."""
    low, high = 0, items
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(frozenset(range(middle))) else (middle, high)
    return frozenset({high - 1})


def go_bisect(items: int, fails: Fails) -> Subset:
    """Go's `bisect` (R. Cox): halves, each searched with what the other half was found to need kept on."""

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
    """Rows: each way to search, how often it is right and with how many probes, at each noise."""
    ways = [name for name in OTHERS if not (shape == "pair" and name == "git bisect")]
    for name in (*ways, "nsa-harness"):
        told = []
        for rate, background in COMPARED:
            cell = Cell(shape=shape, rate=rate, background=background, items=items)
            runs = [
                _ours(cell, seed) if name == "nsa-harness" else _other(name, cell, seed) for seed in range(SEARCHES)
            ]
            told.append(f"{sum(ok for ok, _ in runs) / SEARCHES:.0%}, {mean(taken for _, taken in runs):.1f}")
        yield f"| {shape}, {items} | {name} | {' | '.join(told)} |"


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

    found = OTHERS[name](cell.items, fails)
    without = (found - {one} for one in found)
    return truth.fails(found) and not any(map(truth.fails, without)), taken


def page() -> None:
    results = stored_results()
    PICTURE.write_text(picture(results))
    PAGE.write_text("\n".join((*lines(results), *beside_others())) + "\n")


def lines(results: Mapping[Cell, Result]) -> Iterator[str]:
    named, none, independent = (
        [sum(one) for one in zip(*seen, strict=True)]
        for seen in zip(*(errors(cell, one) for cell, one in results.items()), strict=True)
    )
    apart = {cell: one for cell, one in results.items() if cell.apart}
    too_few = [str(cell) for cell, one in apart.items() if one.answered < ANSWERED]
    yield from f"""# Is a search that says 95 % right 95 times of 100?

```text
python tools/calibration.py run
python tools/calibration.py page
```

{sum(one.searches for one in results.values()):,} simulated searches in {len(results)} of {len(list(cells()))} cells:
six shapes of answer, {len(RATES)} rates of failure, {len(BACKGROUNDS)} backgrounds (how often a run fails for another
reason than what is varied), {", ".join(map(str, SIZES))} items. What confidence means stands in [bisect.md](bisect.md).

- Named something, said to be at least 95 % sure: {named[1]:,}; wrong: {named[0]:,} ({named[0] / max(named[1], 1):.2%}).
- Said that the bad end was never seen failing, which may be so in less than {NEVER_BELOW:.0%} of its runs, where it
  fails more often: in {none[0]:,} of all searches ({none[0] / max(none[1], 1):.2%}).
- Said that it does not depend, where the rates are {ALIKE:.0%} apart or more: in {independent[0]:,} of all searches
  ({independent[0] / max(independent[1], 1):.2%}).
- Cells in which one of these statements is wrong more often than once in twenty (one-sided binomial test for each,
  Holm's correction over all): {", ".join(refuted(chances_of(results))) or "none"}.
- Cells with the rate at least {APART} above the background: {len(apart)}. Answered, not undecided, in less than
  {ANSWERED:.0%} of searches: {", ".join(too_few) or "none"}.
- Where the rate is not above the background nothing may be named; that it does not depend is right there. Two rates
  less than {ALIKE:.0%} apart may be told as ones that do not differ: the answer says what would have shown.
- A search makes {MOST_PROBES:,} probes at most, and {MOST_OF_CLOSE_RATES} where the rates are closer than {APART}.

![wrong answers among those that name something and are said to be 95 % sure](calibration.svg)

## By rate and background

Over all shapes and sizes: wrong of those that name something and are 95 % sure; answered; probes on average, and at
most.
""".splitlines()
    yield ""
    yield f"| rate | {' | '.join(f'background {one:g}' for one in BACKGROUNDS)} |"
    yield f"| --- | {' | '.join('---' for _ in BACKGROUNDS)} |"
    for rate in RATES:
        found = [
            {cell: one for cell, one in results.items() if (cell.rate, cell.background) == (rate, b)}
            for b in BACKGROUNDS
        ]
        yield f"| {rate:g} | {' | '.join(map(_summary, found))} |"
    yield from """
## Probes

On average (at most), beside what no search does without on average: the bits of the answer by the most that a run can
tell at these rates. Both ends, the proofs and what makes the answer 95 % sure come on top of that.
""".splitlines()
    yield ""
    quiet = ((1.0, 0.0), (0.8, 0.0), (0.5, 0.0), (0.8, 0.1), (1.0, 0.2))
    yield f"| shape, items | {' | '.join(f'{rate:g} over {back:g}' for rate, back in quiet)} |"
    yield f"| --- | {' | '.join('---' for _ in quiet)} |"
    for shape, items in product(SHAPES, SIZES):
        row = [Cell(shape=shape, rate=rate, background=back, items=items) for rate, back in quiet]
        yield f"| {shape}, {items} | {' | '.join(_probes(cell, results.get(cell)) for cell in row)} |"


def beside_others() -> Iterator[str]:
    yield from """
## Beside others

On the same programs: right answers, and probes on average. The others believe every answer, look at no ends, and prove
nothing; `git bisect` finds one item.
""".splitlines()
    yield ""
    yield f"| shape, items | search | {' | '.join(f'{rate:g} over {back:g}' for rate, back in COMPARED)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in COMPARED)} |"
    for shape, items in product(("single", "pair"), (12, 48)):
        yield from compared(shape, items)


def _summary(some: Mapping[Cell, Result]) -> str:
    if not some:
        return "not run"
    named = [next(errors(cell, one)) for cell, one in some.items()]
    said = f"{sum(wrong for wrong, _ in named)} of {sum(of for _, of in named)}"
    probes, most = mean(one.probes_mean for one in some.values()), max(one.probes_most for one in some.values())
    return f"{said}; {mean(one.answered for one in some.values()):.0%}; {probes:.0f}, {most}"


def _probes(cell: Cell, one: Result | None) -> str:
    return "not run" if one is None else f"{one.probes_mean} ({one.probes_most}), {cell.floor:.1f}"


def picture(results: Mapping[Cell, Result]) -> str:
    """Each cell a dot, as large as it has answers that name something: how many are wrong; dashed: one of twenty."""
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
    for cell, one in results.items():
        wrong, of = next(errors(cell, one))
        if of:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--only", default="*", help="cells, as a pattern")
    runs.add_argument("--minutes", type=float, default=30, help="begin no cell after this")
    runs.add_argument("--jobs", type=int, default=2, help="processes")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "run":
        run(given.only, given.minutes, given.jobs)
    else:
        page()


if __name__ == "__main__":
    main()
