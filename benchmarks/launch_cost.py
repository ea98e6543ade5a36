"""What a run under the harness costs over the bare torchrun of the same program, pair by pair.

    python benchmarks/launch_cost.py                  seven pairs, into benchmarks/results/
    python benchmarks/launch_cost.py --pairs 1 --out F

A pair is `nsa-harness run ddp_onestep` and the command that the run itself wrote into command.txt, in turn.
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

from benchmarks.circumstances import circumstances  # noqa: E402

SCENARIO = "ddp_onestep"
HARNESS = [str(Path(sys.executable).parent / "nsa-harness"), "run", SCENARIO]


def measure(pairs: int) -> dict[str, Any]:
    """Wall seconds of both, after one warm-up of each."""
    with tempfile.TemporaryDirectory() as directory:
        _seconds(HARNESS, directory)
        bare = ["sh", "-c", (Path(directory) / "reports" / "latest" / SCENARIO / "command.txt").read_text()]
        _seconds(bare, directory)
        samples = [_pair(number, bare, directory) for number in range(pairs)]
        helps = [_seconds([HARNESS[0], "--help"], directory) for _ in range(10)]
    more = [sample["harness_s"] - sample["bare_s"] for sample in samples]
    summary = {
        "harness_s_median": statistics.median(sample["harness_s"] for sample in samples),
        "bare_s_median": statistics.median(sample["bare_s"] for sample in samples),
        "more_s_median": statistics.median(more),
        "more_s_max": max(more),
        "help_s_median": statistics.median(helps),
    }
    return {"samples": samples, "help_s": helps, "summary": summary}


def _pair(number: int, bare: list[str], directory: str) -> dict[str, float]:
    order = [("harness_s", HARNESS), ("bare_s", bare)]
    return {name: _seconds(command, directory) for name, command in (order if number % 2 else order[::-1])}


def _seconds(command: list[str], directory: str) -> float:
    begun = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NSA_OUT_DIR": directory}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return time.perf_counter() - begun


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what a launch under the harness costs.")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "launch_cost.json")
    options = parser.parse_args(arguments)
    result = {**circumstances(__file__, arguments), **measure(options.pairs)}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
