"""Measure the accuracy of predicting the cost of long sequences from shorter ones.

    python benchmarks/fits.py                    measure every implementation, into benchmarks/results/fits.json
    python benchmarks/fits.py --only vanilla     measure one implementation and keep the results of the others
    python benchmarks/fits.py --again            fit the recorded points again with the current code
    python benchmarks/fits.py --table            print the recorded results as Markdown

Real runs of the scenario sweep_seq_len with shape ci, two layers, one sequence and float32, from 256 to 2048 tokens,
are fitted by nsa-harness. The prediction for 8192 tokens is compared with a run of that length. Each implementation is
fitted on its own: NSA with the blockwise kernel (used on a CPU from 1024 tokens on, so its fit starts there), vanilla
attention, and the selected branch as a loop over tokens. Refused predictions are recorded as well, for example that of
NSA from its short runs only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from nsa_harness.core.comparison.sweeps import NoPrediction, cell_value, size_of, sweeps  # noqa: E402
from nsa_harness.core.fits import Quantity  # noqa: E402
from nsa_harness.core.outcome.outcome import skipped_outcome  # noqa: E402
from nsa_harness.core.plan import Skip  # noqa: E402
from nsa_harness.core.report import Outcome, Status, StepCost  # noqa: E402
from nsa_harness.render.documents.report_json import from_json  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "fits.json"
LENGTHS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048)
TARGET = 8192
LAYERS = 2
# Allowed relative errors. Counts are reproducible; times vary with the other load of the machine.
LIMITS = {Quantity.SECONDS: 0.15, Quantity.PROCESSOR: 0.15, Quantity.BYTES: 0.05, Quantity.NODES: 0.05}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One attention implementation, with the scenario settings that select it."""

    name: str
    keys: tuple[str, ...]
    steps: int
    target_steps: int


SIDES = (
    Side(name="nsa", keys=(), steps=17, target_steps=9),
    Side(name="vanilla", keys=("model.attention=vanilla",), steps=17, target_steps=9),
    Side(name="per_token", keys=("model.impl=per_token",), steps=7, target_steps=5),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[side.name for side in SIDES])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"sides": {}}
    if arguments.again:
        for side in results["sides"].values():
            side |= compare_fit_with_truth(
                [_outcome_from_cost(cell) for cell in side["cells"]], _outcome_from_cost(side["truth"])
            )
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    elif not arguments.table:
        sides = [side for side in SIDES if arguments.only in (None, side.name)]
        results["sides"] |= {side.name: measure_side(side) for side in sides}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results)))
    return 1 if any(side["over_limit"] for side in results["sides"].values()) else 0


def measure_side(side: Side) -> dict[str, Any]:
    """Measure one implementation, and compare its predicted cost with its measured cost."""
    context = measurement_context(__file__, sys.argv[1:])
    cells = [run(side.keys, tokens, side.steps) for tokens in LENGTHS]
    truth = run(side.keys, TARGET, side.target_steps)
    settings = {"layers": LAYERS, "target_tokens": TARGET, "load_1min_after": os.getloadavg()[0]}
    return {**context, **settings, **compare_fit_with_truth(cells, truth)}


def run(keys: Sequence[str], tokens: int, steps: int) -> Outcome:
    """Train with sequences of `tokens` tokens. Raise SystemExit if the run does not pass."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "nsa_harness", "run", "sweep_seq_len", "--out", folder),
            *("--matrix", f"model.seq_len={tokens}"),
            *(f"model.layers={LAYERS}", f"train.steps={steps}", *keys),
        ]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        reports = sorted(Path(folder).glob("*/report.json"))
        if result.returncode or not reports:
            raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        return from_json(reports[-1].read_text(encoding="utf-8")).outcomes[0]


def _outcome_from_cost(cell: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a passed run with the recorded cost `cell`."""
    cost = StepCost(**{**cell, "implementations": tuple(cell["implementations"])})
    plain = skipped_outcome(Skip(scenario=f"sweep_seq_len@model.seq_len={cost.tokens}", about="", reason=""))
    return replace(
        plain, cost=cost, spec=replace(plain.spec, device="cpu"), verdict=replace(plain.verdict, status=Status.PASS)
    )


def compare_fit_with_truth(cells: Sequence[Outcome], truth: Outcome) -> dict[str, Any]:
    """Fit the costs of short runs, and compare the prediction with the measured cost of a long run.

    Runs at the shortest lengths may use another implementation. They are fitted separately, to record why their
    prediction is refused.
    """
    assert truth.cost is not None
    size = size_of(truth.cost)
    (sweep,) = sweeps(cells)
    last = sweep.regimes[-1]
    prediction = sweep.predict(size)
    short = [cell for cell in cells if cell not in last.cells]
    refusals = [refusal.predict(size) for refusal in sweeps(short)]
    comparisons = (
        {}
        if isinstance(prediction, NoPrediction)
        else {str(key): compare_prediction(key, value, truth) for key, value in prediction.items()}
    )
    return {
        "cells": [_cell(cell) for cell in cells],
        "truth": _cell(truth),
        "fitted_from": last.first,
        "same_implementation": truth.cost.implementations == last.costs[-1].implementations,
        "fits": {str(fit.quantity): _fit(fit) for fit in last.fits},
        "predicted": comparisons,
        "refused": [refusal.reason for refusal in (prediction, *refusals) if isinstance(refusal, NoPrediction)],
        "over_limit": [key for key, value in comparisons.items() if abs(value["miss"]) > value["limit"]],
    }


def compare_prediction(quantity: Quantity, prediction: Any, truth: Outcome) -> dict[str, Any]:
    """Return the predicted value and the measured value of a quantity, and the relative error."""
    assert truth.cost is not None
    value = cell_value(truth.cost, quantity)
    assert value is not None, f"the run of {TARGET} tokens has no {quantity}"
    return {
        **asdict(prediction),
        "measured": value,
        "miss": prediction.value / value - 1,
        "limit": LIMITS[quantity],
        "inside": prediction.low <= value <= prediction.high,
    }


def _fit(fit: Any) -> dict[str, Any]:
    return {"terms": [f"T^{degree}" for degree, _ in fit.form.terms] or ["power"], "exponent": asdict(fit.exponent)}


def _cell(cell: Outcome) -> dict[str, Any]:
    assert cell.cost is not None
    return asdict(cell.cost)


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a Markdown table of the predicted costs and their errors."""
    lines = ["| | | from T | grows as | form | predicted (95 %) | measured | miss |", "| --- " * 8 + "|"]
    for name, side in result["sides"].items():
        for key, row in side["predicted"].items():
            fit = side["fits"][key]
            exponent = fit["exponent"]
            lines.append(
                f"| {name} | {key} | {side['fitted_from']} | T^{exponent['value']:.2f} ({exponent['low']:.2f} to"
                f" {exponent['high']:.2f}) | {' + '.join(fit['terms'])} | {row['value']:.5g} ({row['low']:.5g} to"
                f" {row['high']:.5g}) | {row['measured']:.5g} | {row['miss']:+.1%} |"
            )
        lines += [f"| {name} | refused | | {reason} | | | | |" for reason in side["refused"]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
