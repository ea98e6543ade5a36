"""Sweeps: fit the cost of a step over runs that differ only in tokens and layers, and predict it for other sizes.

Each run records its implementation. If it changes within the sweep, each implementation has its own fit. No prediction
is made for a size at which another implementation may run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.fits import LAYERS, LEAST_SIZES, TOKENS, Fit, Interval, Point, Quantity, Size, fit_points
from nsa_harness.core.report import Finding, Outcome, Status, StepCost

_MIN_STEPS = 3  # measured steps, without the first, that a median needs
_MIN_ERROR = 0.02  # relative error of a time: a machine that slows down affects all steps of a run


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The cells of a sweep in which the same implementations ran."""

    cells: tuple[Outcome, ...]  # by size
    implementations: str  # the implementations that other cells of the sweep do not have; empty if all have the same

    @property
    def costs(self) -> tuple[StepCost, ...]:
        return tuple(cell.cost for cell in self.cells if cell.cost is not None)

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        fit_by_quantity = {quantity: fit_points(quantity, self._points(quantity)) for quantity in Quantity}
        time, cpu = fit_by_quantity[Quantity.SECONDS], fit_by_quantity[Quantity.PROCESSOR]
        if time is not None and cpu is not None and self.cells[0].spec.device == "cpu":
            fit_by_quantity[Quantity.SECONDS] = time.spread_over_cores(cpu)
        return tuple(fit for fit in fit_by_quantity.values() if fit is not None)

    def _points(self, quantity: Quantity) -> Sequence[Point]:
        """Return the measured points of the cells; none if the value of some cell is missing."""
        values = [(cost, cell_value(cost, quantity)) for cost in self.costs]
        points = [
            Point(size=size_of(cost), value=value, error=_error(cost, quantity)) for cost, value in values if value
        ]
        return points if len(points) == len(values) else ()

    @property
    def first_tokens(self) -> int:
        return min(cost.tokens for cost in self.costs)

    @property
    def last_tokens(self) -> int:
        return max(cost.tokens for cost in self.costs)

    @property
    def until_tokens(self) -> int | None:
        """The number of tokens from which another implementation runs, or None if unknown."""
        return min((cost.until_tokens for cost in self.costs if cost.until_tokens is not None), default=None)

    @property
    def with_text(self) -> str:
        """The implementation as text to put after a verb, " with X"; empty if all cells of the sweep have the same."""
        return f" with {self.implementations}" if self.implementations else ""


@dataclass(frozen=True, kw_only=True)
class NoPrediction:
    """The reason why a size is not predicted."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs that differ only in tokens and layers, called cells."""

    cells: tuple[Outcome, ...]
    regimes: tuple[Regime, ...]  # by their smallest length

    def predict(self, size: Size) -> Mapping[Quantity, Interval] | NoPrediction:
        """Return the cost of a step of that size, or the reason why it is not predicted."""
        regime = max(
            (candidate for candidate in self.regimes if candidate.first_tokens <= size.tokens), key=_first, default=None
        )
        if regime is None:
            return NoPrediction(
                reason=f"the smallest cell has {self.regimes[0].first_tokens} tokens, and below nothing is known"
            )
        next_regime = min(
            (candidate for candidate in self.regimes if candidate.first_tokens > size.tokens), key=_first, default=None
        )
        if regime.until_tokens is not None and size.tokens >= regime.until_tokens:
            return NoPrediction(
                reason=f"the cells up to {regime.last_tokens} tokens ran {_implementation_text(regime)}, and from"
                f" {regime.until_tokens} tokens on another implementation runs: measure three lengths from there on"
            )
        if next_regime is not None and size.tokens > regime.last_tokens and regime.until_tokens is None:
            return NoPrediction(
                reason=f"from {next_regime.first_tokens} tokens on the cells ran{next_regime.with_text}, up to {regime.last_tokens} tokens{regime.with_text},"
                " and where between it changes no cell says"
            )
        if not regime.fits:
            return NoPrediction(reason=_no_fit_reason(regime))
        return {fit.quantity: fit.predict(size) for fit in regime.fits}


def _first(regime: Regime) -> int:
    return regime.first_tokens


def _implementation_text(regime: Regime) -> str:
    return regime.with_text.strip() or "with one implementation"


def _no_fit_reason(regime: Regime) -> str:
    sizes = len({size_of(cost) for cost in regime.costs})
    ran = f"{sizes} size{'s' if sizes > 1 else ''} ran{regime.with_text}"
    return f"{ran}, and a fit takes {LEAST_SIZES} lengths or numbers of layers"


def no_fit_reason(regime: Regime) -> str | None:
    """Return why there is no fit; None if there is one."""
    return None if regime.fits else _no_fit_reason(regime)


def cell_value(cost: StepCost, quantity: Quantity) -> float | None:
    """Return the value of a cell for a fit, or None. A time must be the median of several steps."""
    match quantity:
        case Quantity.SECONDS:
            return cost.seconds if cost.steps >= _MIN_STEPS else None
        case Quantity.PROCESSOR:
            return cost.cpu_s if cost.steps >= _MIN_STEPS else None
        case Quantity.BYTES:
            return cost.bytes
        case Quantity.NODES:
            return cost.nodes


def _error(cost: StepCost, quantity: Quantity) -> float:
    """Return the error of a value; counted values are exact."""
    errors = {Quantity.SECONDS: cost.error, Quantity.PROCESSOR: cost.cpu_error}
    return max(errors[quantity], _MIN_ERROR) if quantity in errors else 0.0


def size_of(cost: StepCost) -> Size:
    return Size(tokens=cost.tokens, layers=cost.layers)


def sweeps(outcomes: Iterable[Outcome]) -> tuple[Sweep, ...]:
    """Return the sweeps among these runs. Only runs that passed count, one of each size."""
    cells_of: dict[tuple[object, ...], dict[Size, Outcome]] = {}
    for outcome in outcomes:
        if outcome.final and outcome.verdict.status is Status.PASS and outcome.cost is not None:
            cells_of.setdefault(_settings_without_size(outcome), {}).setdefault(size_of(outcome.cost), outcome)
    cells_by_size = ([cells[size] for size in sorted(cells, key=_by_size)] for cells in cells_of.values())
    return tuple(_sweep(cells) for cells in cells_by_size if len(cells) >= LEAST_SIZES)


def with_growth_findings(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes in their order; the largest cell of a sweep with quadratic time gets a finding.

    Applying it twice changes nothing more.
    """
    findings: dict[int, Finding] = {}
    for regime in (regime for sweep in sweeps(outcomes) for regime in sweep.regimes):
        largest = regime.cells[-1]
        square = next((fit for fit in regime.fits if fit.quantity in _TIMES and fit.is_square), None)
        if square is not None and all(finding.code != Cause.QUADRATIC_COST for finding in largest.findings):
            findings[id(largest)] = _quadratic(regime, square)
    return tuple(
        replace(outcome, findings=(*outcome.findings, findings[id(outcome)])) if id(outcome) in findings else outcome
        for outcome in outcomes
    )


_TIMES = (Quantity.SECONDS, Quantity.PROCESSOR)


def _quadratic(regime: Regime, fit: Fit) -> Finding:
    exponent = fit.exponent
    assert exponent is not None
    return make_finding(
        Cause.QUADRATIC_COST,
        {
            "variant": "time",
            "quantity": fit.quantity.value,
            "exponent": exponent.value,
            "exponent_low": exponent.low,
            "exponent_high": exponent.high,
            "tokens_from": regime.first_tokens,
            "tokens_to": regime.last_tokens,
            "implementations": regime.implementations,
        },
        evidence=EvidenceKind.EFFECT,
        proof=tuple(f"{cell.dir}/verdict.json" for cell in regime.cells),
    )


def _by_size(size: Size) -> tuple[int, int]:
    return size.layers, size.tokens


def _settings_without_size(outcome: Outcome) -> tuple[object, ...]:
    """Return the settings that must be equal in a sweep: all but tokens, layers and the number of steps."""
    assert outcome.cost is not None
    settings = tuple(pair for pair in outcome.spec.settings if pair[0] not in (TOKENS, LAYERS, "train.steps"))
    return settings, outcome.spec.ranks, outcome.spec.device, outcome.spec.backend, outcome.cost.batch


def _sweep(cells: Sequence[Outcome]) -> Sweep:
    cells_by_implementations: dict[tuple[str, ...], list[Outcome]] = {}
    for cell in cells:
        assert cell.cost is not None
        cells_by_implementations.setdefault(cell.cost.implementations, []).append(cell)
    common = set.intersection(*(set(implementations) for implementations in cells_by_implementations))
    regimes = (
        Regime(cells=tuple(cells_of), implementations=", ".join(name for name in implementations if name not in common))
        for implementations, cells_of in cells_by_implementations.items()
    )
    return Sweep(cells=tuple(cells), regimes=tuple(sorted(regimes, key=_first)))
