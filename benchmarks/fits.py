"""Does the fit of a sweep meet what a step of four times the length costs? Measured points, predictions, and the truth.

    python benchmarks/fits.py                    every implementation, into benchmarks/results/fits.json
    python benchmarks/fits.py --only vanilla     one of them anew, beside what is recorded of the others
    python benchmarks/fits.py --again            what is recorded, fitted once more by the code as it stands
    python benchmarks/fits.py --table            what is recorded, as Markdown

Shape ci with two layers, one sequence, float32: real runs of the scenario sweep_seq_len from 256 to 2048 tokens, the
fit of the harness, and a run of 8192 tokens that it has not seen. Each implementation for itself: NSA by blocks (which
a CPU takes from 1024 tokens on, so that its fit begins there), the vanilla control, and the selected branch as a loop
over tokens. What the fit refuses is recorded as well: NSA from its short cells alone.
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

from benchmarks.provenance import circumstances  # noqa: E402
from nsa_harness.core.comparison.sweeps import Refused, measured, size_of, sweeps  # noqa: E402
from nsa_harness.core.fits import Quantity  # noqa: E402
from nsa_harness.core.outcome.outcome import skipped  # noqa: E402
from nsa_harness.core.plan import Skip  # noqa: E402
from nsa_harness.core.report import Outcome, Status, StepCost  # noqa: E402
from nsa_harness.render.documents.report_json import from_json  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "fits.json"
LENGTHS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048)
TARGET = 8192
LAYERS = 2
# By how much a prediction may be off. What is counted repeats exactly; a time is one of a machine with other work.
LIMITS = {Quantity.SECONDS: 0.15, Quantity.PROCESSOR: 0.15, Quantity.BYTES: 0.05, Quantity.NODES: 0.05}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation, with the keys that choose it."""

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
    recorded = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"sides": {}}
    if arguments.again:
        for side in recorded["sides"].values():
            side |= judged([_revived(cell) for cell in side["cells"]], _revived(side["truth"]))
        RESULTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    elif not arguments.table:
        sides = [side for side in SIDES if arguments.only in (None, side.name)]
        recorded["sides"] |= {side.name: side_of(side) for side in sides}
        RESULTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(recorded)))
    return 1 if any(side["over_limit"] for side in recorded["sides"].values()) else 0


def side_of(side: Side) -> dict[str, Any]:
    """What was measured, predicted and found."""
    before = circumstances(__file__, sys.argv[1:])
    cells = [run(side.keys, tokens, side.steps) for tokens in LENGTHS]
    truth = run(side.keys, TARGET, side.target_steps)
    known = {"layers": LAYERS, "target_tokens": TARGET, "load_1min_after": os.getloadavg()[0]}
    return {**before, **known, **judged(cells, truth)}


def run(keys: Sequence[str], tokens: int, steps: int) -> Outcome:
    """A real run of one length of the sweep; raises where it did not pass."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "nsa_harness", "run", "sweep_seq_len", "--out", folder),
            *("--matrix", f"model.seq_len={tokens}"),
            *(f"model.layers={LAYERS}", f"train.steps={steps}", *keys),
        ]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        reports = sorted(Path(folder).glob("*/report.json"))
        if done.returncode or not reports:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return from_json(reports[-1].read_text(encoding="utf-8")).outcomes[0]


def _revived(cell: Mapping[str, Any]) -> Outcome:
    """A run that passed on a CPU, of which the cost alone is known."""
    cost = StepCost(**{**cell, "implementations": tuple(cell["implementations"])})
    plain = skipped(Skip(scenario=f"sweep_seq_len@model.seq_len={cost.tokens}", about="", reason=""))
    return replace(
        plain, cost=cost, spec=replace(plain.spec, device="cpu"), verdict=replace(plain.verdict, status=Status.PASS)
    )


def judged(cells: Sequence[Outcome], truth: Outcome) -> dict[str, Any]:
    """The prediction beside the truth, and what is refused of cells that another implementation ran."""
    assert truth.cost is not None
    size = size_of(truth.cost)
    (sweep,) = sweeps(cells)
    last = sweep.regimes[-1]
    predicted = sweep.predicted(size)
    short = [cell for cell in cells if cell not in last.cells]
    refusals = [one.predicted(size) for one in sweeps(short)]
    found = (
        {}
        if isinstance(predicted, Refused)
        else {str(key): against(key, value, truth) for key, value in predicted.items()}
    )
    return {
        "cells": [_cell(cell) for cell in cells],
        "truth": _cell(truth),
        "fitted_from": last.first,
        "same_implementation": truth.cost.implementations == last.costs[-1].implementations,
        "fits": {str(fit.quantity): _fit(fit) for fit in last.fits},
        "predicted": found,
        "refused": [one.reason for one in (predicted, *refusals) if isinstance(one, Refused)],
        "over_limit": [key for key, value in found.items() if abs(value["miss"]) > value["limit"]],
    }


def against(quantity: Quantity, predicted: Any, truth: Outcome) -> dict[str, Any]:
    assert truth.cost is not None
    value = measured(truth.cost, quantity)
    assert value is not None, f"the run of {TARGET} tokens has no {quantity}"
    return {
        **asdict(predicted),
        "measured": value,
        "miss": predicted.value / value - 1,
        "limit": LIMITS[quantity],
        "inside": predicted.low <= value <= predicted.high,
    }


def _fit(fit: Any) -> dict[str, Any]:
    return {"terms": [f"T^{degree}" for degree, _ in fit.form.terms] or ["power"], "exponent": asdict(fit.exponent)}


def _cell(cell: Outcome) -> dict[str, Any]:
    assert cell.cost is not None
    return asdict(cell.cost)


def table(result: Mapping[str, Any]) -> list[str]:
    lines = ["| | | from T | grows as | form | predicted (95 %) | measured | miss |", "| --- " * 8 + "|"]
    for name, side in result["sides"].items():
        for key, one in side["predicted"].items():
            fit = side["fits"][key]
            exponent = fit["exponent"]
            lines.append(
                f"| {name} | {key} | {side['fitted_from']} | T^{exponent['value']:.2f} ({exponent['low']:.2f} to"
                f" {exponent['high']:.2f}) | {' + '.join(fit['terms'])} | {one['value']:.5g} ({one['low']:.5g} to"
                f" {one['high']:.5g}) | {one['measured']:.5g} | {one['miss']:+.1%} |"
            )
        lines += [f"| {name} | refused | | {reason} | | | | |" for reason in side["refused"]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
