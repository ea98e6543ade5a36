"""What steps cost, in words: the cells of a sweep, how each quantity grows, and what a larger step will cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsa_harness.core.comparison.sweeps import Refused, Regime, Sweep, size_of, unfitted
from nsa_harness.core.fits import LAYERS, TOKENS, Fit, Interval, Quantity, Size
from nsa_harness.core.report import Outcome, StepCost
from nsa_harness.texts import words

COST_HEAD = ("run", "a step:", "processor:", "tokens/s:", "kept for backward:", "autograd nodes:")
_LETTERS = {TOKENS: "T", LAYERS: "L"}
_NOTHING = 0.005  # an exponent that is told as 0.00


def cost_row(cost: StepCost) -> tuple[str, ...]:
    """Of one cell, in the columns behind its name."""
    return (
        words.seconds(cost.seconds),
        words.seconds(cost.cpu_s),
        words.UNKNOWN if cost.tokens_per_s is None else f"{cost.tokens_per_s:.0f}",
        size_text(cost.bytes),
        words.UNKNOWN if cost.nodes is None else str(cost.nodes),
    )


def size_text(amount: float | None) -> str:
    """Below a tenth of a GB with a digit more than elsewhere: a small step's memory is what a sweep begins with."""
    if amount is None or amount >= 99_500_000:
        return words.size(None if amount is None else int(amount))
    return f"{amount / 1e6:.1f} MB"


def fit_lines(sweep: Sweep) -> Iterator[str]:
    """ "Time grows as T^1.1 (1.0 to 1.2), memory as T^1.0, autograd nodes do not grow: from 256 to 2048 tokens."."""
    for regime in sweep.regimes:
        why = unfitted(regime)
        if why is not None:
            yield f"Not fitted: {why}."
            continue
        told = ", ".join(_grows(fit) for fit in regime.fits)
        yield f"{told[:1].upper()}{told[1:]}{_range(regime)}."


def _grows(fit: Fit) -> str:
    verb = "grow" if fit.quantity is Quantity.NODES else "grows"
    exponent = fit.exponent
    if exponent is None:
        return f"{fit.quantity.value} {verb} with tokens and layers"
    if max(abs(exponent.low), abs(exponent.high)) < _NOTHING:
        return f"{fit.quantity.value} {'do' if fit.quantity is Quantity.NODES else 'does'} not grow"
    letter, value = _LETTERS[fit.over[0]], f"{exponent.value:.1f}"
    low, high = f"{exponent.low:.1f}", f"{exponent.high:.1f}"
    doubt = "" if low == high else f" ({low} to {high})"
    return f"{fit.quantity.value} {verb} as {letter}^{value}{doubt}"


def _range(regime: Regime) -> str:
    over = regime.fits[0].over
    layers = sorted(cost.layers for cost in regime.costs)
    of_layers = f"{layers[0]} to {layers[-1]} layers"
    of_tokens = f"{regime.first} to {regime.last} tokens"
    told = of_layers if over == (LAYERS,) else of_tokens if over == (TOKENS,) else f"{of_tokens}, {of_layers}"
    return f", from {told}{regime.by}"


def prediction_lines(size: Size, predicted: Mapping[Quantity, Interval] | Refused) -> Iterator[str]:
    """ "8192 tokens, 2 layers: a step takes 5.2 s (4.8 to 5.6 s), keeps 456 MB (455 to 457 MB) ..."."""
    what = size_words(size)
    if isinstance(predicted, Refused):
        yield f"{what}: not said, because {predicted.reason}"
        return
    yield f"{what}:"
    yield from (f"  {quantity.value}: {interval_text(quantity, one)}" for quantity, one in predicted.items())


def size_words(size: Size) -> str:
    return f"{size.tokens} tokens, {words.plural(size.layers, 'layer')}"


def interval_text(quantity: Quantity, one: Interval) -> str:
    value, low, high = (amount_text(quantity, amount) for amount in (one.value, one.low, one.high))
    return value if low == value == high else f"{value} ({low} to {high})"


def amount_text(quantity: Quantity, amount: float) -> str:
    if quantity in (Quantity.SECONDS, Quantity.PROCESSOR):
        return words.seconds(amount)
    return size_text(amount) if quantity is Quantity.BYTES else f"{amount:.0f}"


def checked_lines(cost: StepCost, told: Mapping[Quantity, tuple[Interval, float]]) -> Iterator[str]:
    """What was predicted of a run that no fit has seen, beside what it cost."""
    yield f"checked at {size_words(size_of(cost))}:"
    for quantity, (one, measured) in told.items():
        miss = one.value / measured - 1
        within = "inside" if one.low <= measured <= one.high else "OUTSIDE"
        yield (
            f"  {quantity.value}: predicted {interval_text(quantity, one)}, measured"
            f" {amount_text(quantity, measured)}: {miss:+.0%}, {within} the interval"
        )


def cells_text(cells: Sequence[Outcome]) -> Iterator[str]:
    """The cells of a sweep as columns, for a terminal."""
    rows = [COST_HEAD, *((cell.spec.scenario, *cost_row(cell.cost)) for cell in cells if cell.cost)]
    widths = [max(len(row[column].rstrip(":")) for row in rows) for column in range(len(COST_HEAD))]
    for name, *numbers in rows:
        told = (one.rstrip(":").rjust(width) for one, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *told))
