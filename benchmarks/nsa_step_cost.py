"""What a full training step of the production shape costs, against the vanilla control of the same shape.

    python benchmarks/nsa_step_cost.py                       the full measurement, into benchmarks/results/
    python benchmarks/nsa_step_cost.py --pairs 2 --layers 2  a quick look at a cut

12 layers, dim 768, 2048 tokens, vocabulary 50257, float32: forward, backward, AdamW. Both models live in one process
and take turns, their order turned round from pair to pair, so that a machine that slows down hits both alike. Without
checkpointing and with it, which the shape asks for. OMP_WAIT_POLICY=PASSIVE, as the training program sets it, keeps a
busy machine from counting waiting threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.circumstances import circumstances  # noqa: E402
from nsa.config import PRODUCTION, Attention, NSAConfig  # noqa: E402
from nsa.model import Recompute, TinyLM  # noqa: E402
from nsa.parallelize import checkpoint_layers  # noqa: E402

LIMIT = 1.5
SIDES = (Attention.VANILLA, Attention.NSA)


class Training:
    """One model that trains on one sequence per step."""

    def __init__(self, config: NSAConfig) -> None:
        torch.manual_seed(0)
        self.model = TinyLM.from_config(config)
        self._optimizer = torch.optim.AdamW(self.model.parameters())
        self._tokens = torch.randint(config.vocab, (1, config.seq_len + 1))

    def step(self) -> dict[str, float]:
        """Wall and processor seconds of one full step."""
        wall, processor = time.perf_counter(), time.process_time()
        logits = self.model(self._tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}


def measure(*, layers: int, pairs: int) -> dict[str, Any]:
    shape = replace(PRODUCTION, layers=layers)
    sides = {side: Training(replace(shape, attention=side)) for side in SIDES}
    samples = {}
    for name, checkpointed in (("kept", ()), ("checkpointed", range(layers))):
        for training in sides.values():
            checkpoint_layers(training.model, checkpointed, Recompute.NON_REENTRANT)
            training.step()  # warm-up
        samples[name] = [_pair(sides, number) for number in range(pairs)]
    return {"layers": layers, "threads": torch.get_num_threads(), "samples": samples, "summary": _summary(samples)}


def _pair(sides: dict[Attention, Training], number: int) -> dict[str, Any]:
    order = SIDES if number % 2 == 0 else SIDES[::-1]
    pair: dict[str, Any] = {side.value: sides[side].step() for side in order}
    return pair | {"first": order[0].value, "load_1min": os.getloadavg()[0]}


def _summary(samples: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    ratios = {
        f"{name}_{clock}_ratio_median": statistics.median(pair["nsa"][clock] / pair["vanilla"][clock] for pair in pairs)
        for name, pairs in samples.items()
        for clock in ("wall_s", "cpu_s")
    }
    seconds = {
        f"{name}_{side.value}_wall_s_median": statistics.median(pair[side.value]["wall_s"] for pair in pairs)
        for name, pairs in samples.items()
        for side in SIDES
    }
    return ratios | seconds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure a full step of the production shape against its control.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=PRODUCTION.layers)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "nsa_step_cost.json")
    options = parser.parse_args(arguments)
    measured = measure(layers=options.layers, pairs=options.pairs)
    result = {**circumstances(__file__, arguments), "limit": LIMIT, **measured}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))
    return int(max(result["summary"][f"{name}_wall_s_ratio_median"] for name in ("kept", "checkpointed")) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
