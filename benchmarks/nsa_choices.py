"""Measure the overlap between blocks selected by neighbouring queries in a trained model.

    python benchmarks/nsa_choices.py                            train shape ci for some steps, then measure
    python benchmarks/nsa_choices.py --checkpoint DIRECTORY     measure an existing model
    python benchmarks/nsa_choices.py --places 4                 with as many selected blocks as the shape trains with

Shape ci trains with 4 selected blocks per query, of which 3 are forced. To show what importance would select, the
trained model gets 16 (`--places`), as long sequences have. The text is the training text, with longer sequences than in
training. Random selections of the same size are listed for comparison.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.synthetic_selections import make_selections, mean_union_size, neighbour_overlap  # noqa: E402
from nsa_attention.branches import BlockSelector  # noqa: E402
from nsa_attention.checkpoints.load import read_weights  # noqa: E402
from nsa_attention.config import NSAConfig  # noqa: E402
from nsa_attention.data.source_shards import shipped_text  # noqa: E402
from nsa_attention.model import TinyLM  # noqa: E402
from nsa_attention.world import CannotRunError  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "nsa_choices.json"
TILES = (2, 4, 8, 16)  # queries per tile


def trained_selections(
    checkpoint: Path, tokens: int, *, count: int, select_len: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """Map each layer of a checkpoint to the blocks [1, G, T, n] that it selects.

    Raises CannotRunError if there is no checkpoint.
    """
    config, weights = read_weights(checkpoint)
    return selections_of_model(config, weights, tokens, count=count, select_len=select_len, device=device)


def selections_of_model(
    config: NSAConfig, weights: Mapping[str, Tensor], tokens: int, *, count: int, select_len: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """Map each layer of a model with the given weights to the blocks [1, G, T, n] that it selects.

    `count` and `select_len` may differ from training, because no weight depends on them.
    """
    model = TinyLM.from_config(replace(config, seq_len=tokens, select_count=count, select_len=select_len))
    model.load_state_dict(weights)
    model.to(device).eval()
    selections: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockSelector):
            module.register_forward_hook(
                lambda _module, _inputs, output, name=name: selections.update({name: output.cpu()})
            )
    with torch.no_grad():
        model(_text(tokens).to(device))
    return selections


def _text(tokens: int) -> Tensor:
    """Return part of the sample text as token ids [1, tokens], one for each byte."""
    whole = torch.frombuffer(bytearray(shipped_text()), dtype=torch.uint8).long()
    return whole[(torch.arange(tokens) + len(whole) // 2) % len(whole)][None]


def measure(checkpoint: Path, tokens: int, count: int, select_len: int) -> dict[str, Any]:
    layers = trained_selections(checkpoint, tokens, count=count, select_len=select_len)
    random_rows = {"random": make_selections(tokens, count=count, select_len=select_len)}
    return {
        "tokens": tokens,
        "places": count,
        "select_len": select_len,
        "rows": {name: _row(indices) for name, indices in (random_rows | layers).items()},
    }


def _row(indices: Tensor) -> dict[str, float]:
    unions = {f"union_of_{queries}": round(mean_union_size(indices, queries), 3) for queries in TILES}
    return {"shared_by_neighbours": round(neighbour_overlap(indices), 4), **unions}


def train(steps: int, tokens: int, directory: Path) -> Path:
    options = ["--shape", "ci", "--data", "text", "--seq-len", str(tokens), "--batch", "1", "--steps", str(steps)]
    options += ["--checkpoint-every", str(steps), "--out-dir", str(directory)]
    subprocess.run(
        [sys.executable, str(REPOSITORY / "nsa" / "nsa_attention"), *options], check=True, stdout=subprocess.DEVNULL
    )
    return directory


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure which blocks the queries of a trained model select.")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of nsa.train; default: train shape ci")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--train-tokens", type=int, default=1024, help="length of training sequences")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the measured sequence")
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--select-len", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = options.checkpoint or train(options.steps, options.train_tokens, Path(directory))
        try:
            measurements = measure(checkpoint, options.tokens, options.places, options.select_len)
        except CannotRunError as error:
            parser.error(f"--checkpoint: {error}")
    public_arguments = [word for word in arguments if "/" not in word]
    training = {"steps": options.steps, "train_tokens": options.train_tokens} if not options.checkpoint else {}
    result = {**measurement_context(__file__, public_arguments), **training, **measurements}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table of the overlap in each layer and in random selections."""
    lines = ["| choices | shared by neighbours | " + " | ".join(f"union of {queries}" for queries in TILES) + " |"]
    lines.append("| --- |" + " ---: |" * (1 + len(TILES)))
    for name, row in result["rows"].items():
        unions = " | ".join(f"{row[f'union_of_{queries}']:.1f}" for queries in TILES)
        lines.append(f"| {name} | {row['shared_by_neighbours']:.0%} | {unions} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
