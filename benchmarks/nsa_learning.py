"""Compare how fast models with NSA and with vanilla attention learn: at equal tokens and at equal processor time.

    python benchmarks/nsa_learning.py           train, and write the result and its plot
    python benchmarks/nsa_learning.py --plot    draw the plot of the recorded result again

Both train on the shipped stories, with the same batches in the same order, and are evaluated every 25 steps on stories
that are not among them. Evaluations are not counted as processor time. The last held-out loss with NSA may be at most
five percent above that with vanilla attention.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from nsa_attention.config import CI  # noqa: E402
from nsa_attention.data.stories import SHARDS, STORIES_OF_SHARD, story  # noqa: E402

LIMIT = 0.05
SEEDS = (0, 1)
SIDES = ("vanilla", "nsa")
RESULT = REPOSITORY / "benchmarks" / "results" / "nsa_learning.json"
PLOT = REPOSITORY / "docs" / "images" / "nsa-learning.svg"
TOKENS_PER_STEP = CI.batch * CI.seq_len
_EVALUATED_EVERY = 25
_HELD_OUT_STORIES = 100

Curve = list[dict[str, float]]  # evaluations: tokens and processor seconds of the training so far, held-out loss


def curve(attention: str, seed: int, steps: int) -> Curve:
    """Train with nsa_attention.train, and return its evaluations."""
    with tempfile.TemporaryDirectory() as directory:
        held_out, out = Path(directory) / "held_out.txt", Path(directory) / "out"
        first = SHARDS * STORIES_OF_SHARD
        held_out.write_text("\n".join(map(story, range(first, first + _HELD_OUT_STORIES))), encoding="utf-8")
        options = {
            "attention": attention, "seed": seed, "steps": steps, "data": "stories", "out-dir": out,
            "eval-data": held_out, "eval-every": _EVALUATED_EVERY, "eval-batches": 16,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        program = [sys.executable, str(REPOSITORY / "nsa" / "nsa_attention"), *words]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        cpu_s = list(accumulate(float(row["cpu_s"]) for row in _rows(out / "training.csv")))
        return [
            {
                "tokens": int(row["step"]) * TOKENS_PER_STEP,
                "cpu_s": round(cpu_s[int(row["step"]) - 1], 2),
                "loss": float(row["loss"]),
            }
            for row in _rows(out / "evaluation.csv")
        ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def measure(steps: int) -> dict[str, Any]:
    """Train both models with each seed, and return their curves with a summary."""
    samples = [{"seed": seed, **{side: curve(side, seed, steps) for side in SIDES}} for seed in SEEDS]
    return {"samples": samples, "summary": [summary(sample) for sample in samples]}


def summary(sample: dict[str, Any]) -> dict[str, float]:
    """Return the held-out losses of a seed after equal numbers of tokens, and after equal processor time."""
    curves: dict[str, Curve] = {side: sample[side] for side in SIDES}
    ends = {side: found[-1] for side, found in curves.items()}
    cpu_s = min(end["cpu_s"] for end in ends.values())
    at_equal_time = {side: loss_at(found, cpu_s) for side, found in curves.items()}
    return {
        "seed": sample["seed"],
        "tokens": ends["nsa"]["tokens"],
        **{f"{side}_loss_at_equal_tokens": end["loss"] for side, end in ends.items()},
        "excess_at_equal_tokens": ends["nsa"]["loss"] / ends["vanilla"]["loss"] - 1,
        "cpu_s": cpu_s,
        **{f"{side}_loss_at_equal_time": loss for side, loss in at_equal_time.items()},
        "excess_at_equal_time": at_equal_time["nsa"] / at_equal_time["vanilla"] - 1,
        "cpu_ratio": ends["nsa"]["cpu_s"] / ends["vanilla"]["cpu_s"],
    }


def loss_at(found: Curve, cpu_s: float) -> float:
    """Return the loss after so much processor time, on the straight line between two evaluations."""
    for before, after in pairwise(found):
        if before["cpu_s"] <= cpu_s <= after["cpu_s"]:
            share = (cpu_s - before["cpu_s"]) / (after["cpu_s"] - before["cpu_s"])
            return before["loss"] + share * (after["loss"] - before["loss"])
    return found[-1]["loss"] if cpu_s > found[-1]["cpu_s"] else found[0]["loss"]


_COLORS = {"vanilla": "#b45309", "nsa": "#2563eb"}
_NAMES = {"vanilla": "full causal attention", "nsa": "NSA"}
_LEFT, _TOP, _PANEL, _HEIGHT, _GAP = 48, 36, 380, 240, 40


def plot(samples: Sequence[dict[str, Any]]) -> str:
    """Return an SVG picture: the held-out loss over tokens (left) and over processor time (right)."""
    box = f"{2 * _PANEL + _GAP + _LEFT + 16} {_TOP + _HEIGHT + 52}"
    points = [point for sample in samples for side in SIDES for point in sample[side]]
    low, high = (choose(point["loss"] for point in points) for choose in (min, max))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}" font-family="sans-serif" font-size="12" '
        'role="img" aria-label="Held-out loss of NSA and full causal attention">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for place, side in enumerate(SIDES):
        x = _LEFT + 190 * place
        parts.append(f'<line x1="{x}" y1="16" x2="{x + 24}" y2="16" stroke="{_COLORS[side]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="20">{_NAMES[side]}</text>')
    for number, (key, label) in enumerate((("tokens", "tokens"), ("cpu_s", "processor time, s"))):
        left = _LEFT + number * (_PANEL + _GAP)
        parts += _panel(samples, key, label, left, (low, high))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    samples: Sequence[dict[str, Any]], key: str, label: str, left: int, losses: tuple[float, float]
) -> list[str]:
    most = max(sample[side][-1][key] for sample in samples for side in SIDES)
    x_of = _scale(0.0, most, left, left + _PANEL)
    y_of = _scale(*losses, _TOP + _HEIGHT, _TOP)
    parts = []
    for loss in range(int(losses[0]) + 1, int(losses[1]) + 1):
        parts.append(
            f'<line x1="{left}" y1="{y_of(loss):.1f}" x2="{left + _PANEL}" y2="{y_of(loss):.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y_of(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        x, y = left + share * _PANEL, _TOP + _HEIGHT + 18
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{share * most:,.0f}</text>')
    parts.append(f'<text x="{left + _PANEL / 2}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle">{label}</text>')
    for sample in samples:
        for side in SIDES:
            line = " ".join(f"{x_of(point[key]):.1f},{y_of(point['loss']):.1f}" for point in sample[side])
            parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLORS[side]}" stroke-width="1.5"/>')
    return parts


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the learning curves of NSA and vanilla attention.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=RESULT, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, nargs="?", const=PLOT, help="train nothing, draw the result in --out")
    options = parser.parse_args(arguments)
    if options.plot is None:
        result = {**measurement_context(__file__, arguments), "limit": LIMIT, **measure(options.steps)}
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    stored = json.loads(options.out.read_text(encoding="utf-8"))
    if options.plot is not None or options.out == RESULT:
        (options.plot or PLOT).write_text(plot(stored["samples"]), encoding="utf-8")
    print(json.dumps(stored["summary"], indent=1))
    return int(max(each["excess_at_equal_tokens"] for each in stored["summary"]) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
