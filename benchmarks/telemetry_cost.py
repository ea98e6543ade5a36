"""What the telemetry of nsa.train costs: steps of the same run with it and without it, in turn.

    python benchmarks/telemetry_cost.py                     twenty runs, into benchmarks/results/
    python benchmarks/telemetry_cost.py --runs 2 --out F    a quick look

A run is a process of its own: `nsa.train` with the `ci` shape, the shipped text and one thread. Its telemetry is taken
away for ten steps, then it is back for ten, in the order on, off, off, on. Two processes of the same program may differ
by several percent for as long as they live, as their memory lies, and a shared machine changes its speed within
minutes: within a run neither counts. The whole step is timed, by a wrapper around it. The first ten steps, in which
torch warms up and telemetry audits dtypes, do not count.
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

from benchmarks.provenance import circumstances  # noqa: E402
from nsa_harness.core.experiment.statistics import student  # noqa: E402

ROUND = 10  # steps between two turns: telemetry looks into one of ten
CONFIDENCE = 0.95
LIMIT_PERCENT = 1.0
# `_one_step` is all that training does in a step, telemetry and the line for people among it.
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
    """The telemetry that each step of one run had, its wall and its processor seconds."""
    out = directory / "samples.json"
    options = ["--shape", "ci", "--data", "text", "--steps", str(steps), "--out-dir", str(directory / "out")]
    words = [str(REPOSITORY / "src"), str(out), str(ROUND), *options, "--telemetry", "on"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"}
    environment = clean | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([sys.executable, "-c", TIMED, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    return [tuple(sample) for sample in json.loads(out.read_text())]


def measure(*, runs: int, rounds: int) -> list[dict[str, Any]]:
    """Each run with all samples that count, by side in the order in which they were taken."""
    found = []
    for _ in range(runs):
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as directory:
            samples = steps_of(steps=ROUND * (1 + 2 * rounds), directory=Path(directory))[ROUND:]
        run: dict[str, Any] = {"load_1min": load}
        for telemetry, side in SIDE_OF.items():
            mine = [(wall, processor) for name, wall, processor in samples if name == telemetry]
            run[f"{side}_wall_s"] = [round(wall, 6) for wall, _ in mine]
            run[f"{side}_cpu_s"] = [round(processor, 6) for _, processor in mine]
        found.append(run)
    return found


def percent_more(run: dict[str, Any], clock: str) -> float:
    """What a step costs more with telemetry, as a share of one without it: the mean over whole rounds of sampling.

    Of each place in a round (one is looked into, nine are not) the median over the rounds: a step that was held up
    moves no median, and what telemetry does in one of ten steps counts as one of ten.
    """
    with_it, without = (_typical(run[f"{side}_{clock}"]) for side in ("with", "without"))
    return 100 * (with_it / without - 1)


def _typical(samples: list[float]) -> float:
    return statistics.fmean(statistics.median(samples[place::ROUND]) for place in range(ROUND))


def interval(values: list[float]) -> tuple[float, float]:
    """Of the mean of the runs, by Student's distribution."""
    middle, spread = statistics.fmean(values), statistics.stdev(values) / sqrt(len(values))
    reach = student(CONFIDENCE, len(values) - 1) * spread
    return middle - reach, middle + reach


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    told: dict[str, float] = {"runs": len(runs)}
    for clock in ("wall_s", "cpu_s"):
        more = [percent_more(run, clock) for run in runs]
        low, high = interval(more)
        named = {"percent_mean": statistics.fmean(more), "percent_median": statistics.median(more)}
        named |= {"percent_low": low, "percent_high": high}
        named |= {"step_ms_without": 1000 * statistics.median(_typical(run[f"without_{clock}"]) for run in runs)}
        told |= {f"{clock.removesuffix('_s')}_{name}": round(value, 4) for name, value in named.items()}
    return told


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what telemetry costs.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10, help=f"of {ROUND} steps, on each side of a run; even")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "telemetry_cost.json")
    options = parser.parse_args(arguments)
    if options.runs < 2 or options.rounds < 2 or options.rounds % 2:
        parser.error("--runs: at least 2, --rounds: at least 2 and even")
    known = circumstances(__file__, arguments)
    runs = measure(runs=options.runs, rounds=options.rounds)
    result = {**known, "limit_percent": LIMIT_PERCENT, "summary": summary(runs), "samples": {"runs": runs}}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
