"""What a full training step of the production shape costs, against the vanilla control of the same shape.

    python benchmarks/nsa_step_cost.py                           every length, into benchmarks/results/
    python benchmarks/nsa_step_cost.py --tokens 2048 --layers 2  a quick look at a cut, into no file without --out
    python benchmarks/nsa_step_cost.py --table                   what is recorded, as Markdown

Dim 768, vocabulary 50257, one sequence, float32: forward, backward, AdamW. Both models live in one process and take
turns, their order turned round from pair to pair, so that a machine that slows down hits both alike. The production
length runs without checkpointing and with it, which the shape asks for; long ones have two layers, as twelve would say
the same for six times the time. OMP_WAIT_POLICY=PASSIVE, as the training program sets it, keeps a busy machine from
counting waiting threads. The head of 50257 words takes most of a step of two layers and is the same on both sides, so
the attention of one layer is paired by itself too (`attention`: projections, branches, gates, forward and backward).
Where the time of a layer goes stands behind each length (nsa_parts.py).
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
from benchmarks.provenance import circumstances  # noqa: E402
from nsa_attention.attention import rotary_cos_sin, rotary_frequencies  # noqa: E402
from nsa_attention.config import PRODUCTION, Attention, NSAConfig  # noqa: E402
from nsa_attention.model import Recompute, TinyLM  # noqa: E402
from nsa_attention.parallelize import checkpoint_layers  # noqa: E402

# NSA's wall time over the control's: what it may be at most, and what it should be.
LIMITS = {2048: 1.3, 8192: 1.3}
GOALS = {2048: 1.15, 8192: 0.9, 16384: 0.75}
SIDES = (Attention.VANILLA, Attention.NSA)
CLOCKS = ("wall_s", "cpu_s")


@dataclass(frozen=True, kw_only=True)
class Length:
    """One measurement: so many tokens and layers, so many pairs of steps."""

    tokens: int
    layers: int
    pairs: int
    checkpointed: bool = False  # also with every layer run again in the backward pass


PLAN = (
    Length(tokens=512, layers=12, pairs=5),
    Length(tokens=1024, layers=12, pairs=5),
    Length(tokens=PRODUCTION.seq_len, layers=PRODUCTION.layers, pairs=5, checkpointed=True),
    Length(tokens=8192, layers=2, pairs=4),
    Length(tokens=16384, layers=2, pairs=2),
)


class Training:
    """One model that trains on one sequence per step."""

    def __init__(self, config: NSAConfig) -> None:
        torch.manual_seed(0)
        self.model = TinyLM.from_config(config)
        # The head runs on a piece of the sequence at a time: the logits of 16384 tokens would take 3.3 GB, thrice.
        self._head, self.model.head = self.model.head, nn.Identity()
        self._optimizer = torch.optim.AdamW(self.model.parameters())
        self._tokens = torch.randint(config.vocab, (1, config.seq_len + 1))

    def step(self) -> dict[str, float]:
        """Wall and processor seconds of one full step."""
        wall, processor = time.perf_counter(), time.process_time()
        hidden = self.model(self._tokens[:, :-1])
        hidden.backward(self._gradient_of_loss(hidden.detach()))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}

    def attention(self) -> dict[str, float]:
        """Wall and processor seconds of one layer's attention, forward and backward to its input and weights."""
        config, layer = self.model.config, self.model.blocks[0].attn
        cos_sin = rotary_cos_sin(rotary_frequencies(config.d_k), config.seq_len)
        x = torch.randn(1, config.seq_len, config.dim, requires_grad=True)
        upstream = torch.randn_like(x)
        wall, processor = time.perf_counter(), time.process_time()
        torch.autograd.grad(layer(x, cos_sin), [x, *layer.parameters()], upstream)
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}

    def _gradient_of_loss(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the mean over all tokens. The head's own gradient is added to its weight."""
        leaf = hidden.requires_grad_()
        targets = self._tokens[:, 1:]
        for piece, target in zip(leaf.split(HEAD_TOKENS, 1), targets.split(HEAD_TOKENS, 1), strict=True):
            logits = self._head(piece).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, target.flatten(), reduction="sum") / targets.numel()
            loss.backward()
        assert leaf.grad is not None
        return leaf.grad


def measure(length: Length) -> dict[str, Any]:
    """Samples and summary of one length."""
    shape = replace(PRODUCTION, layers=length.layers, seq_len=length.tokens)
    sides = {side: Training(replace(shape, attention=side)) for side in SIDES}
    samples = {}
    for name in ("kept", "checkpointed") if length.checkpointed else ("kept",):
        again = range(length.layers) if name == "checkpointed" else ()
        for training in sides.values():
            checkpoint_layers(training.model, again, Recompute.NON_REENTRANT)
            training.step()  # warm-up
        samples[name] = [_pair(sides, number, Training.step) for number in range(length.pairs)]
    for training in sides.values():
        training.attention()  # warm-up
    samples["attention"] = [_pair(sides, number, Training.attention) for number in range(2 * length.pairs)]
    return {
        "tokens": length.tokens,
        "layers": length.layers,
        "limit": LIMITS.get(length.tokens),
        "goal": GOALS.get(length.tokens),
        "samples": samples,
        "summary": _summary(samples),
    }


def _pair(
    sides: dict[Attention, Training], number: int, measured: Callable[[Training], dict[str, float]]
) -> dict[str, Any]:
    order = SIDES if number % 2 == 0 else SIDES[::-1]
    pair: dict[str, Any] = {side.value: measured(sides[side]) for side in order}
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


def over_limit(measured: dict[str, Any]) -> list[str]:
    """The modes of one length whose ratio of wall time is above the length's limit, which is one of whole steps."""
    limit = measured["limit"]
    ratios = {name: measured["summary"][f"{name}_wall_s_ratio_median"] for name in _of_steps(measured)}
    return [name for name, ratio in ratios.items() if limit is not None and ratio > limit]


def _of_steps(length: dict[str, Any]) -> list[str]:
    return [name for name in length["samples"] if name != "attention"]


def table_md(result: dict[str, Any]) -> str:
    """The recorded result as Markdown tables: whole steps, one layer's attention alone, and the parts of one layer."""
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
    """One row for each part, one column for each length: seconds forward + backward."""
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
    """Every length with its parts. The summary is that of the production length, or of the last one without it."""
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
    parser.add_argument("--tokens", type=int, help="this length alone")
    parser.add_argument("--layers", type=int, help="so many layers instead of the plan's")
    parser.add_argument("--pairs", type=int, help="so many pairs of steps instead of the plan's")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of what --out holds")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, if nothing of the plan is changed")
    options = parser.parse_args(arguments)
    recorded = REPOSITORY / "benchmarks" / "results" / "nsa_step_cost.json"
    if options.table:
        print(table_md(json.loads((options.out or recorded).read_text(encoding="utf-8"))), end="")
        return 0
    plan = changed(PLAN, options.tokens, options.layers, options.pairs)
    result = {**circumstances(__file__, arguments), **measure_all(plan)}
    out = options.out or (recorded if plan == PLAN else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table_md(result), end="")
    return int(any(over_limit(length) for length in result["lengths"]))


def changed(plan: tuple[Length, ...], tokens: int | None, layers: int | None, pairs: int | None) -> tuple[Length, ...]:
    """The plan, or its entry of this length (a new one if it has none), with these layers and pairs."""
    if tokens is not None:
        plan = tuple(one for one in plan if one.tokens == tokens) or (Length(tokens=tokens, layers=2, pairs=2),)
    return tuple(replace(one, layers=layers or one.layers, pairs=pairs or one.pairs) for one in plan)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
