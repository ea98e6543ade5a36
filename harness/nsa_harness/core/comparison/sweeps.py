"""Fit the cost of a training step over runs of different sizes, and predict the cost for other sizes.

The runs differ only in tokens and layers. Each run records which implementations of its operators ran. If they change
within a sweep, each group of runs with the same implementations has its own fit. No prediction is made for a size at
which other implementations may run.
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

_MIN_STEPS = 3  # a median time needs at least this many measured steps, not counting the first
_MIN_ERROR = 0.02  # minimum relative error of a time, because a slow machine affects all steps of a run


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The runs of a sweep that used the same implementations of operators."""

    cells: tuple[Outcome, ...]  # in order of their sizes
    implementations: str  # those that other cells of the sweep do not have; empty if all cells have the same

    @property
    def costs(self) -> tuple[StepCost, ...]:
        """The measured step costs, in order of size."""
        return tuple(cell.cost for cell in self.cells if cell.cost is not None)

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        """The cost as a function of size, fitted for each quantity with enough measured points."""
        fit_by_quantity = {quantity: fit_points(quantity, self._points(quantity)) for quantity in Quantity}
        time, cpu = fit_by_quantity[Quantity.SECONDS], fit_by_quantity[Quantity.PROCESSOR]
        if time is not None and cpu is not None and self.cells[0].spec.device == "cpu":
            fit_by_quantity[Quantity.SECONDS] = time.spread_over_cores(cpu)
        return tuple(fit for fit in fit_by_quantity.values() if fit is not None)

    def _points(self, quantity: Quantity) -> Sequence[Point]:
        """Return the measured points of one quantity. The result is empty if a run lacks the value."""
        values = [(cost, cell_value(cost, quantity)) for cost in self.costs]
        points = [
            Point(size=size_of(cost), value=value, error=_error(cost, quantity)) for cost, value in values if value
        ]
        return points if len(points) == len(values) else ()

    @property
    def first_tokens(self) -> int:
        """The smallest number of tokens in these runs."""
        return min(cost.tokens for cost in self.costs)

    @property
    def last_tokens(self) -> int:
        """The largest number of tokens in these runs."""
        return max(cost.tokens for cost in self.costs)

    @property
    def until_tokens(self) -> int | None:
        """The number of tokens at which other implementations take over, or None if it is unknown."""
        return min((cost.until_tokens for cost in self.costs if cost.until_tokens is not None), default=None)

    @property
    def with_text(self) -> str:
        """The implementations as a string " with X", or "" if they are the same in the whole sweep."""
        return f" with {self.implementations}" if self.implementations else ""


@dataclass(frozen=True, kw_only=True)
class NoPrediction:
    """The reason why the cost of a step cannot be predicted."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A group of runs that differ only in their numbers of tokens and layers."""

    cells: tuple[Outcome, ...]
    regimes: tuple[Regime, ...]  # in order of their smallest numbers of tokens

    def predict(self, size: Size) -> Mapping[Quantity, Interval] | NoPrediction:
        """Return the predicted cost of a step of this size, or the reason why it cannot be predicted."""
        regime = max(
            (candidate for candidate in self.regimes if candidate.first_tokens <= size.tokens), key=_first, default=None
        )
        if regime is None:
            return NoPrediction(
                reason=f"the smallest run has {self.regimes[0].first_tokens} tokens, and nothing is known below that"
            )
        next_regime = min(
            (candidate for candidate in self.regimes if candidate.first_tokens > size.tokens), key=_first, default=None
        )
        if regime.until_tokens is not None and size.tokens >= regime.until_tokens:
            return NoPrediction(
                reason=f"the runs up to {regime.last_tokens} tokens ran {_implementation_text(regime)}, and from"
                f" {regime.until_tokens} tokens another implementation runs: measure three lengths above that"
            )
        if next_regime is not None and size.tokens > regime.last_tokens and regime.until_tokens is None:
            below = f"up to {regime.last_tokens} tokens the runs ran{regime.with_text}"
            above = f"from {next_regime.first_tokens} tokens{next_regime.with_text}"
            return NoPrediction(reason=f"{below}, {above}, and where in between it changes is not known")
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
    return f"{ran}, and a fit needs {LEAST_SIZES} lengths or numbers of layers"


def no_fit_reason(regime: Regime) -> str | None:
    """Return the reason why no cost was fitted to these runs, or None if one was fitted."""
    return None if regime.fits else _no_fit_reason(regime)


def cell_value(cost: StepCost, quantity: Quantity) -> float | None:
    """Return the measured value of one quantity, or None if too few steps were measured."""
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
    """Return the relative measurement error of one quantity. It is 0 for quantities that are counted."""
    errors = {Quantity.SECONDS: cost.error, Quantity.PROCESSOR: cost.cpu_error}
    return max(errors[quantity], _MIN_ERROR) if quantity in errors else 0.0


def size_of(cost: StepCost) -> Size:
    return Size(tokens=cost.tokens, layers=cost.layers)


def sweeps(outcomes: Iterable[Outcome]) -> tuple[Sweep, ...]:
    """Return the groups of passing runs that differ only in their numbers of tokens and layers."""
    cells_of: dict[tuple[object, ...], dict[Size, Outcome]] = {}
    for outcome in outcomes:
        if outcome.final and outcome.verdict.status is Status.PASS and outcome.cost is not None:
            cells_of.setdefault(_settings_without_size(outcome), {}).setdefault(size_of(outcome.cost), outcome)
    cells_by_size = ([cells[size] for size in sorted(cells, key=_by_size)] for cells in cells_of.values())
    return tuple(_sweep(cells) for cells in cells_by_size if len(cells) >= LEAST_SIZES)


def with_growth_findings(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes, with a finding for each sweep whose step time grows quadratically with the tokens.

    The finding belongs to the largest run of each sweep. Calling this function again with its result adds nothing.
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
    """Return the settings of a run except its tokens, layers and number of steps."""
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
