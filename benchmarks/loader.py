"""Compare the speed of the data loader with that of the model on a CPU.

    python benchmarks/loader.py

Uses the ci shape and each kind of data source: the same text as jsonl, as jsonl.gz and as a token file, and the
generated stories. A pair is a training run and a run of the loader only (`--phase data`), one directly after the other,
so that both see the same machine load. The loader is fast enough if it is 20 times as fast as the model.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from nsa_attention.config import CI  # noqa: E402
from nsa_attention.data.stories import all_stories  # noqa: E402
from nsa_attention.prepare import main as prepare  # noqa: E402

LIMIT = 20.0
WORKERS = 2
TOKENS_OF_STEP = CI.batch * CI.seq_len


def sources(directory: Path) -> dict[str, str]:
    """Create a data source of each kind in `directory`, and map each name to its --data option."""
    lines = "".join(json.dumps({"text": text}) + "\n" for shard in all_stories() for text in shard.records()).encode()
    (directory / "text.jsonl").write_bytes(lines)
    (directory / "text.jsonl.gz").write_bytes(gzip.compress(lines))
    if prepare([str(directory / "text.jsonl"), "--out", str(directory / "tokens")]):
        raise SystemExit("nsa.prepare failed")
    return {
        "stories": "stories",
        "jsonl": str(directory / "text.jsonl"),
        "jsonl.gz": str(directory / "text.jsonl.gz"),
        "tokens": str(directory / "tokens"),
    }


def tokens_per_s(data: str, phase: str, steps: int) -> float:
    """Run nsa.train, and return its speed in tokens per second."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--data", data, "--workers", str(WORKERS), "--steps", str(steps), "--phase", phase]
        program = [
            sys.executable,
            str(REPOSITORY / "nsa" / "nsa_attention"),
            "--shape",
            "ci",
            *options,
            "--out-dir",
            directory,
        ]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        beats = (Path(directory) / "heartbeat_rank0.jsonl").read_text(encoding="utf-8").splitlines()
    ends_s = [beat["monotonic_s"] for beat in map(json.loads, beats) if beat["step"]]
    return TOKENS_OF_STEP * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def measure(pairs: int, model_steps: int, loader_steps: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        source_by_name = sources(Path(directory))
        for _ in range(pairs):
            for name, data in source_by_name.items():
                sample = {
                    "model_tokens_per_s": tokens_per_s(data, "step", model_steps),
                    "loader_tokens_per_s": tokens_per_s(data, "data", loader_steps),
                }
                samples.setdefault(name, []).append(sample)
    summary = {
        name: {
            "model_tokens_per_s": statistics.median(sample["model_tokens_per_s"] for sample in source_samples),
            "loader_tokens_per_s": statistics.median(sample["loader_tokens_per_s"] for sample in source_samples),
            "ratio": statistics.median(
                sample["loader_tokens_per_s"] / sample["model_tokens_per_s"] for sample in source_samples
            ),
            "least_ratio": min(
                sample["loader_tokens_per_s"] / sample["model_tokens_per_s"] for sample in source_samples
            ),
        }
        for name, source_samples in samples.items()
    }
    return {"samples": samples, "summary": summary}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the loader's token rate with the model's.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model-steps", type=int, default=40)
    parser.add_argument("--loader-steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "loader.json")
    options = parser.parse_args(arguments)
    result = {
        **measurement_context(__file__, arguments),
        "limit": LIMIT,
        "workers": WORKERS,
        "numpy": version("numpy"),
        **measure(options.pairs, options.model_steps, options.loader_steps),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))
    return int(min(row["ratio"] for row in result["summary"].values()) < LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
