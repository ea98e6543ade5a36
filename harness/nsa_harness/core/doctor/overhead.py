"""What the harness costs a command: pairs of wall times, medians, and whether the difference is more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

FEWEST_PAIRS, MOST_PAIRS = 3, 7
BUDGET_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TimedPair:
    """One run of each, one right after the other. Seconds."""

    bare_s: float
    harness_s: float  # from the start to the written report
    after_s: float  # of that, what followed the command's end: collecting, judging, writing

    @property
    def more_s(self) -> float:
        return self.harness_s - self.bare_s


@dataclass(frozen=True, kw_only=True)
class Overhead:
    command: str
    pairs: tuple[TimedPair, ...]

    @property
    def bare_s(self) -> float:
        return median(pair.bare_s for pair in self.pairs)

    @property
    def harness_s(self) -> float:
        return median(pair.harness_s for pair in self.pairs)

    @property
    def after_s(self) -> float:
        return median(pair.after_s for pair in self.pairs)

    @property
    def more_percent(self) -> float:
        return 100.0 * (self.harness_s - self.bare_s) / self.bare_s

    @property
    def certain(self) -> bool:
        """Every pair says the same about which of the two is faster."""
        return all(pair.more_s > 0 for pair in self.pairs) or all(pair.more_s < 0 for pair in self.pairs)


def pairs_wanted(first_s: float) -> int:
    """As many as fit into the budget, given the time of one bare run; never fewer than tell the spread."""
    return max(FEWEST_PAIRS, min(MOST_PAIRS, int(BUDGET_S / (2 * max(first_s, 0.001)))))


def overhead_lines(overhead: Overhead) -> Iterator[str]:
    pairs = overhead.pairs
    more = [pair.more_s for pair in pairs]
    yield f"overhead of the harness, {len(pairs)} pairs, in turn: {overhead.command}"
    yield f"  bare           {overhead.bare_s:8.3f} s   {_spread([pair.bare_s for pair in pairs])}"
    yield f"  with harness   {overhead.harness_s:8.3f} s   {_spread([pair.harness_s for pair in pairs])}"
    yield (
        f"  difference     {overhead.harness_s - overhead.bare_s:+8.3f} s   {_spread(more, sign='+')}   "
        f"{overhead.more_percent:+.1f} %"
    )
    yield f"  of which       {overhead.after_s:8.3f} s   after the command's end: evidence, verdict, report"
    if not overhead.certain:
        yield "  within the noise: the pairs disagree about which of the two is faster"


def overhead_values(overhead: Overhead) -> dict[str, object]:
    """For JSON, with every sample."""
    return {
        "command": overhead.command,
        "pairs": [
            {"bare_s": pair.bare_s, "harness_s": pair.harness_s, "after_s": pair.after_s} for pair in overhead.pairs
        ],
        "bare_s_median": overhead.bare_s,
        "harness_s_median": overhead.harness_s,
        "after_s_median": overhead.after_s,
        "more_percent": overhead.more_percent,
        "within_noise": not overhead.certain,
    }


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"({min(values):{sign}.3f} to {max(values):{sign}.3f})"
