"""Compare the duration of a full training step with NSA and with vanilla attention.

    python benchmarks/nsa_step_cost.py                           measure every length, into benchmarks/results/
    python benchmarks/nsa_step_cost.py --tokens 2048 --layers 2  a quick partial measurement, not stored without --out
    python benchmarks/nsa_step_cost.py --table                   print the recorded results as Markdown

A step is forward, backward and AdamW with dim 768, vocabulary 50257, one sequence and float32. Both models are in one
process and run alternately, in reversed order in every other pair, so that changes of the machine's speed affect both
equally. The production length runs with and without gradient checkpointing. Longer sequences use two layers, because
twelve would take six times as long without further insight. OMP_WAIT_POLICY=PASSIVE, as in the training program, avoids
counting the CPU time of waiting threads.

With two layers, the head takes most of the step and is equal on both sides. Therefore the attention of one layer is
also compared on its own (`attention`: projections, branches, gates, forward and backward). Each length also has the
times of the parts of a layer (nsa_parts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.nsa_parts import HEAD_TOKENS, parts  # noqa: E402
from benchmarks.provenance import measurement_context  # noqa: E402
from nsa_attention.config import PRODUCTION, Attention, NSAConfig  # noqa: E402
from nsa_attention.model import Recompute, TinyLM  # noqa: E402
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies  # noqa: E402
from nsa_attention.parallelize import checkpoint_layers  # noqa: E402
from nsa_attention.projections import TokenContext  # noqa: E402

# Ratio of the wall times of NSA and vanilla attention, by length in tokens: the allowed maximum, and the goal.
LIMITS = {2048: 1.3, 8192: 1.3}
GOALS = {2048: 1.15, 8192: 0.9, 16384: 0.75}
SIDES = (Attention.VANILLA, Attention.NSA)
CLOCKS = ("wall_s", "cpu_s")


@dataclass(frozen=True, kw_only=True)
class Length:
    """The settings for measurements at one sequence length."""

    tokens: int
    layers: int
    pairs: int
    checkpointed: bool = False  # whether to measure with gradient checkpointing as well


PLAN = (
    Length(tokens=512, layers=12, pairs=5),
    Length(tokens=1024, layers=12, pairs=5),
    Length(tokens=PRODUCTION.seq_len, layers=PRODUCTION.layers, pairs=5, checkpointed=True),
    Length(tokens=8192, layers=2, pairs=4),
    Length(tokens=16384, layers=2, pairs=2),
)


class TimedTraining:
    """A model and its optimizer, whose training steps are timed."""

    def __init__(self, config: NSAConfig) -> None:
        torch.manual_seed(0)
        self.model = TinyLM.from_config(config)
        # The head processes the sequence in pieces: the logits of 16384 tokens would take 3.3 GB three times.
        self._head, self.model.head = self.model.head, nn.Identity()
        self._optimizer = torch.optim.AdamW(self.model.parameters())
        self._tokens = torch.randint(config.vocab, (1, config.seq_len + 1))

    def step(self) -> dict[str, float]:
        """Run one training step, and return its wall and CPU times in seconds."""
        wall, processor = time.perf_counter(), time.process_time()
        hidden = self.model(self._tokens[:, :-1])
        hidden.backward(self._gradient_of_loss(hidden.detach()))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}

    def attention(self) -> dict[str, float]:
        """Run the attention of one layer, and return its wall and CPU times in seconds."""
        config, layer = self.model.config, self.model.blocks[0].attn
        cos_sin = rotary_cos_sin(rotary_frequencies(config.d_k), config.seq_len)
        x = torch.randn(1, config.seq_len, config.dim, requires_grad=True)
        upstream = torch.randn_like(x)
        wall, processor = time.perf_counter(), time.process_time()
        torch.autograd.grad(layer(x, context=TokenContext(cos_sin)), [x, *layer.parameters()], upstream)
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}

    def _gradient_of_loss(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the loss with respect to `hidden`, and update the gradients of the output head."""
        leaf = hidden.requires_grad_()
        targets = self._tokens[:, 1:]
        for piece, target in zip(leaf.split(HEAD_TOKENS, 1), targets.split(HEAD_TOKENS, 1), strict=True):
            logits = self._head(piece).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, target.flatten(), reduction="sum") / targets.numel()
            loss.backward()
        assert leaf.grad is not None
        return leaf.grad


def measure(length: Length) -> dict[str, Any]:
    """Measure training steps at one sequence length, and return all times with a summary."""
    shape = replace(PRODUCTION, layers=length.layers, seq_len=length.tokens)
    sides = {side: TimedTraining(replace(shape, attention=side)) for side in SIDES}
    samples = {}
    for name in ("kept", "checkpointed") if length.checkpointed else ("kept",):
        recomputed_layers = range(length.layers) if name == "checkpointed" else ()
        for training in sides.values():
            checkpoint_layers(training.model, recomputed_layers, Recompute.NON_REENTRANT)
            training.step()  # warm-up
        samples[name] = [_pair(sides, number, TimedTraining.step) for number in range(length.pairs)]
    for training in sides.values():
        training.attention()  # warm-up
    samples["attention"] = [_pair(sides, number, TimedTraining.attention) for number in range(2 * length.pairs)]
    return {
        "tokens": length.tokens,
        "layers": length.layers,
        "limit": LIMITS.get(length.tokens),
        "goal": GOALS.get(length.tokens),
        "samples": samples,
        "summary": _summary(samples),
    }


def _pair(
    sides: dict[Attention, TimedTraining], number: int, measure_side: Callable[[TimedTraining], dict[str, float]]
) -> dict[str, Any]:
    order = SIDES if number % 2 == 0 else SIDES[::-1]
    pair: dict[str, Any] = {side.value: measure_side(sides[side]) for side in order}
    return pair | {"first": order[0].value, "load_1min": os.getloadavg()[0]}


def _summary(samples: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    ratios = {
        f"{name}_{clock}_ratio_median": statistics.median(pair["nsa"][clock] / pair["vanilla"][clock] for pair in pairs)
        for name, pairs in samples.items()
        for clock in CLOCKS
    }
    seconds = {
        f"{name}_{side.value}_wall_s_median": statistics.median(pair[side.value]["wall_s"] for pair in pairs)
        for name, pairs in samples.items()
        for side in SIDES
    }
    return ratios | seconds


def over_limit(result: dict[str, Any]) -> list[str]:
    """Return the measurements in which a full training step with NSA was slower than allowed."""
    limit = result["limit"]
    ratios = {name: result["summary"][f"{name}_wall_s_ratio_median"] for name in _of_steps(result)}
    return [name for name, ratio in ratios.items() if limit is not None and ratio > limit]


def _of_steps(length: dict[str, Any]) -> list[str]:
    return [name for name in length["samples"] if name != "attention"]


def table_md(result: dict[str, Any]) -> str:
    """Return the measured times of training steps as Markdown tables."""
    steps = [
        (length["tokens"], length["layers"], name, length["summary"], length["limit"], length["goal"])
        for length in result["lengths"]
        for name in _of_steps(length)
    ]
    alone = [(length["tokens"], length["summary"]) for length in result["lengths"] if "attention" in length["samples"]]
    lines = [
        "| tokens | layers | activations | vanilla, s | NSA, s | NSA / vanilla | limit | goal |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {tokens} | {layers} | {name} | {summary[f'{name}_vanilla_wall_s_median']:.2f} "
            f"| {summary[f'{name}_nsa_wall_s_median']:.2f} | {summary[f'{name}_wall_s_ratio_median']:.2f} "
            f"| {'' if limit is None else limit} | {'' if goal is None else goal} |"
            for tokens, layers, name, summary, limit, goal in steps
        ),
        "",
        "| tokens | attention of one layer: vanilla, s | NSA, s | NSA / vanilla |",
        "| ---: | ---: | ---: | ---: |",
        *(
            f"| {tokens} | {summary['attention_vanilla_wall_s_median']:.3f} "
            f"| {summary['attention_nsa_wall_s_median']:.3f} | {summary['attention_wall_s_ratio_median']:.2f} |"
            for tokens, summary in alone
        ),
        "",
        *_parts_md(result["lengths"]),
    ]
    return "\n".join(lines) + "\n"


def _parts_md(lengths: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table with the execution time of each part of a layer."""
    rows = [(side, part) for side, names in lengths[0]["parts"].items() for part in names]
    heads = [f"T={length['tokens']}" for length in lengths]
    return [
        f"| one layer: part, forward + backward in s | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(heads)}",
        *(
            f"| {side} {part} | {' | '.join(_both_ways(length['parts'][side][part]) for length in lengths)} |"
            for side, part in rows
        ),
    ]


def _both_ways(part: dict[str, float]) -> str:
    return f"{part['forward_wall_s']:.3f} + {part['backward_wall_s']:.3f}"


def measure_all(plan: tuple[Length, ...]) -> dict[str, Any]:
    """Measure training steps at each sequence length of `plan`, and return the times with a summary."""
    lengths = []
    for length in plan:
        repeats = 3 if length.tokens <= PRODUCTION.seq_len else 1
        split = parts(replace(PRODUCTION, layers=1, seq_len=length.tokens), repeats)
        lengths.append(measure(length) | {"parts": split})
        print(json.dumps({length.tokens: lengths[-1]["summary"]}), flush=True)
    production = [length for length in lengths if length["tokens"] == PRODUCTION.seq_len] or lengths[-1:]
    return {"threads": torch.get_num_threads(), "lengths": lengths, "summary": production[0]["summary"]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure a full step of the production shape against its control.")
    parser.add_argument("--tokens", type=int, help="measure only this length")
    parser.add_argument("--layers", type=int, help="number of layers instead of the plan's")
    parser.add_argument("--pairs", type=int, help="number of pairs of steps instead of the plan's")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of the result in --out")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, if the plan is unchanged")
    options = parser.parse_args(arguments)
    recorded_path = REPOSITORY / "benchmarks" / "results" / "nsa_step_cost.json"
    if options.table:
        print(table_md(json.loads((options.out or recorded_path).read_text(encoding="utf-8"))), end="")
        return 0
    plan = adjust_plan(PLAN, options.tokens, options.layers, options.pairs)
    result = {**measurement_context(__file__, arguments), **measure_all(plan)}
    out = options.out or (recorded_path if plan == PLAN else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table_md(result), end="")
    return int(any(over_limit(length) for length in result["lengths"]))


def adjust_plan(
    plan: tuple[Length, ...], tokens: int | None, layers: int | None, pairs: int | None
) -> tuple[Length, ...]:
    """Return the measurement plan with the given command-line options applied.

    With `tokens`, return only the entry of that length, or a new entry if the plan has none.
    """
    if tokens is not None:
        plan = tuple(length for length in plan if length.tokens == tokens) or (
            Length(tokens=tokens, layers=2, pairs=2),
        )
    return tuple(replace(length, layers=layers or length.layers, pairs=pairs or length.pairs) for length in plan)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
