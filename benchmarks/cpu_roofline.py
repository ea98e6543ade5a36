"""Compute a lower bound (roofline) for a training step on this CPU, with NSA and with vanilla attention.

    python benchmarks/cpu_roofline.py           measure the rates of this CPU, into benchmarks/results/cpu_roofline.json
    python benchmarks/cpu_roofline.py --table   print the recorded result as Markdown

A step cannot be faster than the time for its matrix products, plus the time for the exponentials of its attention
scores, plus the time to read and write what does not fit into the caches. The three are added, because the same cores
do all three. The rates are the highest that torch reaches here on its own: products of the shapes of the projections,
products of a tile of queries with a tile of keys, exponentials within the cache, and a copy in memory. Everything else
counts as free: masks, maxima and sums of rows, the choice of blocks, the gathering of rows. So the real time is longer.

A visible pair of query and key costs one exponential and 2 (D + E) operations in the forward pass, and one exponential
and 2 (3 D + 2 E) operations in the backward pass, which computes the scores again (D key width, E value width).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.roofline import Shape, pairs  # noqa: E402
from nsa_attention.config import PRODUCTION, Attention, NSAConfig  # noqa: E402
from nsa_attention.model import TinyLM  # noqa: E402

RESULT = REPOSITORY / "benchmarks" / "results" / "cpu_roofline.json"
STEP_COST = REPOSITORY / "benchmarks" / "results" / "nsa_step_cost.json"
LENGTHS = ((2048, 12), (8192, 2), (16384, 2))  # tokens and layers, as in nsa_step_cost.py
_PASSES = 3  # a product with a weight: forward, gradient of the input, gradient of the weight
_ADAMW_BYTES = 28  # per parameter: read weight, gradient and both moments, write weight and moments
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least work of a training step."""

    weight_flops: float = 0.0  # in products with a weight
    attention_flops: float = 0.0  # in products of queries, keys and values
    exponentials: float = 0.0
    bytes: float = 0.0  # read from and written to memory

    def __add__(self, other: Work) -> Work:
        return Work(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)})


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How much of each kind of work this CPU can do in a second. The fields are those of Work."""

    weight_flops: float
    attention_flops: float
    exponentials: float
    bytes: float


def floor_s(work: Work, rates: Rates) -> float:
    """Return the least time for the work, in seconds."""
    return sum(getattr(work, field.name) / getattr(rates, field.name) for field in fields(Work))


def step_work(config: NSAConfig) -> dict[str, Work]:
    """Return the work of each part of a training step with one sequence."""
    with torch.device("meta"):
        model = TinyLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention = _nsa(config) if config.attention is Attention.NSA else _vanilla(config)
    weights = sum(parameter.numel() for parameter in model.blocks[0].mlp.parameters())
    layers = {"mlp": _products(config.seq_len, weights), **attention}
    return {
        **{part: _times(work, config.layers) for part, work in layers.items()},
        "head": _products(config.seq_len, config.dim * config.vocab),
        "optimizer": Work(bytes=_ADAMW_BYTES * parameters),
    }


def _vanilla(config: NSAConfig) -> dict[str, Work]:
    return {
        "projections": _projections(config, branches=1),
        "attention": _attention(config, pairs(_shape(config))["dense"]),
    }


def _nsa(config: NSAConfig) -> dict[str, Work]:
    shape = _shape(config)
    visible = pairs(shape)
    block_widths = config.block_len * config.d_k + config.d_k, config.block_len * config.d_v + config.d_v
    compression = sum(width * inputs for width, inputs in zip((config.d_k, config.d_v), block_widths, strict=True))
    hidden = max(16, config.dim // 8)
    ranking = visible["compressed"] * config.heads
    rows = config.seq_len * config.heads * config.d_v * _FLOAT_BYTES
    return {
        "projections": _projections(config, branches=len(config.branches)),
        "compression": _products(shape.blocks * config.groups, compression),
        "compressed": _attention(config, visible["compressed"]),
        "importance": Work(attention_flops=2 * config.d_k * ranking, exponentials=ranking),
        "selected": _attention(config, visible["selected"]),
        "sliding": _attention(config, visible["sliding"]),
        "gates": _products(config.seq_len, hidden * (config.dim + len(config.branches) * config.heads))
        + Work(bytes=11 * rows),  # reads three outputs and writes one; reads four tensors and writes three
    }


def _projections(config: NSAConfig, branches: int) -> Work:
    queries = config.heads * (config.d_k + config.d_v)  # with the output projection
    return _products(config.seq_len, config.dim * (queries + branches * config.groups * (config.d_k + config.d_v)))


def _products(rows: int, weights: int) -> Work:
    return Work(weight_flops=2 * _PASSES * rows * weights)


def _attention(config: NSAConfig, visible_pairs: int) -> Work:
    forward, backward = config.d_k + config.d_v, 3 * config.d_k + 2 * config.d_v
    count = visible_pairs * config.heads
    return Work(attention_flops=2 * (forward + backward) * count, exponentials=2 * count)


def _times(work: Work, count: int) -> Work:
    return Work(**{name: count * value for name, value in asdict(work).items()})


def _shape(config: NSAConfig) -> Shape:
    return Shape(
        tokens=config.seq_len, heads=config.heads, groups=config.groups, width=config.d_k, value_width=config.d_v,
        block_len=config.block_len, block_stride=config.block_stride, select_len=config.select_len,
        select_count=config.select_count, window=config.window,
    )  # fmt: skip


def measured_rates(config: NSAConfig, repeats: int = 7) -> Rates:
    """Measure the highest rates of this CPU, with torch's threads."""
    threads = torch.get_num_threads()
    tiles = [(rows, keys) for rows in (64, 128, 256, 512) for keys in (64, 128, 256, 512)]
    values = torch.rand(threads, 1 << 16)  # 256 KiB for each core
    results = torch.empty_like(values)
    large = torch.rand(1 << 26)
    copy = torch.empty_like(large)
    return Rates(
        weight_flops=_best(_product(2048, config.dim, 2 * config.dim), repeats),
        attention_flops=max(_best(_tile_product(rows, keys, config), repeats) for rows, keys in tiles),
        exponentials=_best((lambda: torch.exp(values, out=results), values.numel()), repeats, calls=100),
        bytes=_best((lambda: copy.copy_(large), 2 * large.numel() * _FLOAT_BYTES), repeats),
    )


_Measured = tuple[Callable[[], object], float]  # a function, and how much it does


def _product(rows: int, inputs: int, outputs: int) -> _Measured:
    left, right, out = torch.rand(rows, inputs), torch.rand(inputs, outputs), torch.empty(rows, outputs)
    return lambda: torch.mm(left, right, out=out), 2.0 * rows * inputs * outputs


def _tile_product(rows: int, keys: int, config: NSAConfig) -> _Measured:
    """A product of queries and keys for each core. All tiles fit into its cache."""
    batch = 8 * torch.get_num_threads()
    queries, tile = torch.rand(batch, rows, config.d_k), torch.rand(batch, config.d_k, keys)
    scores = torch.empty(batch, rows, keys)
    return lambda: torch.bmm(queries, tile, out=scores), 2.0 * batch * rows * config.d_k * keys


def _best(measured: _Measured, repeats: int, calls: int = 10) -> float:
    """Return the highest rate, in units per second, of several measurements of `calls` calls."""
    function, amount = measured
    function()
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        rates.append(calls * amount / (time.perf_counter() - began))
    return max(rates)


def floors(rates: Rates) -> list[dict[str, Any]]:
    """Return the least times of a step, in seconds, for each length of nsa_step_cost.py."""
    rows = []
    for tokens, layers in LENGTHS:
        shape = replace(PRODUCTION, seq_len=tokens, layers=layers)
        sides = {
            side.value: {part: floor_s(work, rates) for part, work in step_work(replace(shape, attention=side)).items()}
            for side in (Attention.VANILLA, Attention.NSA)
        }
        least = {side: sum(parts.values()) for side, parts in sides.items()}
        rows.append(
            {"tokens": tokens, "layers": layers, "floor_s": least, "ratio": least["nsa"] / least["vanilla"], **sides}
        )
    return rows


def table_md(result: dict[str, Any], step_cost: dict[str, Any]) -> str:
    """Return the recorded lower bounds as Markdown, next to the recorded times of `nsa_step_cost.py`."""
    measured = {length["tokens"]: length["summary"] for length in step_cost["lengths"]}
    rates = result["rates"]
    lines = [
        f"The rates of this CPU: {rates['weight_flops'] / 1e9:.0f} GFLOP/s in products with weights, "
        f"{rates['attention_flops'] / 1e9:.0f} in products of tiles, {rates['exponentials'] / 1e9:.2f} billion "
        f"exponentials per second, {rates['bytes'] / 1e9:.1f} GB/s.",
        "",
        "| step | least time: vanilla | NSA | NSA / vanilla | measured: vanilla | NSA | NSA / vanilla |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["lengths"]:
        summary = measured[row["tokens"]]
        times = [summary[f"kept_{side}_wall_s_median"] for side in ("vanilla", "nsa")]
        lines.append(
            f"| {row['layers']} layers, {row['tokens']} tokens | {row['floor_s']['vanilla']:.1f} s "
            f"| {row['floor_s']['nsa']:.1f} s | {row['ratio']:.2f} | {times[0]:.1f} s | {times[1]:.1f} s "
            f"| {summary['kept_wall_s_ratio_median']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compute the least time of a training step on this CPU.")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of the recorded result")
    parser.add_argument("--out", type=Path, default=RESULT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not options.table:
        rates = measured_rates(PRODUCTION)
        context = measurement_context(__file__, arguments) | {"threads": torch.get_num_threads()}
        result = context | {"rates": asdict(rates), "lengths": floors(rates)}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(options.out.read_text(encoding="utf-8"))
    print(table_md(stored, json.loads(STEP_COST.read_text(encoding="utf-8"))), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
