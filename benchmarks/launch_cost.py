"""Measure the time that nsa-harness adds to a program started with torchrun.

    python benchmarks/launch_cost.py                    seven rounds, into benchmarks/results/
    python benchmarks/launch_cost.py --rounds 1 --out F

A round runs `nsa-harness run ddp_onestep`, the same with --repeat 3, and the bare command from the run's command.txt,
in alternating order. The cost of the first scenario is the time of the short run minus that of the bare command. The
cost of each further scenario is half of the difference between the long and the short run, minus the time of the bare
command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.timing_pairs import alternate  # noqa: E402

SCENARIO = "ddp_onestep"
REPEATED = 3
HARNESS = [str(Path(sys.executable).parent / "nsa-harness"), "run", SCENARIO]
LIMITS = {"first_s": 1.0, "further_s": 0.5}


def measure(rounds: int) -> dict[str, Any]:
    """Time each command `rounds` times, and return the wall times in seconds with a summary."""
    with tempfile.TemporaryDirectory() as directory:
        _seconds(HARNESS, directory)
        bare = ["sh", "-c", (Path(directory) / "reports" / "latest" / SCENARIO / "command.txt").read_text()]
        _seconds(bare, directory)
        samples = [_round(number, bare, directory) for number in range(rounds)]
        helps = [_seconds([HARNESS[0], "--help"], directory) for _ in range(10)]
    first = [sample["once_s"] - sample["bare_s"] for sample in samples]
    further = [(sample["repeated_s"] - sample["once_s"]) / (REPEATED - 1) - sample["bare_s"] for sample in samples]
    summary = {
        "bare_s_median": statistics.median(sample["bare_s"] for sample in samples),
        "first_s_median": statistics.median(first),
        "first_s_max": max(first),
        "further_s_median": statistics.median(further),
        "further_s_max": max(further),
        "help_s_median": statistics.median(helps),
    }
    return {"samples": samples, "help_s": helps, "summary": summary}


def _round(number: int, bare: list[str], directory: str) -> dict[str, float]:
    order = [("once_s", HARNESS), ("bare_s", bare), ("repeated_s", [*HARNESS, f"--repeat={REPEATED}"])]
    return {name: _seconds(command, directory) for name, command in alternate(number, order)}


def _seconds(command: list[str], directory: str) -> float:
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NSA_OUT_DIR": directory}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what a launch under the harness costs.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "launch_cost.json")
    options = parser.parse_args(arguments)
    result = {**measurement_context(__file__, arguments), "limits": LIMITS, **measure(options.rounds)}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
