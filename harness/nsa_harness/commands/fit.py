"""`nsa-harness fit`: predict the cost of a larger training step from stored runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_harness.core.comparison.sweeps import NoPrediction, Sweep, cell_value, size_of, sweeps
from nsa_harness.core.fits import LAYERS, Interval, Quantity, Size
from nsa_harness.core.report import Outcome
from nsa_harness.errors import UsageError
from nsa_harness.render.costs import cells_text, checked_lines, fit_lines, interval_text, prediction_lines, size_words
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.supervisor.storage.rundir import find_run

_MAX_BYTES = 256 << 20
CONFIRMED, CONTRADICTED, REFUSED = 0, 1, 125  # exit codes
_CHECK_STEPS = 7


@dataclass(frozen=True, kw_only=True)
class RequestedSize:
    """The size of the training step to predict. A field that is None is copied from the largest stored run."""

    tokens: int | None
    layers: int | None


@dataclass(kw_only=True)
class Answer:
    """The result of `nsa-harness fit`: the lines to print, and the exit code to return."""

    lines: list[str]
    code: int = CONFIRMED


def fit(run_paths: Sequence[Path], size: RequestedSize, parent: Path) -> Answer:
    """Predict the cost of a larger step from stored runs (default: the latest). Raise UsageError without a sweep."""
    paths: Sequence[Path | None] = run_paths or (None,)
    outcomes = [outcome for path in paths for outcome in _outcomes(path, parent)]
    found_sweeps = sweeps(outcomes)
    if not found_sweeps:
        raise UsageError(
            "no sweep: a fit needs three passed runs that differ only in model.seq_len or model.layers; run"
            " `nsa-harness run sweep_seq_len`, or `nsa-harness run sweep_production` for the production shape"
        )
    answer = Answer(lines=[])
    for sweep in found_sweeps:
        _add_sweep(sweep, size, answer)
    return answer


def _outcomes(path: Path | None, parent: Path) -> Sequence[Outcome]:
    run = find_run(path, parent)
    text = run.directory.read_whole_file(run.path / "report.json", _MAX_BYTES).decode("utf-8")
    return from_json(text, str(run.path / "report.json")).outcomes


def _add_sweep(sweep: Sweep, requested_size: RequestedSize, answer: Answer) -> None:
    """Add a sweep's measurements, fit and prediction, checked by a run at half the size if there is one."""
    size = _size(sweep, requested_size)
    half = None if size is None else _half(sweep, size)
    check = next((cell for cell in sweep.cells if cell.cost and size_of(cell.cost) == half), None)
    # A run can check the fit only if the other runs are still a sweep without it.
    without_check = next(iter(sweeps([cell for cell in sweep.cells if cell is not check])), None) if check else None
    fitted_sweep = sweep if without_check is None else without_check
    answer.lines += ["", *cells_text(sweep.cells), "", *fit_lines(fitted_sweep)]
    if size is None or half is None:
        return
    prediction = fitted_sweep.predict(size)
    answer.lines += ["", *prediction_lines(size, prediction)]
    if isinstance(prediction, NoPrediction):
        answer.code = max(answer.code, REFUSED)
    elif without_check is not None and check is not None:
        _check(without_check, check, answer)
    else:
        answer.lines += _check_command(fitted_sweep, half)


def _size(sweep: Sweep, requested_size: RequestedSize) -> Size | None:
    if requested_size.tokens is None and requested_size.layers is None:
        return None
    cost = sweep.cells[-1].cost
    assert cost is not None
    return Size(tokens=requested_size.tokens or cost.tokens, layers=requested_size.layers or cost.layers)


def _half(sweep: Sweep, size: Size) -> Size:
    """Return `size` with half the layers if the sweep varies the layers, or else with half the tokens."""
    regime = sweep.regimes[-1]
    over = regime.fits[0].keys if regime.fits else ()
    return Size(tokens=size.tokens, layers=max(1, size.layers // 2)) if over == (LAYERS,) else size.half()


def _check(sweep: Sweep, check: Outcome, answer: Answer) -> None:
    """Compare the measurements of the run `check` with the prediction from the sweep."""
    cost = check.cost
    assert cost is not None
    prediction = sweep.predict(size_of(cost))
    if isinstance(prediction, NoPrediction):
        answer.lines += [f"the run of {size_words(size_of(cost))} cannot check the fit: {prediction.reason}"]
        answer.code = max(answer.code, REFUSED)
        return
    measurements = {
        quantity: (interval, value)
        for quantity, interval in prediction.items()
        if (value := cell_value(cost, quantity))
    }
    answer.lines += ["", *checked_lines(cost, measurements)]
    if any(not interval.low <= value <= interval.high for interval, value in measurements.values()):
        answer.code = max(answer.code, CONTRADICTED)


def _check_command(sweep: Sweep, half: Size) -> Iterator[str]:
    """Yield lines with the command that checks the prediction at the size `half`."""
    prediction: Mapping[Quantity, Interval] | NoPrediction = sweep.predict(half)
    name = sweep.cells[-1].spec.scenario.partition("@")[0]
    keys = f"--matrix model.seq_len={half.tokens} --matrix model.layers={half.layers} train.steps={_CHECK_STEPS}"
    yield ""
    if isinstance(prediction, NoPrediction) or Quantity.SECONDS not in prediction:
        step_text = ""
    else:
        step_text = f" (expected: {interval_text(Quantity.SECONDS, prediction[Quantity.SECONDS])} per step)"
    yield f"to check the prediction, run half the size, {size_words(half)}{step_text},"
    yield "and then give both runs to `nsa-harness fit`:"
    yield f"  nsa-harness run {name} {keys}"
