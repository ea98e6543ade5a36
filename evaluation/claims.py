"""What `claim` concludes about simulated programs whose runs are not independent, or are only slow.

Each program is claimed about 200 times, with other luck each time; the seed is the number of the claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median

from evaluation.scoring import paragraph
from nsa_harness.core.experiment.claim import SECOND, ClaimResult, ClaimTerms, SequentialTest
from nsa_harness.core.experiment.trial import Trial
from nsa_harness.core.search.question import ProbeResult

CLAIMS = 200
CONFIDENCE = 0.95
CONTROLS = 14  # pairs without a failure before a claim ends, as for a failure that was seen before
SUPPORTED, REFUTED, UNDECIDED = ClaimResult.SUPPORTED, ClaimResult.REFUTED, ClaimResult.UNDECIDED
DEADLINE_S, SLOW_S, FAST_S = 60.0, 144.0, 18.0

PASSES, FAILS, SLOW = "passes", "fails", "slow"
Run = Callable[[int], str]  # the side of the next run -> how it ends
Program = Callable[[Random], Run]


def independent(first: float, second: float) -> Program:
    return lambda luck: lambda side: FAILS if luck.random() < (first, second)[side] else PASSES


def every_second(luck: Random) -> Run:
    """Every second launch fails, whichever side it is."""
    last = [luck.random() < 0.5]

    def run(_: int) -> str:
        last[0] = not last[0]
        return FAILS if last[0] else PASSES

    return run


def bursts(first: float, second: float, length: int) -> Program:
    """A run has the luck of the run before it, for so many runs on average."""

    def program(luck: Random) -> Run:
        last = [luck.random()]

        def run(side: int) -> str:
            last[0] = luck.random() if luck.random() < 1 / length else last[0]
            return FAILS if last[0] < (first, second)[side] else PASSES

        return run

    return program


def always(first: str, second: str) -> Program:
    return lambda _: lambda side: (first, second)[side]


def partly_slow(luck: Random) -> Run:
    """Without the change, half of the runs hang and the others are too slow."""
    return lambda side: PASSES if side == SECOND else FAILS if luck.random() < 0.5 else SLOW


@dataclass(frozen=True, kw_only=True)
class Case:
    what: str  # the program
    program: Program
    wrong: tuple[ClaimResult, ...]
    in_turn: bool = False  # the sides take turns, as in a fixed order


CASES = (
    Case(what="fails in half of its runs, with the change too", program=independent(0.5, 0.5), wrong=(SUPPORTED,)),
    Case(what="fails in half of its runs, with the change never", program=independent(0.5, 0.0), wrong=(REFUTED,)),
    Case(what="fails every second launch, order drawn", program=every_second, wrong=(SUPPORTED,)),
    Case(what="fails every second launch, sides in turn", program=every_second, wrong=(SUPPORTED,), in_turn=True),
    Case(what="fails in bursts of 2 runs, with the change too", program=bursts(0.5, 0.5, 2), wrong=(SUPPORTED,)),
    Case(what="fails in bursts of 5 runs, with the change too", program=bursts(0.5, 0.5, 5), wrong=(SUPPORTED,)),
    Case(what="fails in bursts of 5 runs, with the change never", program=bursts(0.5, 0.0, 5), wrong=(REFUTED,)),
    Case(what="is too slow without the change only", program=always(SLOW, PASSES), wrong=(SUPPORTED, REFUTED)),
    Case(what="is too slow with the change only", program=always(PASSES, SLOW), wrong=(SUPPORTED, REFUTED)),
    Case(what="hangs without the change, is too slow with it", program=always(FAILS, SLOW), wrong=(SUPPORTED, REFUTED)),
    Case(what="is too slow, with the change too", program=always(SLOW, SLOW), wrong=(SUPPORTED,)),
    Case(what="hangs or is too slow, with the change neither", program=partly_slow, wrong=(REFUTED,)),
)


def claimed(case: Case, seed: int) -> SequentialTest:
    """Run one claim until it ends."""
    luck = Random(f"{case.what} {seed}")
    run = case.program(luck)
    test = SequentialTest(terms=ClaimTerms(confidence=CONFIDENCE, controls=CONTROLS, order_seed=seed))
    while test.conclusion() is None:
        side = len(test.trials) % 2 if case.in_turn else test.next_side
        end = run(side)
        counts_as = ProbeResult.GOOD if end == PASSES else ProbeResult.BAD
        wall_s = FAST_S if end == PASSES else DEADLINE_S
        test.add_trial(Trial(config=side, counts_as=counts_as, end=end, dir="", wall_s=wall_s, is_slow=end == SLOW))
    return test


def row(case: Case) -> str:
    tests = [claimed(case, seed) for seed in range(CLAIMS)]
    ends = Counter(found.result for test in tests if (found := test.conclusion()))
    counts = " | ".join(str(ends[result]) for result in (SUPPORTED, REFUTED, UNDECIDED))
    wrong = sum(ends[result] for result in case.wrong)
    return f"| {case.what} | {counts} | {wrong} | {median(test.pairs for test in tests):g} |"


def lines() -> Iterator[str]:
    yield from ("", "## Claims", "")
    yield from paragraph(
        f"""
        `nsa-harness claim` was simulated too: {CLAIMS} claims about each program below, at 95 % confidence and at most
        100 pairs. A conclusion is wrong if it says that a change helps that has no effect, or that it does not help
        although it removes the failure. If only the deadline of {DEADLINE_S:g} s lies between a slow run
        ({SLOW_S:g} s) and a fast one ({FAST_S:g} s), any conclusion about failures is wrong. The row with the sides in
        turn shows what happens if the order of each pair is not drawn at random.
        """
    )
    yield from ("", "| the program | supported | refuted | undecided | wrong | pairs, median |")
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    yield from map(row, CASES)
