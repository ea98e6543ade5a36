"""Costs of steps in words: the runs of a sweep, how each quantity grows, and the prediction for a larger step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsa_harness.core.comparison.sweeps import Refused, Regime, Sweep, size_of, why_no_fit
from nsa_harness.core.fits import LAYERS, TOKENS, Fit, Interval, Quantity, Size
from nsa_harness.core.report import Outcome, StepCost
from nsa_harness.texts import words

COST_HEAD = ("run", "a step:", "processor:", "tokens/s:", "kept for backward:", "autograd nodes:")
_LETTERS = {TOKENS: "T", LAYERS: "L"}
_FLAT = 0.005  # an exponent below it rounds to 0.00: the quantity does not grow


def cost_row(cost: StepCost) -> tuple[str, ...]:
    """Return the cells of a run after its name."""
    return (
        words.seconds(cost.seconds),
        words.seconds(cost.cpu_s),
        words.UNKNOWN if cost.tokens_per_s is None else f"{cost.tokens_per_s:.0f}",
        words.size(cost.bytes, tenths=True),
        words.UNKNOWN if cost.nodes is None else str(cost.nodes),
    )


def fit_lines(sweep: Sweep) -> Iterator[str]:
    """Yield "Time grows as T^1.1 (1.0 to 1.2), autograd nodes do not grow, from 256 to 2048 tokens."."""
    for regime in sweep.regimes:
        reason = why_no_fit(regime)
        if reason is not None:
            yield f"Not fitted: {reason}."
            continue
        text = ", ".join(_grows(fit) for fit in regime.fits)
        yield f"{text[:1].upper()}{text[1:]}{_range(regime)}."


def _grows(fit: Fit) -> str:
    verb = "grow" if fit.quantity is Quantity.NODES else "grows"
    exponent = fit.exponent
    if exponent is None:
        return f"{fit.quantity.value} {verb} with tokens and layers"
    if max(abs(exponent.low), abs(exponent.high)) < _FLAT:
        return f"{fit.quantity.value} {'do' if fit.quantity is Quantity.NODES else 'does'} not grow"
    letter, value = _LETTERS[fit.over[0]], f"{exponent.value:.1f}"
    low, high = f"{exponent.low:.1f}", f"{exponent.high:.1f}"
    interval = "" if low == high else f" ({low} to {high})"
    return f"{fit.quantity.value} {verb} as {letter}^{value}{interval}"


def _range(regime: Regime) -> str:
    over = regime.fits[0].over
    layers = sorted(cost.layers for cost in regime.costs)
    of_layers = f"{layers[0]} to {layers[-1]} layers"
    of_tokens = f"{regime.first} to {regime.last} tokens"
    sizes = of_layers if over == (LAYERS,) else of_tokens if over == (TOKENS,) else f"{of_tokens}, {of_layers}"
    return f", from {sizes}{regime.by}"


def prediction_lines(size: Size, predicted: Mapping[Quantity, Interval] | Refused) -> Iterator[str]:
    """Yield the predicted cost of a step of this size, a line for each quantity, or why it is not predicted."""
    label = size_words(size)
    if isinstance(predicted, Refused):
        yield f"{label}: not said, because {predicted.reason}"
        return
    yield f"{label}:"
    yield from (f"  {quantity.value}: {interval_text(quantity, interval)}" for quantity, interval in predicted.items())


def size_words(size: Size) -> str:
    return f"{size.tokens} tokens, {words.plural(size.layers, 'layer')}"


def interval_text(quantity: Quantity, interval: Interval) -> str:
    value, low, high = (amount_text(quantity, amount) for amount in (interval.value, interval.low, interval.high))
    return value if low == value == high else f"{value} ({low} to {high})"


def amount_text(quantity: Quantity, amount: float) -> str:
    if quantity in (Quantity.SECONDS, Quantity.PROCESSOR):
        return words.seconds(amount)
    return words.size(amount, tenths=True) if quantity is Quantity.BYTES else f"{amount:.0f}"


def checked_lines(cost: StepCost, checks: Mapping[Quantity, tuple[Interval, float]]) -> Iterator[str]:
    """Yield prediction and measurement of a run that is in no fit."""
    yield f"checked at {size_words(size_of(cost))}:"
    for quantity, (interval, measured) in checks.items():
        miss = interval.value / measured - 1
        within = "inside" if interval.low <= measured <= interval.high else "OUTSIDE"
        yield (
            f"  {quantity.value}: predicted {interval_text(quantity, interval)}, measured"
            f" {amount_text(quantity, measured)}: {miss:+.0%}, {within} the interval"
        )


def cells_text(cells: Sequence[Outcome]) -> Iterator[str]:
    """Yield the runs of a sweep as columns, for a terminal."""
    rows = [COST_HEAD, *((cell.spec.scenario, *cost_row(cell.cost)) for cell in cells if cell.cost)]
    widths = [max(len(row[column].rstrip(":")) for row in rows) for column in range(len(COST_HEAD))]
    for name, *numbers in rows:
        columns = (cell.rstrip(":").rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *columns))
