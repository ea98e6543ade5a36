"""`fit`: predict the cost of a larger step from stored sweeps, and check the prediction with a run at half its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_harness.core.comparison.sweeps import Refused, Sweep, measured, size_of, sweeps
from nsa_harness.core.fits import LAYERS, Interval, Quantity, Size
from nsa_harness.core.report import Outcome
from nsa_harness.errors import UsageError
from nsa_harness.render.costs import cells_text, checked_lines, fit_lines, interval_text, prediction_lines, size_words
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.supervisor.storage.rundir import find_run

_MAX_BYTES = 256 << 20
BORNE_OUT, CONTRADICTED, REFUSED = 0, 1, 125
_CHECK_STEPS = 7


@dataclass(frozen=True, kw_only=True)
class RequestedSize:
    """The size to predict; None: as in the largest cell of the sweep."""

    tokens: int | None
    layers: int | None


@dataclass(kw_only=True)
class Answer:
    """The lines to print, and the exit code."""

    lines: list[str]
    code: int = BORNE_OUT


def fit(stored: Sequence[Path], requested: RequestedSize, parent: Path) -> Answer:
    """Fit each sweep in the stored runs, and predict the requested size. Raises UsageError if there is no sweep."""
    named: Sequence[Path | None] = stored or (None,)
    outcomes = [outcome for path in named for outcome in _outcomes(path, parent)]
    fitted = sweeps(outcomes)
    if not fitted:
        raise UsageError(
            "no three passed runs here differ in model.seq_len or model.layers alone; make some:"
            " nsa-harness run sweep_seq_len, and for the production shape nsa-harness run sweep_production"
        )
    answer = Answer(lines=[])
    for sweep in fitted:
        _add_sweep(sweep, requested, answer)
    return answer


def _outcomes(path: Path | None, parent: Path) -> Sequence[Outcome]:
    run = find_run(path, parent)
    text = run.door.whole(run.path / "report.json", _MAX_BYTES).decode("utf-8")
    return from_json(text, str(run.path / "report.json")).outcomes


def _add_sweep(sweep: Sweep, requested: RequestedSize, answer: Answer) -> None:
    """Append the sweep's cells and fit to the answer, and the prediction if a size was requested.

    If the sweep has a cell at half the requested size, that cell is left out of the fit and checks its prediction;
    otherwise the answer names the run that would.
    """
    size = _size(sweep, requested)
    half = None if size is None else _half(sweep, size)
    check = next((cell for cell in sweep.cells if cell.cost and size_of(cell.cost) == half), None)
    # A cell can only check the fit if the other cells are still a sweep without it.
    left = next(iter(sweeps([cell for cell in sweep.cells if cell is not check])), None) if check else None
    fitted = sweep if left is None else left
    answer.lines += ["", *cells_text(sweep.cells), "", *fit_lines(fitted)]
    if size is None or half is None:
        return
    predicted = fitted.predicted(size)
    answer.lines += ["", *prediction_lines(size, predicted)]
    if isinstance(predicted, Refused):
        answer.code = max(answer.code, REFUSED)
    elif left is not None and check is not None:
        _check(left, check, answer)
    else:
        answer.lines += _to_check(fitted, half)


def _size(sweep: Sweep, requested: RequestedSize) -> Size | None:
    """Return the size to predict, or None if no size was requested."""
    if requested.tokens is None and requested.layers is None:
        return None
    cost = sweep.cells[-1].cost
    assert cost is not None
    return Size(tokens=requested.tokens or cost.tokens, layers=requested.layers or cost.layers)


def _half(sweep: Sweep, size: Size) -> Size:
    """Return the size with half the layers if the sweep varies layers, else with half the tokens."""
    regime = sweep.regimes[-1]
    over = regime.fits[0].over if regime.fits else ()
    return Size(tokens=size.tokens, layers=max(1, size.layers // 2)) if over == (LAYERS,) else size.halved()


def _check(sweep: Sweep, check: Outcome, answer: Answer) -> None:
    """Compare the sweep's prediction for the size of `check` with its measurements."""
    cost = check.cost
    assert cost is not None
    predicted = sweep.predicted(size_of(cost))
    if isinstance(predicted, Refused):
        answer.lines += [f"the run of {size_words(size_of(cost))} checks nothing, because {predicted.reason}"]
        answer.code = max(answer.code, REFUSED)
        return
    measurements = {
        quantity: (interval, value) for quantity, interval in predicted.items() if (value := measured(cost, quantity))
    }
    answer.lines += ["", *checked_lines(cost, measurements)]
    if any(not interval.low <= value <= interval.high for interval, value in measurements.values()):
        answer.code = max(answer.code, CONTRADICTED)


def _to_check(sweep: Sweep, half: Size) -> Iterator[str]:
    """Yield the command of the run at half the size, and how long a step of it should take."""
    predicted: Mapping[Quantity, Interval] | Refused = sweep.predicted(half)
    name = sweep.cells[-1].spec.scenario.partition("@")[0]
    keys = f"--matrix model.seq_len={half.tokens} --matrix model.layers={half.layers} train.steps={_CHECK_STEPS}"
    yield ""
    if isinstance(predicted, Refused) or Quantity.SECONDS not in predicted:
        step_text = ""
    else:
        step_text = f", a step of {interval_text(Quantity.SECONDS, predicted[Quantity.SECONDS])}"
    yield f"check it at half the size, {size_words(half)}{step_text}, then name both runs to `nsa-harness fit`:"
    yield f"  nsa-harness run {name} {keys}"
