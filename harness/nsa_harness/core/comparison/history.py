"""The history of a scenario or script over many stored runs: changes, flakiness, and differences between two runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.experiment.statistics import interval
from nsa_harness.core.report import Facts

_MIN_RUNS = 4  # a spread needs at least so many values
_SPREADS = 4.0  # a change of fewer spreads may be noise


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One attempt in a stored run, with what it measured and where it ran."""

    run_id: str
    directory: str  # of the attempt, relative to that of the run
    scenario: str
    spec_hash: str
    verdict: str
    cause: str | None
    expected: bool
    summary: str
    numbers: Mapping[str, float]  # by name of `QUANTITIES`
    surroundings: Mapping[str, str]  # such as {"commit": "1a2b3c", "package torch": "2.13.0"}

    @property
    def result(self) -> str:
        """The verdict, with the cause of a failure."""
        return f"{self.verdict} {self.cause}" if self.cause else self.verdict


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number of a run that can be compared. `least_change` is the smallest change that counts, as a fraction."""

    name: str
    unit: str
    more_is_better: bool | None  # None: a change is neither better nor worse
    least_change: float


RANK_STEP = "step (slowest rank)"  # as nsa-harness measures it, for programs that do not report the time of a step
QUANTITIES = (
    Quantity(name="step", unit="s", more_is_better=False, least_change=0.05),
    Quantity(name=RANK_STEP, unit="s", more_is_better=False, least_change=0.20),
    Quantity(name="tokens per second", unit="", more_is_better=True, least_change=0.05),
    Quantity(name="wall time", unit="s", more_is_better=False, least_change=0.20),
    Quantity(name="memory per rank", unit="bytes", more_is_better=False, least_change=0.05),
    Quantity(name="GPU memory per rank", unit="bytes", more_is_better=False, least_change=0.02),
    Quantity(name="first loss", unit="", more_is_better=None, least_change=1e-6),
    Quantity(name="last loss", unit="", more_is_better=False, least_change=0.01),
    # The communication of a step is only read to compare two runs.
    Quantity(name="calls per step", unit="", more_is_better=None, least_change=1e-6),
    Quantity(name="sent per step", unit="B", more_is_better=None, least_change=1e-6),
)


class Change(StrEnum):
    """The meanings of a difference between the numbers of two runs."""

    SAME = "same"
    NOISE = "within the noise"
    BETTER = "better"
    WORSE = "worse"
    DIFFERENT = "different"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of two runs. `change` is relative to `before`; `spread` is that of earlier repeats, None if unknown."""

    quantity: Quantity
    before: float
    after: float
    change: float
    spread: float | None
    meaning: Change


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences between two attempts."""

    before: Entry
    after: Entry
    rows: tuple[Row, ...]
    surroundings: tuple[tuple[str, str, str], ...]  # (name, before, after) of each that differs
    calls: tuple[Facts, ...] = ()  # the collectives and transfers of a step that differ, on the first rank where any do

    @property
    def is_regression(self) -> bool:
        """Return whether the verdict became worse than expected, or a number became worse."""
        return (self.before.expected and not self.after.expected) or any(
            row.meaning is Change.WORSE for row in self.rows
        )


def compare(before: Entry, after: Entry, earlier: Sequence[Entry] = ()) -> Comparison:
    """Return the differences between two attempts.

    `earlier`: other attempts, from which the noise is known. Only those with the settings and surroundings of `before`
    or of `after` count.
    """
    repeats = [[entry for entry in earlier if entry.expected and _is_repeat(entry, side)] for side in (before, after)]
    rows = tuple(
        _row(
            quantity,
            before,
            after,
            max(filter(None, (_spread(quantity.name, group) for group in repeats)), default=None),
        )
        for quantity in QUANTITIES
        if quantity.name in before.numbers and quantity.name in after.numbers
    )
    return Comparison(before=before, after=after, rows=rows, surroundings=tuple(differences(before, after)))


def differences(before: Entry, after: Entry) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference between the surroundings of two attempts, with both values."""
    for name in dict.fromkeys((*before.surroundings, *after.surroundings)):
        values = before.surroundings.get(name, "none"), after.surroundings.get(name, "none")
        if values[0] != values[1]:
            yield name, *values


def _is_repeat(entry: Entry, of: Entry) -> bool:
    return entry.spec_hash == of.spec_hash and entry.surroundings == of.surroundings


def _spread(name: str, group: Iterable[Entry]) -> float | None:
    """Return the spread of a number over repeats, relative to its median, or None with too few repeats.

    The spread is the median absolute deviation, scaled to the standard deviation of a normal distribution.
    """
    values = [entry.numbers[name] for entry in group if name in entry.numbers]
    middle = statistics.median(values) if len(values) >= _MIN_RUNS else 0.0
    if middle == 0.0:
        return None
    return 1.4826 * statistics.median(abs(value - middle) for value in values) / abs(middle)


def _row(quantity: Quantity, before: Entry, after: Entry, spread: float | None) -> Row:
    old, new = before.numbers[quantity.name], after.numbers[quantity.name]
    change = (new - old) / abs(old) if old else (0.0 if new == old else 1.0)
    meaning = Change.SAME
    if abs(change) >= quantity.least_change:
        if spread is not None and abs(change) < _SPREADS * spread:
            meaning = Change.NOISE
        elif quantity.more_is_better is None:
            meaning = Change.DIFFERENT
        else:
            meaning = Change.BETTER if (change > 0) is quantity.more_is_better else Change.WORSE
    return Row(quantity=quantity, before=old, after=new, change=change, spread=spread, meaning=meaning)


@dataclass(frozen=True, kw_only=True)
class VerdictChange:
    """A change of the result from one run to the next, with everything in the surroundings that changed with it."""

    before: Entry
    after: Entry
    surroundings: tuple[tuple[str, str, str], ...]
    settings_changed: bool


def verdict_changes(entries: Sequence[Entry]) -> Iterator[VerdictChange]:
    """Yield each change of the result in the history of one scenario, the oldest first. `entries` are in this order."""
    for before, after in itertools.pairwise(entries):
        if before.result != after.result:
            yield VerdictChange(
                before=before,
                after=after,
                surroundings=tuple(differences(before, after)),
                settings_changed=before.spec_hash != after.spec_hash,
            )


@dataclass(frozen=True, kw_only=True)
class FlakeRate:
    """How often attempts with the same settings and surroundings did not end as expected."""

    bad: int
    runs: int
    interval: tuple[float, float]  # of the rate, with 95 % confidence


def flake_rate(entries: Sequence[Entry]) -> FlakeRate | None:
    """Return the failure rate of the latest attempt's repeats, or None if all of them ended in the same way."""
    repeats = [entry for entry in entries if entries and _is_repeat(entry, entries[-1])]
    bad = sum(not entry.expected for entry in repeats)
    if bad in (0, len(repeats)):
        return None
    return FlakeRate(bad=bad, runs=len(repeats), interval=interval(bad, len(repeats)))
