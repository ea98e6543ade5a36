"""Measure the time that telemetry in nsa.train costs per training step.

    python benchmarks/telemetry_cost.py                     twenty runs, into benchmarks/results/
    python benchmarks/telemetry_cost.py --runs 2 --out F    a quick measurement

Each run is a new process: `nsa.train` with the `ci` shape, the shipped text and one thread. Telemetry is switched every
ten steps, in the order on, off, off, on. Both sides are measured in the same process, because two processes of the same
program can differ by several percent (due to their memory layout), and because the speed of a shared machine changes
within minutes. A wrapper times the full step. The first ten steps, in which torch warms up and telemetry audits dtypes,
are dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from math import sqrt
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from nsa_harness.core.experiment.statistics import student_quantile  # noqa: E402

ROUND = 10  # steps between two switches; telemetry samples every tenth step
CONFIDENCE = 0.95
LIMIT_PERCENT = 1.0
# `_one_step` is the full training step, including telemetry and the printed line.
TIMED = """
import dataclasses, json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from nsa_attention import train
from nsa_attention.telemetry import NoTelemetry
one_step, samples, a_round = train._one_step, [], int(sys.argv[3])
def timed(run, step, **options):
    if (len(samples) // a_round) % 4 in (2, 3):  # on to warm up; then on, off, off, on
        run = dataclasses.replace(run, telemetry=NoTelemetry())
    wall, processor = time.perf_counter(), time.process_time()
    one_step(run, step, **options)
    samples.append((type(run.telemetry).__name__, time.perf_counter() - wall, time.process_time() - processor))
train._one_step = timed
status = train.main(sys.argv[4:])
json.dump(samples, open(sys.argv[2], "w"))
sys.exit(status)
"""
SIDE_OF = {"Telemetry": "with", "NoTelemetry": "without"}


def steps_of(*, steps: int, directory: Path) -> list[tuple[str, float, float]]:
    """Run nsa.train, and return (kind of telemetry, wall seconds, CPU seconds) for each step."""
    out = directory / "samples.json"
    options = ["--shape", "ci", "--data", "text", "--steps", str(steps), "--out-dir", str(directory / "out")]
    arguments = [str(REPOSITORY / "nsa"), str(out), str(ROUND), *options, "--telemetry", "on"]
    environment_without_settings = {
        name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"
    }
    environment = environment_without_settings | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([sys.executable, "-c", TIMED, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)
    return [tuple(sample) for sample in json.loads(out.read_text())]


def measure(*, runs: int, rounds: int) -> list[dict[str, Any]]:
    """Return, for each run, the wall and CPU times of all steps with and without telemetry."""
    results = []
    for _ in range(runs):
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as directory:
            samples = steps_of(steps=ROUND * (1 + 2 * rounds), directory=Path(directory))[ROUND:]
        run: dict[str, Any] = {"load_1min": load}
        for telemetry, side in SIDE_OF.items():
            side_samples = [(wall, processor) for name, wall, processor in samples if name == telemetry]
            run[f"{side}_wall_s"] = [round(wall, 6) for wall, _ in side_samples]
            run[f"{side}_cpu_s"] = [round(processor, 6) for _, processor in side_samples]
        results.append(run)
    return results


def percent_more(run: dict[str, Any], clock: str) -> float:
    """Return the increase in step time caused by telemetry, in percent.

    A typical step is the mean over the ten positions within a round of the median over all rounds. A delayed step
    then does not matter, and the sampled step of each round counts as one of ten.
    """
    with_it, without = (_typical(run[f"{side}_{clock}"]) for side in ("with", "without"))
    return 100 * (with_it / without - 1)


def _typical(samples: list[float]) -> float:
    return statistics.fmean(statistics.median(samples[place::ROUND]) for place in range(ROUND))


def interval(values: list[float]) -> tuple[float, float]:
    """Return the confidence interval for the mean of `values`."""
    middle, spread = statistics.fmean(values), statistics.stdev(values) / sqrt(len(values))
    reach = student_quantile(CONFIDENCE, len(values) - 1) * spread
    return middle - reach, middle + reach


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean, median and confidence interval of the cost of telemetry, in percent."""
    result: dict[str, float] = {"runs": len(runs)}
    for clock in ("wall_s", "cpu_s"):
        percentages = [percent_more(run, clock) for run in runs]
        low, high = interval(percentages)
        values = {"percent_mean": statistics.fmean(percentages), "percent_median": statistics.median(percentages)}
        values |= {"percent_low": low, "percent_high": high}
        values |= {"step_ms_without": 1000 * statistics.median(_typical(run[f"without_{clock}"]) for run in runs)}
        result |= {f"{clock.removesuffix('_s')}_{name}": round(value, 4) for name, value in values.items()}
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what telemetry costs.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds of {ROUND} steps on each side of a run; even")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "telemetry_cost.json")
    options = parser.parse_args(arguments)
    if options.runs < 2 or options.rounds < 2 or options.rounds % 2:
        parser.error("--runs: at least 2, --rounds: at least 2 and even")
    context = measurement_context(__file__, arguments)
    runs = measure(runs=options.runs, rounds=options.rounds)
    result = {**context, "limit_percent": LIMIT_PERCENT, "summary": summary(runs), "samples": {"runs": runs}}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
