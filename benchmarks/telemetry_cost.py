"""What the telemetry of nsa.train costs: pairs of runs that differ in `--telemetry` alone.

    python benchmarks/telemetry_cost.py                     ten pairs, into benchmarks/results/
    python benchmarks/telemetry_cost.py --pairs 2 --out F   a quick look

Each run is a process of its own, `nsa.train` with the `ci` shape, the shipped text and one thread; the order is turned
round from pair to pair, so that a machine that slows down hits both alike. The whole step is timed, by a wrapper around
it that both runs have. The first ten steps, in which torch warms up and telemetry audits dtypes, do not count.
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

from benchmarks.circumstances import circumstances  # noqa: E402
from nsa_harness.core.statistics import student  # noqa: E402

WARM = 10  # steps that do not count
CONFIDENCE = 0.95
LIMIT_PERCENT = 1.0
# `_one_step` is all that training does in a step, telemetry and the line for people among it.
TIMED = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from nsa_harness.nsa import train
one_step, samples = train._one_step, []
def timed(*arguments, **options):
    wall, processor = time.perf_counter(), time.process_time()
    one_step(*arguments, **options)
    samples.append((time.perf_counter() - wall, time.process_time() - processor))
train._one_step = timed
status = train.main(sys.argv[3:])
json.dump(samples, open(sys.argv[2], "w"))
sys.exit(status)
"""


def steps_of(*, telemetry: bool, steps: int, directory: Path) -> list[tuple[float, float]]:
    """Wall and processor seconds of each step of one run."""
    out = directory / "samples.json"
    options = ["--shape", "ci", "--data", "text", "--steps", str(steps), "--out-dir", str(directory / "out")]
    words = [sys.executable, "-c", TIMED, str(REPOSITORY / "src"), str(out), *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"}
    environment = clean | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    words += ["--telemetry", "on" if telemetry else "off"]
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [tuple(sample) for sample in json.loads(out.read_text())]


def measure(*, pairs: int, steps: int) -> list[dict[str, Any]]:
    """Each pair with all samples; which run came first alternates."""
    found = []
    for number in range(pairs):
        pair: dict[str, Any] = {"first": "with" if number % 2 else "without", "load_1min": os.getloadavg()[0]}
        for on in (True, False) if number % 2 else (False, True):
            with tempfile.TemporaryDirectory() as directory:
                samples = steps_of(telemetry=on, steps=steps, directory=Path(directory))
            name = "with" if on else "without"
            pair |= {
                f"{name}_wall_s": [round(wall, 6) for wall, _ in samples],
                f"{name}_cpu_s": [round(processor, 6) for _, processor in samples],
            }
        found.append(pair)
    return found


def percent_more(pair: dict[str, Any], clock: str) -> float:
    """What a step costs more with telemetry, as a share of one without it: the mean over whole rounds of sampling.

    Of each place in a round (one is looked into, nine are not) the median over the rounds: a step that was held up
    moves no median, and what telemetry does in one of ten steps counts as one of ten.
    """
    with_it, without = (_typical(pair[f"{name}_{clock}"]) for name in ("with", "without"))
    return 100 * (with_it / without - 1)


def _typical(samples: list[float], every: int = 10) -> float:
    kept = samples[WARM:]
    return statistics.fmean(statistics.median(kept[place::every]) for place in range(every))


def interval(values: list[float]) -> tuple[float, float]:
    """Of the mean of the pairs, by Student's distribution."""
    middle, spread = statistics.fmean(values), statistics.stdev(values) / sqrt(len(values))
    reach = student(CONFIDENCE, len(values) - 1) * spread
    return middle - reach, middle + reach


def summary(pairs: list[dict[str, Any]]) -> dict[str, float]:
    told: dict[str, float] = {"pairs": len(pairs)}
    for clock in ("wall_s", "cpu_s"):
        more = [percent_more(pair, clock) for pair in pairs]
        low, high = interval(more)
        named = {"percent_mean": statistics.fmean(more), "percent_median": statistics.median(more)}
        named |= {"percent_low": low, "percent_high": high}
        named |= {"step_ms_without": 1000 * statistics.median(_typical(pair[f"without_{clock}"]) for pair in pairs)}
        told |= {f"{clock.removesuffix('_s')}_{name}": round(value, 4) for name, value in named.items()}
    return told


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what telemetry costs.")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=110, help="of each run; the first ten do not count")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "telemetry_cost.json")
    options = parser.parse_args(arguments)
    if options.pairs < 2 or options.steps < WARM + 10:
        parser.error(f"--pairs: at least 2, --steps: at least {WARM + 10}")
    known = circumstances(__file__, arguments)
    pairs = measure(pairs=options.pairs, steps=options.steps)
    result = {**known, "limit_percent": LIMIT_PERCENT, "summary": summary(pairs), "samples": {"pairs": pairs}}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
