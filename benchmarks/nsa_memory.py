"""Check that the memory used by a training step grows almost linearly with the sequence length.

    python benchmarks/nsa_memory.py           every code path at both lengths, and the curve up to 32768 tokens
    python benchmarks/nsa_memory.py --table   print the recorded results as Markdown

Four times the tokens may take at most 4.5 times the memory. The benchmark uses the ci shape with two layers, and each
measurement runs in its own process. The measured value is the peak resident memory of a step, minus the resident memory
before it (the model and torch itself).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402

LIMIT = 4.5
LENGTHS = (2048, 8192)
CURVE = (2048, 4096, 8192, 16384, 32768)
# Attention, implementation and checkpointing ("kept" is none): every code path of a step on a CPU.
PATHS = [
    ("nsa", "auto", "kept"),
    ("nsa", "eager", "kept"),
    ("nsa", "auto", "reentrant"),
    ("nsa", "auto", "non_reentrant"),
    ("vanilla", "auto", "kept"),
    ("stock", "auto", "kept"),
]


def step_bytes(attention: str, implementation: str, mode: str, tokens: int) -> int:
    """Run a training step in this process, and return the increase in peak memory, in bytes."""
    import torch

    from nsa_attention.config import CI, Attention, Implementation
    from nsa_attention.model import Recompute, TinyLM
    from nsa_attention.parallelize import checkpoint_layers

    config = replace(CI, attention=Attention(attention), layers=2, seq_len=tokens)
    model = TinyLM.from_config(config, Implementation(implementation))
    if mode != "kept":
        checkpoint_layers(model, range(2), Recompute(mode))
    batch = torch.randint(config.vocab, (1, tokens))

    def step(length: int) -> None:
        model(batch[:, :length]).logsumexp(-1).mean().backward()

    step(256)  # creates threads, workspaces and gradients
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _status_bytes("VmRSS")
    step(tokens)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this measurement needs Linux")


def measure_in_process(path: tuple[str, str, str], tokens: int) -> int:
    """Run a training step in a new process, and return the increase in peak memory, in bytes.

    glibc returns memory above a threshold size to the system at once, and raises the threshold when large tensors are
    freed. Resident memory then depends on the order of allocations. A fixed threshold avoids that.
    """
    result = subprocess.run(
        [sys.executable, __file__, "--one", *path, str(tokens)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(result.stdout)


def measure() -> dict[str, Any]:
    samples = []
    for path in PATHS:
        sizes = {str(tokens): measure_in_process(path, tokens) for tokens in LENGTHS}
        ratio = sizes[str(LENGTHS[1])] / sizes[str(LENGTHS[0])]
        samples.append({"attention": path[0], "impl": path[1], "layers": path[2], "bytes": sizes, "ratio": ratio})
    curve = {
        attention: {str(tokens): measure_in_process((attention, "auto", "kept"), tokens) for tokens in CURVE}
        for attention in ("nsa", "vanilla")
    }
    return {"samples": samples, "curve": curve, "summary": {"worst_ratio": max(sample["ratio"] for sample in samples)}}


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table of the memory used by a training step at each sequence length."""
    lines = ["| tokens | NSA, MiB | times | dense, MiB | times |", "|---|---|---|---|---|"]
    before: dict[str, int] = {}
    for tokens in CURVE:
        cells = [str(tokens)]
        for attention in ("nsa", "vanilla"):
            size = result["curve"][attention][str(tokens)]
            cells += [f"{size / 2**20:.0f}", f"{size / before[attention]:.2f}" if attention in before else ""]
            before[attention] = size
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure how the memory of a step grows with its tokens.")
    parser.add_argument(
        "--one", nargs=4, metavar=("ATTENTION", "IMPL", "LAYERS", "TOKENS"), help="measure in this process"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "nsa_memory.json")
    parser.add_argument("--table", action="store_true", help="print the results in --out")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(json.loads(options.out.read_text(encoding="utf-8"))))
        return 0
    if options.one:
        *path, tokens = options.one
        print(step_bytes(*path, int(tokens)))
        return 0
    result = {**measurement_context(__file__, arguments), "limit": LIMIT, **measure()}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["samples"], indent=1))
    return int(result["summary"]["worst_ratio"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
