"""Which blocks a trained model's queries choose: how much neighbours share, and how large the unions of tiles are.

    python benchmarks/nsa_choices.py                                trains shape ci for a while, and looks
    python benchmarks/nsa_choices.py --checkpoint DIRECTORY         of a model that is there
    python benchmarks/nsa_choices.py --places 4                     with as many places as the shape trains with

Shape ci learns with 4 places, of which 3 are forced: to see what importance would choose, the trained model gets 16
(`--places`), as long sequences have. The text is the one it learned from, at more tokens than it learned with. Random
choices of the same number from the same number of blocks stand beside it.
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

from benchmarks.provenance import circumstances  # noqa: E402
from benchmarks.synthetic_selections import choices, shared_by_neighbours, union_size  # noqa: E402
from nsa_attention.attention import BlockSelector  # noqa: E402
from nsa_attention.checkpoints.load import read_weights  # noqa: E402
from nsa_attention.config import NSAConfig  # noqa: E402
from nsa_attention.data.named import shipped_text  # noqa: E402
from nsa_attention.model import TinyLM  # noqa: E402
from nsa_attention.world import CannotRunError  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "nsa_choices.json"
TILES = (2, 4, 8, 16)  # queries


def trained_choices(
    checkpoint: Path, tokens: int, *, count: int, select_len: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """Indices [1, G, T, n] of each layer, for a text of so many tokens. Raises CannotRunError for no checkpoint."""
    config, weights = read_weights(checkpoint)
    return choices_of(config, weights, tokens, count=count, select_len=select_len, device=device)


def choices_of(
    config: NSAConfig, weights: Mapping[str, Tensor], tokens: int, *, count: int, select_len: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """The same for weights of a shape. Neither places nor selection blocks have any, so that both may be others."""
    model = TinyLM.from_config(replace(config, seq_len=tokens, select_count=count, select_len=select_len))
    model.load_state_dict(weights)
    model.to(device).eval()
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockSelector):
            module.register_forward_hook(lambda _module, _inputs, output, name=name: found.update({name: output.cpu()}))
    with torch.no_grad():
        model(_text(tokens).to(device))
    return found


def _text(tokens: int) -> Tensor:
    """Bytes of the shipped text from its middle on, from its begin again where it ends."""
    whole = torch.frombuffer(bytearray(shipped_text()), dtype=torch.uint8).long()
    return whole[(torch.arange(tokens) + len(whole) // 2) % len(whole)][None]


def measure(checkpoint: Path, tokens: int, count: int, select_len: int) -> dict[str, Any]:
    layers = trained_choices(checkpoint, tokens, count=count, select_len=select_len)
    drawn = {"random": choices(tokens, count=count, select_len=select_len)}
    return {
        "tokens": tokens,
        "places": count,
        "select_len": select_len,
        "rows": {name: _row(indices) for name, indices in (drawn | layers).items()},
    }


def _row(indices: Tensor) -> dict[str, float]:
    unions = {f"union_of_{queries}": round(union_size(indices, queries), 3) for queries in TILES}
    return {"shared_by_neighbours": round(shared_by_neighbours(indices), 4), **unions}


def train(steps: int, tokens: int, directory: Path) -> Path:
    options = ["--shape", "ci", "--data", "text", "--seq-len", str(tokens), "--batch", "1", "--steps", str(steps)]
    options += ["--checkpoint-every", str(steps), "--out-dir", str(directory)]
    subprocess.run(
        [sys.executable, str(REPOSITORY / "nsa" / "nsa_attention"), *options], check=True, stdout=subprocess.DEVNULL
    )
    return directory


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="How a trained model's queries choose blocks.")
    parser.add_argument("--checkpoint", type=Path, help="of a run of nsa.train; else shape ci is trained")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--train-tokens", type=int, default=1024, help="of a sequence that it learns from")
    parser.add_argument("--tokens", type=int, default=4096, help="of the sequence that it is asked about")
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--select-len", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = options.checkpoint or train(options.steps, options.train_tokens, Path(directory))
        try:
            measured = measure(checkpoint, options.tokens, options.places, options.select_len)
        except CannotRunError as error:
            parser.error(f"--checkpoint: {error}")
    said = [word for word in arguments if "/" not in word]
    trained = {"steps": options.steps, "train_tokens": options.train_tokens} if not options.checkpoint else {}
    result = {**circumstances(__file__, said), **trained, **measured}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """Markdown: for random choices and each layer."""
    lines = ["| choices | shared by neighbours | " + " | ".join(f"union of {one}" for one in TILES) + " |"]
    lines.append("| --- |" + " ---: |" * (1 + len(TILES)))
    for name, row in result["rows"].items():
        unions = " | ".join(f"{row[f'union_of_{one}']:.1f}" for one in TILES)
        lines.append(f"| {name} | {row['shared_by_neighbours']:.0%} | {unions} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
