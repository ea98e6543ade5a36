"""Text about the cost of a training step: the cost table, its growth with size, and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsa_harness.core.comparison.sweeps import NoPrediction, Regime, Sweep, no_fit_reason, size_of
from nsa_harness.core.fits import LAYERS, TOKENS, Fit, Interval, Quantity, Size
from nsa_harness.core.report import Outcome, StepCost
from nsa_harness.texts import words

COST_HEAD = ("run", "time per step:", "CPU time:", "tokens/s:", "saved for backward:", "autograd nodes:")
_LETTERS = {TOKENS: "T", LAYERS: "L"}
_FLAT = 0.005  # a smaller exponent is shown as "does not grow", because it would be rounded to 0.00


def cost_row(cost: StepCost) -> tuple[str, ...]:
    """Return the cells of the cost table for one run, without the name of the run."""
    return (
        words.seconds(cost.seconds),
        words.seconds(cost.cpu_s),
        words.UNKNOWN if cost.tokens_per_s is None else f"{cost.tokens_per_s:.0f}",
        words.size(cost.bytes, tenths=True),
        words.UNKNOWN if cost.nodes is None else str(cost.nodes),
    )


def fit_lines(sweep: Sweep) -> Iterator[str]:
    """Yield sentences about growth: "Time grows as T^1.1 (1.0 to 1.2), from 256 to 2048 tokens" and so on."""
    for regime in sweep.regimes:
        reason = no_fit_reason(regime)
        if reason is not None:
            yield f"Not fitted: {reason}."
            continue
        text = ", ".join(_grows(fit) for fit in regime.fits)
        yield f"{text[:1].upper()}{text[1:]}{_range(regime)}."


def _grows(fit: Fit) -> str:
    """Describe the growth of one quantity, such as "time grows as T^1.1 (1.0 to 1.2)" for T tokens."""
    verb = "grow" if fit.quantity is Quantity.NODES else "grows"
    exponent = fit.exponent
    if exponent is None:
        return f"{fit.quantity.value} {verb} with tokens and layers"
    if max(abs(exponent.low), abs(exponent.high)) < _FLAT:
        return f"{fit.quantity.value} {'do' if fit.quantity is Quantity.NODES else 'does'} not grow"
    letter, value = _LETTERS[fit.keys[0]], f"{exponent.value:.1f}"
    low, high = f"{exponent.low:.1f}", f"{exponent.high:.1f}"
    interval = "" if low == high else f" ({low} to {high})"
    return f"{fit.quantity.value} {verb} as {letter}^{value}{interval}"


def _range(regime: Regime) -> str:
    """Return the range of sizes to which a curve was fitted, such as ", from 256 to 2048 tokens"."""
    over = regime.fits[0].keys
    layers = sorted(cost.layers for cost in regime.costs)
    of_layers = f"{layers[0]} to {layers[-1]} layers"
    of_tokens = f"{regime.first_tokens} to {regime.last_tokens} tokens"
    sizes = of_layers if over == (LAYERS,) else of_tokens if over == (TOKENS,) else f"{of_tokens}, {of_layers}"
    return f", from {sizes}{regime.with_text}"


def prediction_lines(size: Size, prediction: Mapping[Quantity, Interval] | NoPrediction) -> Iterator[str]:
    """Yield the predicted cost of a training step, or the reason why no prediction is possible."""
    label = size_words(size)
    if isinstance(prediction, NoPrediction):
        yield f"{label}: no prediction, because {prediction.reason}"
        return
    yield f"{label}:"
    yield from (f"  {quantity.value}: {interval_text(quantity, interval)}" for quantity, interval in prediction.items())


def size_words(size: Size) -> str:
    """Return the size of a training step as text, such as "2048 tokens, 4 layers"."""
    return f"{size.tokens} tokens, {words.plural(size.layers, 'layer')}"


def interval_text(quantity: Quantity, interval: Interval) -> str:
    """Return a value with its lower and upper bounds, such as "1.4 s (1.3 s to 1.5 s)"."""
    value, low, high = (amount_text(quantity, amount) for amount in (interval.value, interval.low, interval.high))
    return value if low == value == high else f"{value} ({low} to {high})"


def amount_text(quantity: Quantity, amount: float) -> str:
    """Return an amount with the unit of the quantity."""
    if quantity in (Quantity.SECONDS, Quantity.PROCESSOR):
        return words.seconds(amount)
    return words.size(amount, tenths=True) if quantity is Quantity.BYTES else f"{amount:.0f}"


def checked_lines(cost: StepCost, checks: Mapping[Quantity, tuple[Interval, float]]) -> Iterator[str]:
    """Yield lines that compare the prediction of each quantity with its measured value."""
    yield f"checked at {size_words(size_of(cost))}:"
    for quantity, (interval, measurement) in checks.items():
        error = interval.value / measurement - 1
        position = "inside" if interval.low <= measurement <= interval.high else "OUTSIDE"
        yield (
            f"  {quantity.value}: predicted {interval_text(quantity, interval)}, measured"
            f" {amount_text(quantity, measurement)}: {error:+.0%}, {position} the interval"
        )


def cells_text(cells: Sequence[Outcome]) -> Iterator[str]:
    """Yield a table of the costs of several runs, as aligned lines for the terminal."""
    rows = [COST_HEAD, *((cell.spec.scenario, *cost_row(cell.cost)) for cell in cells if cell.cost)]
    widths = [max(len(row[column].rstrip(":")) for row in rows) for column in range(len(COST_HEAD))]
    for name, *numbers in rows:
        columns = (cell.rstrip(":").rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *columns))
