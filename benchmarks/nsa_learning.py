"""Compare the training loss of NSA and vanilla attention over 200 steps.

    python benchmarks/nsa_learning.py

Uses the ci shape and the shipped text, with the same batches in the same order for both, and two seeds. The mean loss
of the last twenty steps with NSA may be at most five percent above that with vanilla attention.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402

LIMIT = 0.05
LAST = 20
SEEDS = (0, 1)


def losses(attention: str, seed: int, steps: int) -> list[float]:
    """Train with nsa.train, and return the loss at each step."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--attention", attention, "--seed", str(seed), "--steps", str(steps), "--data", "text"]
        program = [sys.executable, str(REPOSITORY / "nsa" / "nsa_attention"), *options, "--out-dir", directory]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        with (Path(directory) / "training.csv").open(encoding="utf-8", newline="") as file:
            return [float(row["loss"]) for row in csv.DictReader(file)]


def measure(steps: int) -> dict[str, Any]:
    samples = [
        {"seed": seed, **{attention: losses(attention, seed, steps) for attention in ("vanilla", "nsa")}}
        for seed in SEEDS
    ]
    ends = [{side: statistics.mean(sample[side][-LAST:]) for side in ("vanilla", "nsa")} for sample in samples]
    excess = [end["nsa"] / end["vanilla"] - 1 for end in ends]
    return {"samples": samples, "summary": {"last_losses": ends, "excess": excess}}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the learning curves of NSA and vanilla attention.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "nsa_learning.json")
    options = parser.parse_args(arguments)
    result = {**measurement_context(__file__, arguments), "limit": LIMIT, **measure(options.steps)}
    options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))
    return int(max(result["summary"]["excess"]) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
