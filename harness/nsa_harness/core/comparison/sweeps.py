"""Sweeps: runs that differ only in tokens and layers, what each step cost, and the fit of each implementation.

A fit is per implementation, which each cell records. If it changes within the sweep, each implementation has its own
fit, and a size at which another one may run is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import stated
from nsa_harness.core.fits import LAYERS, LEAST_SIZES, TOKENS, Fit, Interval, Point, Quantity, Size, fitted
from nsa_harness.core.report import Finding, Outcome, Status, StepCost

_LEAST_STEPS = 3  # after the first one, for a median
_LEAST_ERROR = 0.02  # of a time: what slows a machine down for some steps affects a whole cell


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The cells of a sweep in which the same implementations ran."""

    cells: tuple[Outcome, ...]  # by size
    named: str  # the implementations that differ from those of other cells; empty if none does

    @property
    def costs(self) -> tuple[StepCost, ...]:
        return tuple(cell.cost for cell in self.cells if cell.cost is not None)

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        made = {quantity: fitted(quantity, self._points(quantity)) for quantity in Quantity}
        time, work = made[Quantity.SECONDS], made[Quantity.PROCESSOR]
        if time is not None and work is not None and self.cells[0].spec.device == "cpu":
            made[Quantity.SECONDS] = time.spread_over_cores(work)
        return tuple(fit for fit in made.values() if fit is not None)

    def _points(self, quantity: Quantity) -> Sequence[Point]:
        """Return the points; none unless every cell has one."""
        values = [(cost, measured(cost, quantity)) for cost in self.costs]
        points = [
            Point(size=size_of(cost), value=value, error=_error(cost, quantity)) for cost, value in values if value
        ]
        return points if len(points) == len(values) else ()

    @property
    def first(self) -> int:
        return min(cost.tokens for cost in self.costs)

    @property
    def last(self) -> int:
        return max(cost.tokens for cost in self.costs)

    @property
    def until(self) -> int | None:
        """Return the number of tokens from which another implementation runs, if the cells show it."""
        return min((cost.until_tokens for cost in self.costs if cost.until_tokens is not None), default=None)

    @property
    def by(self) -> str:
        """Return the implementation as words after a verb; empty if all cells of the sweep have the same one."""
        return f" with {self.named}" if self.named else ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The reason why a size is not predicted."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs that differ only in tokens and layers."""

    cells: tuple[Outcome, ...]
    regimes: tuple[Regime, ...]  # by their smallest length

    def predicted(self, size: Size) -> Mapping[Quantity, Interval] | Refused:
        """Return the cost of a step of that size, or the reason why it is not predicted."""
        regime = max((one for one in self.regimes if one.first <= size.tokens), key=_first, default=None)
        if regime is None:
            return Refused(reason=f"the smallest cell has {self.regimes[0].first} tokens, and below nothing is known")
        above = min((one for one in self.regimes if one.first > size.tokens), key=_first, default=None)
        if regime.until is not None and size.tokens >= regime.until:
            return Refused(
                reason=f"the cells up to {regime.last} tokens ran {_implementation_text(regime)}, and from"
                f" {regime.until} tokens on another implementation runs: measure three lengths from there on"
            )
        if above is not None and size.tokens > regime.last and regime.until is None:
            return Refused(
                reason=f"from {above.first} tokens on the cells ran{above.by}, up to {regime.last} tokens{regime.by},"
                " and where between it changes no cell says"
            )
        if not regime.fits:
            return Refused(reason=_unfitted(regime))
        return {fit.quantity: fit.predicted(size) for fit in regime.fits}


def _first(regime: Regime) -> int:
    return regime.first


def _implementation_text(regime: Regime) -> str:
    return regime.by.strip() or "with one implementation"


def _unfitted(regime: Regime) -> str:
    sizes = len({size_of(cost) for cost in regime.costs})
    ran = f"{sizes} size{'s' if sizes > 1 else ''} ran{regime.by}"
    return f"{ran}, and a fit takes {LEAST_SIZES} lengths or numbers of layers"


def unfitted(regime: Regime) -> str | None:
    """Return why there is no fit; None if there is one."""
    return None if regime.fits else _unfitted(regime)


def measured(cost: StepCost, quantity: Quantity) -> float | None:
    """Return the value that a fit takes from a cell; a time must be the median of several steps."""
    match quantity:
        case Quantity.SECONDS:
            return cost.seconds if cost.steps >= _LEAST_STEPS else None
        case Quantity.PROCESSOR:
            return cost.cpu_s if cost.steps >= _LEAST_STEPS else None
        case Quantity.BYTES:
            return cost.bytes
        case Quantity.NODES:
            return cost.nodes


def _error(cost: StepCost, quantity: Quantity) -> float:
    """Return the error of a value; counted values are exact."""
    errors = {Quantity.SECONDS: cost.error, Quantity.PROCESSOR: cost.cpu_error}
    return max(errors[quantity], _LEAST_ERROR) if quantity in errors else 0.0


def size_of(cost: StepCost) -> Size:
    return Size(tokens=cost.tokens, layers=cost.layers)


def sweeps(outcomes: Iterable[Outcome]) -> tuple[Sweep, ...]:
    """Return the sweeps among these runs; each size that passed counts once."""
    alike: dict[tuple[object, ...], dict[Size, Outcome]] = {}
    for outcome in outcomes:
        if outcome.final and outcome.verdict.status is Status.PASS and outcome.cost is not None:
            alike.setdefault(_apart_from_size(outcome), {}).setdefault(size_of(outcome.cost), outcome)
    ordered = ([cells[size] for size in sorted(cells, key=_by_size)] for cells in alike.values())
    return tuple(_sweep(cells) for cells in ordered if len(cells) >= LEAST_SIZES)


def with_growth(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes in their order; the largest cell of a sweep with quadratic time gets a finding.

    Applying it twice changes nothing more.
    """
    told: dict[int, Finding] = {}
    for regime in (regime for sweep in sweeps(outcomes) for regime in sweep.regimes):
        largest = regime.cells[-1]
        square = next((fit for fit in regime.fits if fit.quantity in _TIMES and fit.is_square), None)
        if square is not None and all(finding.code != Cause.QUADRATIC_COST for finding in largest.findings):
            told[id(largest)] = _quadratic(regime, square)
    return tuple(
        replace(outcome, findings=(*outcome.findings, told[id(outcome)])) if id(outcome) in told else outcome
        for outcome in outcomes
    )


_TIMES = (Quantity.SECONDS, Quantity.PROCESSOR)


def _quadratic(regime: Regime, fit: Fit) -> Finding:
    exponent = fit.exponent
    assert exponent is not None
    return stated(
        Cause.QUADRATIC_COST,
        {
            "variant": "time",
            "quantity": fit.quantity.value,
            "exponent": exponent.value,
            "exponent_low": exponent.low,
            "exponent_high": exponent.high,
            "tokens_from": regime.first,
            "tokens_to": regime.last,
            "implementations": regime.named,
        },
        evidence=EvidenceKind.EFFECT,
        proof=tuple(f"{cell.dir}/verdict.json" for cell in regime.cells),
    )


def _by_size(size: Size) -> tuple[int, int]:
    return size.layers, size.tokens


def _apart_from_size(outcome: Outcome) -> tuple[object, ...]:
    """Return what must be equal in a sweep: the shape's other numbers, not its name, and not the number of steps."""
    assert outcome.cost is not None
    settings = tuple(pair for pair in outcome.spec.settings if pair[0] not in (TOKENS, LAYERS, "train.steps"))
    return settings, outcome.spec.ranks, outcome.spec.device, outcome.spec.backend, outcome.cost.batch


def _sweep(cells: Sequence[Outcome]) -> Sweep:
    by: dict[tuple[str, ...], list[Outcome]] = {}
    for cell in cells:
        assert cell.cost is not None
        by.setdefault(cell.cost.implementations, []).append(cell)
    shared = set.intersection(*(set(implementations) for implementations in by))
    regimes = (
        Regime(cells=tuple(some), named=", ".join(one for one in implementations if one not in shared))
        for implementations, some in by.items()
    )
    return Sweep(cells=tuple(cells), regimes=tuple(sorted(regimes, key=_first)))
