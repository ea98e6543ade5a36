"""Predict the time, memory and graph size of a larger training step from measurements of smaller ones.

The measured sizes (cells) are used for two fits. The first fit is a single power law, by least squares over logarithms.
Its exponent describes how the quantity grew over the measured sizes, but it is not used for predictions: a step has a
constant part, a part that grows with the tokens and perhaps a part that grows with their square, so the exponent itself
grows with the size.

The second fit, which makes the predictions, is a sum of such parts. No part of a time may be negative. Each form of the
sum is fitted without the largest cells and compared with them; among the forms that come close there and at the other
cells, the form with the fewest parts is used. A power law is used if no sum comes close. A prediction is only as
certain as the cells allow: the interval includes a quadratic part that is too small to show in the cells.

On a CPU, only the processor time of a step is such a sum. An operation decides by its size over how many cores it is
spread, so a short step may keep one core busy and a long step all cores. If the cells show this, the processor time is
predicted, and then divided by the number of cores that the largest cells kept busy.

A fit is valid for one implementation. Cells that used another implementation have a fit of their own, and no prediction
crosses from one implementation to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import product
from math import exp, hypot, log, sqrt

from nsa_harness.core.experiment.statistics import student_quantile

CONFIDENCE = 0.95
LEAST_SIZES = 3  # least number of different tokens or layers, because any two points lie on a line
_EXACT = 1e-5  # relative error of a counted quantity
_LEAST_MISS = 0.002  # relative error at which a form counts as good enough
_MANY = 30  # assumed degrees of freedom if the measurement errors explain all residuals
_AS_GOOD = 2.0  # a form is an alternative up to this multiple of the best form's error
_NO_BETTER = 1.2  # of the sums up to this multiple of the best sum's error, the shortest is chosen
_SURE_OF_SQUARE = 1.5  # a straight line with a constant has a smaller exponent
_MORE_CORES = 1.25  # larger steps use more cores if the ratio is above this; other programs cause smaller ratios

TOKENS, LAYERS = "model.seq_len", "model.layers"


class Quantity(StrEnum):
    SECONDS = "time"
    PROCESSOR = "processor time"  # unlike the wall time, not increased by other programs on the machine
    BYTES = "memory"
    NODES = "autograd nodes"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a training step: the number of tokens per sequence and the number of layers."""

    tokens: int
    layers: int

    def half(self) -> Size:
        return replace(self, tokens=self.tokens // 2)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value measured for one size of a training step, with its relative standard error."""

    size: Size
    value: float
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A predicted value together with its confidence interval."""

    value: float
    low: float
    high: float


Term = tuple[int, int]  # exponents of tokens and layers


@dataclass(frozen=True, kw_only=True)
class GrowthForm:
    """A sum of terms in tokens and layers that can be fitted to measured costs, or a power law if `terms` is empty."""

    terms: tuple[Term, ...]

    @property
    def coefficients(self) -> int:
        return len(self.terms) or 2


_POWER = GrowthForm(terms=())
# Exponents of the tokens in each form: a constant part (0), a linear part (1) and a quadratic part (2).
_OVER_ONE = ((0,), (1,), (0, 1), (1, 2), (0, 1, 2))
_AROUND_LAYERS = ((), (0,), (1,), (0, 1))  # embedding, head and loss, once per step
_IN_A_LAYER = ((0,), (1,), (0, 1), (1, 2), (0, 1, 2))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A function of tokens and layers that was fitted to one measured quantity, such as time or memory."""

    quantity: Quantity
    keys: tuple[str, ...]  # which of TOKENS and LAYERS vary
    points: tuple[Point, ...]  # in order of size
    form: GrowthForm
    alternatives: tuple[GrowthForm, ...]  # forms that fit about as well
    processor_fit: Fit | None = None  # the fit of the processor time, if larger steps keep more cores busy

    @cached_property
    def exponent(self) -> Interval | None:
        """The exponent of a power law fitted to the measured points, or None if both tokens and layers vary."""
        if len(self.keys) != 1:
            return None
        _, slope, error = _power(self.points, self.keys[0])
        reach = error.spread * error.reach
        return Interval(value=slope, low=slope - reach, high=slope + reach)

    def predict(self, size: Size) -> Interval:
        """Return the predicted value at this size, with all alternative forms within its interval."""
        if self.processor_fit is not None:
            return self._predict_over_cores(self.processor_fit, size)
        main = _predict_with_form(self.form, self.points, self.keys, size)
        whole = [form for form in _complete_forms(self.keys) if form.coefficients <= len(self.points)]
        rest = [_predict_with_form(form, self.points, self.keys, size) for form in (*self.alternatives, *whole)]
        # A larger step costs no less than the largest measured one.
        largest = self.points[-1]
        least = largest.value * (1 - 3 * largest.error) if _is_within(largest.size, size) else 0.0
        low = min(main.low, max(least, min((one.low for one in rest), default=main.low)))
        return Interval(value=main.value, low=low, high=max(one.high for one in (main, *rest)))

    def spread_over_cores(self, work: Fit) -> Fit:
        """Return a fit of the wall time that accounts for larger steps using more CPU cores."""
        cores = self._cores(work)
        if len(cores) < LEAST_SIZES or min(cores[-2:]) < _MORE_CORES * min(cores):
            return self
        return replace(self, form=work.form, alternatives=work.alternatives, processor_fit=work)

    def _cores(self, work: Fit) -> Sequence[float]:
        if [one.size for one in self.points] != [one.size for one in work.points]:
            return ()
        return [busy.value / time.value for busy, time in zip(work.points, self.points, strict=True)]

    def _predict_over_cores(self, work: Fit, size: Size) -> Interval:
        """Return the predicted wall time, which is the processor time divided by the number of busy cores."""
        cores, largest, whole = self._cores(work), self.points[-1].size, work.predict(size)
        now = (cores[-1] + cores[-2]) / 2
        halves = [one for one, point in zip(cores, self.points, strict=True) if 2 * point.size.tokens <= largest.tokens]
        grew = max(1.0, now / max(halves, default=min(cores)))
        doublings = max(0.0, log(size.tokens / largest.tokens) / log(2))
        return Interval(
            value=whole.value / now, low=whole.low / (now * grew**doublings), high=whole.high / min(cores[-2:])
        )

    @property
    def is_square(self) -> bool:
        """Whether the quantity clearly grows with the square of the number of tokens."""
        exponent = self.exponent
        return self.keys == (TOKENS,) and exponent is not None and exponent.low >= _SURE_OF_SQUARE


def fit_points(quantity: Quantity, points: Iterable[Point]) -> Fit | None:
    """Return a function of tokens and layers fitted to positive values at enough sizes, or None if none fits."""
    by_size = tuple(sorted(points, key=lambda one: (one.size.layers, one.size.tokens)))
    over = _varied_keys(by_size)
    if not over or any(one.value <= 0 for one in by_size):
        return None
    counted = quantity in (Quantity.BYTES, Quantity.NODES)
    few = len(by_size) == LEAST_SIZES  # a power law through so few points has too wide an interval
    known = (form for form in _forms(over) if form.coefficients < len(by_size) and (form.terms or not few))
    forms = [form for form in known if _is_plausible(form, by_size, over, counted)]
    if not forms:
        return None
    misses = {form: miss for form in forms if (miss := _prediction_error(form, by_size, over)) is not None}
    if not misses:
        return None
    scores = {form: miss + _relative_error(form, by_size, by_size, over) for form, miss in misses.items()}
    doubt = max(_LEAST_MISS, *(point.error for point in by_size))
    close = [form for form in scores if scores[form] <= _AS_GOOD * max(min(scores.values()), doubt)]
    sums = [form for form in close if form.terms] or close
    bound = _NO_BETTER * min(scores[form] for form in sums) + _LEAST_MISS
    best = min((form for form in sums if scores[form] <= bound), key=lambda form: (form.coefficients, scores[form]))
    others = tuple(form for form in close if form is not best)
    return Fit(quantity=quantity, keys=over, points=by_size, form=best, alternatives=others)


def _varied_keys(points: Sequence[Point]) -> tuple[str, ...]:
    """Return which of TOKENS and LAYERS take enough different values in `points` for a fit."""
    tokens, layers = ({getattr(point.size, name) for point in points} for name in ("tokens", "layers"))
    if len(tokens) >= LEAST_SIZES and len(layers) >= 2:
        return TOKENS, LAYERS
    alone = [(TOKENS, tokens, layers), (LAYERS, layers, tokens)]
    return tuple(key for key, own, other in alone if len(own) >= LEAST_SIZES and len(other) == 1)


def _forms(over: tuple[str, ...]) -> Iterator[GrowthForm]:
    if over == (LAYERS,):
        yield from (GrowthForm(terms=tuple((0, degree) for degree in degrees)) for degrees in ((0,), (1,), (0, 1)))
    elif over == (TOKENS,):
        yield from (GrowthForm(terms=tuple((degree, 0) for degree in degrees)) for degrees in _OVER_ONE)
    else:
        for around, within in product(_AROUND_LAYERS, _IN_A_LAYER):
            yield GrowthForm(terms=(*((degree, 0) for degree in around), *((degree, 1) for degree in within)))
    if len(over) == 1:
        yield _POWER


def _complete_forms(over: tuple[str, ...]) -> Iterator[GrowthForm]:
    """Yield the form with all possible terms, whose fit widens the confidence interval of a prediction."""
    if TOKENS in over:
        yield GrowthForm(
            terms=((0, 0), (1, 0), (2, 0)) if over == (TOKENS,) else ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1))
        )


def _is_within(one: Size, other: Size) -> bool:
    return one.tokens <= other.tokens and one.layers <= other.layers


def _is_plausible(form: GrowthForm, points: Sequence[Point], over: tuple[str, ...], counted: bool) -> bool:
    """Return whether a fit makes no term negative, except for the constant of a counted quantity."""
    if not form.terms:
        return _power(points, over[0])[1] >= 0
    try:
        if min(_value(form, points, over, point.size) for point in points) <= 0:
            return False
        parts = zip(form.terms, _solve(form, points).coefficients, strict=True)
        return min(part for term, part in parts if not counted or term != (0, 0) or form.coefficients == 1) >= 0
    except ZeroDivisionError:
        return False


def _prediction_error(form: GrowthForm, points: Sequence[Point], over: tuple[str, ...]) -> float | None:
    """Return the error at the largest sizes of a fit to all other points, or None if these are too few."""
    left_out = [number for number in (1, 2) if len(points) - number >= form.coefficients]
    try:
        misses = [_relative_error(form, points[:-number], points[-number:], over) for number in left_out]
    except (ValueError, ZeroDivisionError):
        return None
    return max(misses, default=None)


def _relative_error(form: GrowthForm, known: Sequence[Point], asked: Sequence[Point], over: tuple[str, ...]) -> float:
    """Return the root mean square error of log-values that `form`, fitted to the points `known`, makes at `asked`."""
    away = [log(_value(form, known, over, one.size) / one.value) for one in asked]
    return sqrt(sum(one**2 for one in away) / len(away))


def _value(form: GrowthForm, points: Sequence[Point], over: tuple[str, ...], size: Size) -> float:
    if not form.terms:
        constant, slope, _ = _power(points, over[0])
        return exp(constant + slope * log(_along(over[0], size)))
    solved = _solve(form, points)
    return sum(c * _term(term, size) for c, term in zip(solved.coefficients, form.terms, strict=True))


def _predict_with_form(form: GrowthForm, points: Sequence[Point], over: tuple[str, ...], size: Size) -> Interval:
    value = _value(form, points, over, size)
    if not form.terms:
        sizes = [log(_along(over[0], point.size)) for point in points]
        _, _, error = _power(points, over[0])
        spread = sum((one - sum(sizes) / len(sizes)) ** 2 for one in sizes)
        away = log(_along(over[0], size)) - sum(sizes) / len(sizes)
        off = error.reach * error.spread * hypot(away, sqrt(spread / len(sizes)))
        return Interval(value=value, low=value * exp(-off), high=value * exp(off))
    off = _solve(form, points).error_at([_term(term, size) for term in form.terms])
    return Interval(value=value, low=max(0.0, value - off), high=value + off)


def _along(key: str, size: Size) -> int:
    return size.tokens if key == TOKENS else size.layers


def _term(term: Term, size: Size) -> float:
    return float(size.tokens ** term[0] * size.layers ** term[1])


@dataclass(frozen=True, kw_only=True)
class _Error:
    spread: float
    reach: float


def _error(left: float, freedom: int) -> _Error:
    """Return the standard error for `left`, the sum of squared residuals, and `freedom`, the degrees of freedom."""
    factor = left / max(1, freedom)
    # The residuals are in units of the points' own errors. If these explain them, they are used instead.
    if factor <= 1:
        return _Error(spread=1.0, reach=student_quantile(CONFIDENCE, _MANY))
    return _Error(spread=sqrt(factor), reach=student_quantile(CONFIDENCE, max(1, freedom)))


def _power(points: Sequence[Point], key: str) -> tuple[float, float, _Error]:
    """Fit a power law to the points. Return its constant and exponent in log space, and the error of the exponent."""
    xs, ys = [log(_along(key, point.size)) for point in points], [log(point.value) for point in points]
    middle, level = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - level) for x, y in zip(xs, ys, strict=True)) / spread
    left = sum((y - level - slope * (x - middle)) ** 2 for x, y in zip(xs, ys, strict=True))
    measured = max(_EXACT**2, sum(point.error**2 for point in points) / len(points))
    error = _error(left / measured, len(points) - 2)
    return level - slope * middle, slope, replace(error, spread=error.spread * sqrt(measured / spread))


@dataclass(frozen=True, kw_only=True)
class _Solution:
    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]  # from the measurement errors
    error: _Error  # in units of the measurement errors

    def error_at(self, terms: Sequence[float]) -> float:
        """Return the half-width of the confidence interval for a sum of the given terms."""
        pairs = product(range(len(terms)), repeat=2)
        own = sqrt(max(0.0, sum(terms[i] * self.covariance[i][j] * terms[j] for i, j in pairs)))
        return own * self.error.spread * self.error.reach


def _solve(form: GrowthForm, points: Sequence[Point]) -> _Solution:
    """Fit the coefficients by least squares. Raise ZeroDivisionError if the points cannot distinguish the terms."""
    weights = [1 / (point.value * max(point.error, _EXACT)) for point in points]
    # The columns are scaled, because a squared number of tokens and a constant differ by orders of magnitude.
    scales = [max(_term(term, point.size) for point in points) for term in form.terms]
    rows = [
        [weight * _term(term, point.size) / scale for term, scale in zip(form.terms, scales, strict=True)]
        for weight, point in zip(weights, points, strict=True)
    ]
    wanted = [weight * point.value for weight, point in zip(weights, points, strict=True)]
    inverse = _inverse([[sum(row[i] * row[j] for row in rows) for j in range(len(scales))] for i in range(len(scales))])
    right = [sum(row[i] * y for row, y in zip(rows, wanted, strict=True)) for i in range(len(scales))]
    scaled = [sum(one * y for one, y in zip(line, right, strict=True)) for line in inverse]
    left = sum((sum(map(_times, row, scaled)) - y) ** 2 for row, y in zip(rows, wanted, strict=True))
    covariance = [tuple(one / (scales[i] * scales[j]) for j, one in enumerate(line)) for i, line in enumerate(inverse)]
    coefficients = tuple(one / scale for one, scale in zip(scaled, scales, strict=True))
    return _Solution(
        coefficients=coefficients, covariance=tuple(covariance), error=_error(left, len(points) - len(scales))
    )


def _times(one: float, other: float) -> float:
    return one * other


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the inverse of a matrix. Raise ZeroDivisionError if it is singular."""
    size = len(matrix)
    rows = [[*line, *(float(i == j) for j in range(size))] for i, line in enumerate(matrix)]
    largest = max(abs(one) for line in matrix for one in line)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) <= 1e-12 * largest:
            raise ZeroDivisionError
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [one / rows[column][column] for one in rows[column]]
        for other in range(size):
            if other != column:
                factor = rows[other][column]
                rows[other] = [one - factor * own for one, own in zip(rows[other], rows[column], strict=True)]
    return [line[size:] for line in rows]
